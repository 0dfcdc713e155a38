"""Llama-like models with mixtures of experts: Mixtral, OLMoE, Qwen2-MoE and Qwen3-MoE."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megatron.checkpoint.huggingface import rules
from megatron.checkpoint.huggingface.llama import LlamaLike
from megatron.checkpoint.huggingface.settings import Settings
from megatron.config.experts import MAX_EXPERTS, mixture_layers
from megatron.config.model import ModelConfig
from megatron.config.patterns import layer_pattern

_MAX_TOTAL_EXPERTS = 1 << 18  # experts of all layers; the largest models have about twenty thousand
_MIXTRAL = {
    "mlp.router": ("block_sparse_moe.gate",),
    "mlp.experts.up": ("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3"),
    "mlp.experts.down": ("block_sparse_moe.experts.{}.w2",),
}
_OLMOE = {
    "mlp.router": ("mlp.gate",),
    "mlp.experts.up": ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj"),
    "mlp.experts.down": ("mlp.experts.{}.down_proj",),
}
_QWEN = {
    **_OLMOE,
    "mlp.shared.up": ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
    "mlp.shared.down": ("mlp.shared_expert.down_proj",),
    "mlp.shared_gate": ("mlp.shared_expert_gate",),
}


def max_experts(layers: int) -> int:
    """Return the limit on the number of experts per layer in a network that a file describes."""
    return min(MAX_EXPERTS, _MAX_TOTAL_EXPERTS // layers)


def read_groups(
    settings: Settings, experts: int, chosen: int, counted: int, default: int | None = None
) -> dict[str, Any]:
    """Return the flags for groups of experts. Each token's experts come from its best groups.

    Args:
        settings: The keys of config.json.
        experts: The number of experts.
        chosen: The number of experts chosen for each token.
        counted: The number of a group's experts whose scores are added up to score the group.
        default: The number of groups, and of chosen groups, if the file does not specify them.
            `None` means that the file must.

    Returns:
        The flags; {} if there is a single group.

    Raises:
        CheckpointError: The numbers are missing or invalid, or do not fit the experts.
    """
    groups = settings.size("n_group", default, experts)
    best = settings.size("topk_group", default, groups)
    each = experts // groups
    if experts % groups or counted > each or chosen > best * each:
        raise settings.error(
            "n_group", f"does not fit {experts} experts, of which {chosen} are chosen"
        )
    if groups == 1:
        return {}
    return {
        "moe_router_num_groups": groups,
        "moe_router_group_topk": best,
        "moe_router_group_score_topk": counted,
    }


def written_groups(model: ModelConfig, experts: int, chosen: int) -> tuple[int, int]:
    """Return the numbers of groups and of chosen groups; 1 and 1 if they do not fit the experts.

    Args:
        model: The network.
        experts: The number of experts in the file, at least 2.
        chosen: The number of experts chosen for each token, in the file.
    """
    groups, best = model.moe_router_num_groups or 1, model.moe_router_group_topk or 1
    fits = 2 * groups <= experts and not experts % groups and best <= groups
    return (groups, best) if fits and chosen <= best * (experts // groups) else (1, 1)


@dataclass(frozen=True)
class Mixtral(LlamaLike):
    """A family whose layers are all SwiGLU mixtures, with a softmax over the chosen experts.

    Attributes:
        mixture: The Hugging Face modules in a mixture, by native module name. {} stands for
            the index of an expert.
        count: The key of config.json with the number of experts.
        other_count: The key that other versions of `transformers` use for the number of experts.
    """

    mixture: Mapping[str, Sequence[str]] = field(default_factory=lambda: _MIXTRAL)
    count: str = "num_local_experts"
    other_count: str = "num_experts"

    def network(self, settings: Settings, flags: dict[str, Any]) -> ModelConfig:
        """Return the network that a config.json describes."""
        dense = super().network(settings, flags)
        is_other = self.other_count in settings.values and self.count not in settings.values
        count = self.other_count if is_other else self.count
        experts = settings.size(count, None, max_experts(dense.num_layers))
        for key in (self.count, self.other_count):
            settings.must_be(key, experts)
        return replace(
            dense,
            num_experts=(experts,),
            moe_router_topk=settings.size("num_experts_per_tok", None, experts),
        )

    def write(self, model: ModelConfig, vocab: int) -> dict[str, Any]:
        """Return the content of config.json. A dense network becomes a mixture of one expert."""
        experts = max(model.num_experts or (1,))
        return {
            **super().write(model, vocab),
            "intermediate_size": model.moe_ffn_hidden_size or model.ffn_hidden_size,
            self.count: experts,
            "num_experts_per_tok": min(model.moe_router_topk, experts),
        }

    def modules(self, model: ModelConfig) -> Mapping[str, Sequence[str]]:
        """Return the Hugging Face modules in a layer, by native module name."""
        experts = max(model.num_experts or (0,))
        return {**super().modules(model), **rules.expert_names(self.mixture, experts)}


@dataclass(frozen=True)
class Olmoe(Mixtral):
    """OLMoE, which normalizes the queries of all heads together, and likewise the keys.

    The normalizations have hidden_size channels, so the head size must be hidden_size / heads.
    """

    mixture: Mapping[str, Sequence[str]] = field(default_factory=lambda: _OLMOE)
    count: str = "num_experts"
    other_count: str = "num_local_experts"

    def network(self, settings: Settings, flags: dict[str, Any]) -> ModelConfig:
        """Return the network that a config.json describes."""
        if "clip_qkv" in settings.values:
            raise settings.error("clip_qkv", "clipped queries, keys and values are not supported")
        settings.must_be("head_dim", flags["hidden_size"] // flags["num_attention_heads"])
        pre_softmax = not settings.boolean("norm_topk_prob", False)
        return replace(super().network(settings, flags), moe_router_pre_softmax=pre_softmax)

    def write(self, model: ModelConfig, vocab: int) -> dict[str, Any]:
        """Return the content of config.json. A dense network becomes a mixture of one expert."""
        values = super().write(model, vocab)
        del values["head_dim"]
        return {**values, "clip_qkv": None, "norm_topk_prob": not model.moe_router_pre_softmax}


@dataclass(frozen=True)
class QwenMixture(Mixtral):
    """A family that may have dense layers among its mixtures, and a shared expert.

    Attributes:
        shared: Whether every token also passes through a shared expert with a gate.
    """

    mixture: Mapping[str, Sequence[str]] = field(default_factory=lambda: _QWEN)
    count: str = "num_experts"
    other_count: str = "num_local_experts"
    shared: bool = False

    def network(self, settings: Settings, flags: dict[str, Any]) -> ModelConfig:
        """Return the network that a config.json describes."""
        model = super().network(settings, flags)
        if self.shared:
            width = settings.size("shared_expert_intermediate_size")
            model = replace(
                model,
                moe_shared_expert_intermediate_size=width,
                moe_shared_expert_gate=True,
                add_qkv_bias=settings.boolean("qkv_bias", self.qkv_bias),
            )
        step = settings.size("decoder_sparse_step", 1)
        dense = {*settings.indices("mlp_only_layers", model.num_layers)}
        kinds = [
            (layer + 1) % step == 0 and layer not in dense for layer in range(model.num_layers)
        ]
        return replace(
            model,
            moe_ffn_hidden_size=settings.size("moe_intermediate_size"),
            moe_router_pre_softmax=not settings.boolean("norm_topk_prob", False),
            moe_layer_freq="1" if all(kinds) else layer_pattern(kinds),
        )

    def write(self, model: ModelConfig, vocab: int) -> dict[str, Any]:
        """Return the content of config.json. A dense network becomes a mixture of one expert."""
        kinds = mixture_layers(model, model.num_layers) if model.num_experts else ()
        shared = {
            "shared_expert_intermediate_size": model.moe_shared_expert_intermediate_size or 1,
            "qkv_bias": model.add_qkv_bias,
        }
        return {
            **super().write(model, vocab),
            "intermediate_size": model.ffn_hidden_size,
            "moe_intermediate_size": model.moe_ffn_hidden_size or model.ffn_hidden_size,
            "norm_topk_prob": not model.moe_router_pre_softmax,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [layer for layer, is_mixture in enumerate(kinds) if not is_mixture],
            **(shared if self.shared else {}),
        }
