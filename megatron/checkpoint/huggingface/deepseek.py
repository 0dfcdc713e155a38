"""DeepSeek-V2 and DeepSeek-V3: latent attention, and mixtures with shared experts."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import megatron.models.plan as plans
from megatron.checkpoint.huggingface import rules
from megatron.checkpoint.huggingface.mixtures import Mixtral, read_groups, written_groups
from megatron.checkpoint.huggingface.settings import MAX_HEADS, Settings
from megatron.config.experts import mixture_layers
from megatron.config.model import ModelConfig
from megatron.config.multi_token import MAX_DEPTHS

_EPSILON = 1e-6  # `transformers` always normalizes latent vectors with this epsilon
_SIZES = (
    rules.Key("kv_lora_rank", "kv_lora_rank"),
    rules.Key("qk_nope_head_dim", "qk_head_dim", max_value=MAX_HEADS),
    rules.Key("qk_rope_head_dim", "qk_pos_emb_head_dim", max_value=MAX_HEADS),
    rules.Key("v_head_dim", "v_head_dim", max_value=MAX_HEADS),
)
_ATTENTION = {
    "attention.query_norm": ("self_attn.q_a_layernorm",),
    "attention.latent_down": ("self_attn.kv_a_proj_with_mqa",),
    "attention.latent_norm": ("self_attn.kv_a_layernorm",),
    "attention.latent_up": ("self_attn.kv_b_proj",),
    "attention.output": ("self_attn.o_proj",),
    "attention_norm": ("input_layernorm",),
    "mlp_norm": ("post_attention_layernorm",),
}
_MIXTURE = {
    "mlp.router": ("mlp.gate",),
    "mlp.experts.up": ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj"),
    "mlp.experts.down": ("mlp.experts.{}.down_proj",),
    "mlp.shared.up": ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
    "mlp.shared.down": ("mlp.shared_experts.down_proj",),
}
_BIAS = {"mlp.router.expert_bias": ("mlp.gate.e_score_correction_bias",)}
# Keys in the authors' files that describe their code or training.
_TRAINING_KEYS = ("auto_map", "aux_loss_alpha", "ep_size", "seq_aux")
_DEPTHS = "num_nextn_predict_layers"
# The modules around the transformer layer of a multi-token prediction layer.
_AHEAD = {
    "embedding_norm": "enorm",
    "hidden_norm": "hnorm",
    "projection": "eh_proj",
    "final_norm": "shared_head.norm",
}


def partly_rotated(size: int, rotated: int) -> rules.TensorConversion:
    """Return the conversion of a projection in which the last channels of each head rotate.

    Hugging Face rotates channels 2i and 2i + 1 together, whereas we rotate i and i + rotated / 2.

    Args:
        size: The number of rows of each head.
        rotated: The number of rows at the end of each head that rotate.
    """
    order = rules.halves(size, range(size - rotated, size))
    return rules.TensorConversion(
        lambda parts: rules.by_head(parts[0], order),
        lambda whole: [rules.by_head(whole, order.argsort())],
    )


@dataclass(frozen=True)
class DeepSeek(Mixtral):
    """A family with latent attention, and mixtures in all layers after the first few.

    Attributes:
        biased: Whether experts are scored by sigmoids and chosen with a bias per expert (V3),
            instead of by a softmax over all experts (V2).
    """

    mixture: Mapping[str, Sequence[str]] = field(default_factory=lambda: _MIXTURE)
    count: str = "n_routed_experts"
    other_count: str = "num_local_experts"
    whole_names: tuple[str, ...] = ("e_score_correction_bias",)
    biased: bool = False

    def network(self, settings: Settings, flags: dict[str, Any]) -> ModelConfig:
        """Return the network that a config.json describes."""
        sizes = rules.read_keys(settings, _SIZES)
        rotary_size = sizes["qk_pos_emb_head_dim"]
        if rotary_size % 2:
            raise settings.error("qk_rope_head_dim", "channels rotate in pairs: must be even")
        for key, value in {
            "rms_norm_eps": _EPSILON,
            "head_dim": rotary_size,
            "qk_head_dim": sizes["qk_head_dim"] + rotary_size,
            "num_key_value_heads": flags["num_attention_heads"],
            "rope_interleave": True,
            "moe_layer_freq": 1,
            "scoring_func": "sigmoid" if self.biased else "softmax",
            "norm_topk_prob": self.biased,
        }.items():
            settings.must_be(key, value)
        settings.ignore(*_TRAINING_KEYS)
        for key in ("rope_parameters", "rope_scaling"):
            _check_yarn(settings.section(key))
        query_rank = None
        if "q_lora_rank" in settings.values:
            query_rank = settings.size("q_lora_rank")
        model = replace(
            super().network(settings, flags),
            **sizes,
            multi_latent_attention=True,
            q_lora_rank=query_rank,
            kv_channels=max(sizes["qk_head_dim"] + rotary_size, sizes["v_head_dim"]),
            qk_layernorm=True,
        )
        if settings.values.get(_DEPTHS):
            model = replace(model, mtp_num_layers=settings.size(_DEPTHS, None, MAX_DEPTHS))
        else:
            settings.ignore(_DEPTHS)  # 0 or absent
        return self._read_mixture(settings, model)

    def without_missing_layers(self, names: Collection[str], model: ModelConfig) -> ModelConfig:
        """Return the network, without multi-token prediction if the files lack its layers.

        `transformers` drops these layers when it saves a model.

        Args:
            names: The names of the files' tensors.
            model: The network that config.json describes.
        """
        end = f"layers.{model.num_layers}."
        if any(name.removeprefix("model.").startswith(end) for name in names):
            return model
        return replace(model, mtp_num_layers=None)

    def names(self, model: ModelConfig) -> rules.Names:
        """Yield each of our modules with the corresponding Hugging Face modules, in file order.

        Layers of multi-token prediction come last. In the files, each of them repeats the word
        embedding and the output.
        """
        yield from super().names(model)
        modules = self.modules(model)
        for depth in range(model.mtp_num_layers or 0):
            hf_prefix = f"model.layers.{model.num_layers + depth}"
            yield from rules.layer_names(f"mtp.{depth}.layer", hf_prefix, modules)
            for prefix, name in _AHEAD.items():
                yield f"mtp.{depth}.{prefix}", [f"{hf_prefix}.{name}"]
            yield "embedding.word", [f"{hf_prefix}.embed_tokens"]
            yield "output", [f"{hf_prefix}.shared_head.head"]

    def _read_mixture(self, settings: Settings, model: ModelConfig) -> ModelConfig:
        """Return the network with its mixtures of experts.

        Args:
            settings: The keys of config.json.
            model: The network. Of its mixtures, only the number of experts, and how many of them
                each token uses, are set.
        """
        experts, layers = max(model.num_experts or (1,)), model.num_layers
        inner = settings.size("moe_intermediate_size")
        shared = settings.size("n_shared_experts")
        groups: dict[str, Any] = self._read_groups(settings, experts, model.moe_router_topk)
        # The defaults here and below are those of `transformers`.
        scale = settings.number("routed_scaling_factor", 2.5 if self.biased else 1.0)
        if self.biased and model.moe_router_topk < 2:
            raise settings.error(
                "num_experts_per_tok", "only 2 or more are supported: scores are normalized"
            )
        dense = 3 if self.biased else 0
        if settings.values.get("first_k_dense_replace", dense) == 0:
            settings.must_be("first_k_dense_replace", 0)
            dense = 0
        else:
            dense = settings.size("first_k_dense_replace", dense)
        if dense >= layers:
            return replace(model, num_experts=None)
        return replace(
            model,
            **groups,
            moe_layer_freq=f"([0]*{dense}+[1]*{layers - dense})" if dense else "1",
            moe_ffn_hidden_size=inner,
            moe_shared_expert_intermediate_size=shared * inner,
            moe_router_score_function="sigmoid" if self.biased else "softmax",
            moe_router_pre_softmax=not self.biased,
            moe_router_enable_expert_bias=self.biased,
            moe_router_topk_scaling_factor=None if scale == 1 else scale,
        )

    def _read_groups(self, settings: Settings, experts: int, chosen: int) -> dict[str, Any]:
        """Return the flags for groups of experts.

        V2 scores a group by its best expert, V3 by the sum of its best two.

        Args:
            settings: The keys of config.json.
            experts: The number of experts.
            chosen: The number of experts chosen for each token.
        """
        is_limited = self.biased
        if not self.biased:
            is_limited = settings.choice(
                "topk_method", {"greedy": False, "group_limited_greedy": True}, "greedy"
            )
        else:
            settings.must_be("topk_method", "noaux_tc")
        if not is_limited:
            settings.ignore("n_group", "topk_group")
            return {}
        return read_groups(settings, experts, chosen, counted=2 if self.biased else 1)

    def write(self, model: ModelConfig, vocab: int) -> dict[str, Any]:
        """Return the content of config.json for a network.

        For a dense network, first_k_dense_replace is the number of layers.

        Args:
            model: The network.
            vocab: Number of rows of the word embedding.
        """
        values = super().write(model, vocab)
        scaling = values["rope_scaling"]
        if scaling and not scaling.get("mscale", 1):
            del scaling["mscale"], scaling["mscale_all_dim"]
        kinds = mixture_layers(model, model.num_layers) if model.num_experts else ()
        dense = kinds.index(True) if any(kinds) else model.num_layers
        experts = max(2, *(model.num_experts or (2,)))
        inner = model.moe_ffn_hidden_size or model.ffn_hidden_size
        chosen = min(max(model.moe_router_topk, 1 + self.biased), experts)
        groups, best = written_groups(model, experts, chosen)
        is_limited = self.biased or groups > 1
        rotary_size = model.qk_pos_emb_head_dim // 2 * 2 or 2
        return {
            **values,
            **{key.key: getattr(model, key.field) for key in _SIZES},
            "rms_norm_eps": _EPSILON,
            "num_key_value_heads": model.num_attention_heads,
            "q_lora_rank": model.q_lora_rank,
            "qk_rope_head_dim": rotary_size,
            "head_dim": rotary_size,
            "qk_head_dim": model.qk_head_dim + rotary_size,
            **({"rope_interleave": True} if self.biased else {}),
            "intermediate_size": model.ffn_hidden_size,
            "moe_intermediate_size": inner,
            "first_k_dense_replace": dense,
            self.count: experts,
            "num_experts_per_tok": chosen,
            "n_shared_experts": max(1, (model.moe_shared_expert_intermediate_size or 0) // inner),
            "n_group": groups if is_limited else None,
            "topk_group": best if is_limited else None,
            "norm_topk_prob": self.biased,
            "routed_scaling_factor": model.moe_router_topk_scaling_factor or 1.0,
            **({_DEPTHS: model.mtp_num_layers} if model.mtp_num_layers else {}),
            **({} if self.biased else {"topk_method": _METHODS[is_limited]}),
        }

    def modules(self, model: ModelConfig) -> Mapping[str, Sequence[str]]:
        """Return the Hugging Face modules in a layer, by native module name."""
        query: dict[str, tuple[str, ...]] = {"attention.query_up": ("self_attn.q_proj",)}
        if model.q_lora_rank is not None:
            query = {
                "attention.query_down": ("self_attn.q_a_proj",),
                "attention.query_up": ("self_attn.q_b_proj",),
            }
        inherited = super().modules(model)
        mlp = {name: modules for name, modules in inherited.items() if name.startswith("mlp.")}
        return {**query, **_ATTENTION, **mlp, **(_BIAS if self.biased else {})}

    def conversion(
        self, layer: plans.LayerPlan, module: str, tensors: int
    ) -> rules.TensorConversion:
        """Return the conversion between Hugging Face tensors and the parameters of a module."""
        mixer = layer.mixer
        if isinstance(mixer, plans.LatentAttentionPlan):
            if module == "attention.query_up":
                return partly_rotated(mixer.key_size, mixer.rope_size)
            if module == "attention.latent_down":
                return partly_rotated(mixer.rank + mixer.rope_size, mixer.rope_size)
        return super().conversion(layer, module, tensors)


_METHODS = {False: "greedy", True: "group_limited_greedy"}


def _check_yarn(rope: Settings) -> None:
    """Refuse combinations of YaRN keys that our flags cannot express.

    Raises:
        CheckpointError: mscale_all_dim is given without mscale, or together with attention_factor.
    """
    if not rope.values.get("mscale_all_dim"):
        return
    if not rope.values.get("mscale"):
        raise rope.error("mscale_all_dim", "is supported only together with mscale")
    if rope.values.get("attention_factor"):
        raise rope.error("attention_factor", "is not supported together with mscale_all_dim")
