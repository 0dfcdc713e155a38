"""Mamba-2, and Nemotron-H, whose layers are Mamba-2, attention, MLPs or mixtures of experts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import megatron.models.plan as plans
from megatron.checkpoint.huggingface import rules
from megatron.checkpoint.huggingface.mixtures import max_experts, read_groups, written_groups
from megatron.checkpoint.huggingface.settings import MAX_HEADS, MAX_LAYERS, Settings
from megatron.config.hybrid import ATTENTION, MAMBA, MIXTURE, MLP, layer_symbols, pattern_parts
from megatron.config.model import ModelConfig
from megatron.config.patterns import layer_pattern
from megatron.models.recurrent_plan import MambaPlan

_CONVOLUTION = 4  # tokens, as in Megatron Core
_POSITIONS = 8192  # the context length of a model without attention, whose files do not state one
_PREFIX = "backbone."
# Keys of both families that do not change what the network computes.
_WITHOUT_EFFECT = (
    *("chunk_size", "rescale_prenorm_residual", "residual_in_fp32"),
    *("time_step_floor", "time_step_max", "time_step_min"),
)
_FIXED = {"conv_kernel": _CONVOLUTION, "use_bias": False, "use_conv_bias": True}
# The values of time_step_limit that mean "no limit" in different versions of `transformers`.
_NO_LIMIT = (None, [0.0, math.inf], [0.0, {"__float__": "Infinity"}])
_MAMBA = {
    "attention_norm": ("norm",),
    "attention.input": ("mixer.in_proj",),
    "attention.convolution": ("mixer.conv1d",),
    "attention.decay": ("mixer.A_log",),
    "attention.skip": ("mixer.D",),
    "attention.time_step": ("mixer.dt_bias",),
    "attention.norm": ("mixer.norm",),
    "attention.output": ("mixer.out_proj",),
}
_ATTENTION = {
    "attention_norm": ("norm",),
    "attention.qkv": ("mixer.q_proj", "mixer.k_proj", "mixer.v_proj"),
    "attention.output": ("mixer.o_proj",),
}
_MLP = {
    "mlp_norm": ("norm",),
    "mlp.up": ("mixer.up_proj",),
    "mlp.down": ("mixer.down_proj",),
}
_MIXTURE = {
    "mlp_norm": ("norm",),
    "mlp.router": ("mixer.gate",),
    "mlp.router.expert_bias": ("mixer.gate.e_score_correction_bias",),
    "mlp.experts.up": ("mixer.experts.{}.up_proj",),
    "mlp.experts.down": ("mixer.experts.{}.down_proj",),
    "mlp.shared.up": ("mixer.shared_experts.up_proj",),
    "mlp.shared.down": ("mixer.shared_experts.down_proj",),
}
_MODULES: Mapping[str, Mapping[str, Sequence[str]]] = {
    MAMBA: _MAMBA,
    ATTENTION: _ATTENTION,
    MLP: _MLP,
    MIXTURE: _MIXTURE,
}


def by_group(groups: int, widths: Sequence[int]) -> rules.TensorConversion:
    """Return the conversion of a weight whose rows are ordered by projection in files.

    In our weight, they are ordered by group.

    Args:
        groups: The number of groups.
        widths: The number of rows of each projection.
    """
    shares = [width // groups for width in widths]

    def join(parts: Sequence[Tensor]) -> Tensor:
        pieces = [part.unflatten(0, (groups, -1)) for part in parts[0].split(list(widths))]
        return torch.cat(pieces, dim=1).flatten(0, 1)

    def split(whole: Tensor) -> list[Tensor]:
        pieces = whole.unflatten(0, (groups, -1)).split(shares, dim=1)
        return [torch.cat([part.flatten(0, 1) for part in pieces])]

    return rules.TensorConversion(join, split)


def convolution(groups: int, widths: Sequence[int]) -> rules.TensorConversion:
    """Return the conversion of a convolution whose channels are ordered by projection in files.

    In our tensors, they are ordered by group. The weight is [c, 1, k] in files and [c, k] in our
    model. The bias is [c].

    Args:
        groups: The number of groups.
        widths: The number of channels of each convolved projection. Their sum is c.
    """
    conversion = by_group(groups, widths)

    def join(parts: Sequence[Tensor]) -> Tensor:
        return conversion.join([part.squeeze(1) if part.dim() == 3 else part for part in parts])

    def split(whole: Tensor) -> list[Tensor]:
        (rows,) = conversion.split(whole)
        return [rows.unsqueeze(1) if rows.dim() == 2 else rows]

    return rules.TensorConversion(join, split)


@dataclass(frozen=True)
class Mamba2(rules.Family):
    """The Mamba-2 family, whose layers are all Mamba-2 mixers."""

    prefix: str = _PREFIX
    tied: bool | None = False
    whole_names: tuple[str, ...] = (".A_log", ".D", ".dt_bias", "e_score_correction_bias")
    keys: tuple[rules.Key, ...] = (
        rules.Key("hidden_size", "hidden_size"),
        rules.Key("num_hidden_layers", "num_layers", max_value=MAX_LAYERS),
        rules.Key("layer_norm_epsilon", "norm_epsilon", "number", 1e-5),
        rules.Key("num_heads", "mamba_num_heads", max_value=MAX_HEADS),
        rules.Key("head_dim", "mamba_head_dim", max_value=MAX_HEADS),
        rules.Key("n_groups", "mamba_num_groups", default=8),
        rules.Key("state_size", "mamba_state_dim", default=128),
    )
    fixed: Mapping[str, Any] = field(
        default_factory=lambda: {**_FIXED, "hidden_act": "silu", "rms_norm": True}
    )

    def network(self, settings: Settings, flags: dict[str, Any]) -> ModelConfig:
        """Return the network that a config.json describes."""
        hidden = flags["hidden_size"]
        settings.ignore(*_WITHOUT_EFFECT, "norm_before_gate", "time_step_rank")
        expand = settings.size("expand", 2)
        if hidden * expand != flags["mamba_num_heads"] * flags["mamba_head_dim"]:
            raise settings.error("expand", "times hidden_size is not num_heads times head_dim")
        return ModelConfig(
            **flags,
            **_read_mamba(settings, "num_heads", flags),
            hybrid_layer_pattern=MAMBA * flags["num_layers"],
            ffn_hidden_size=4 * hidden,
            num_attention_heads=1,
            kv_channels=hidden,
            max_position_embeddings=_POSITIONS,
            hidden_dropout=0.0,
        )

    def write(self, model: ModelConfig, vocab: int) -> dict[str, Any]:
        """Return the content of config.json for a network."""
        heads, size = model.mamba_num_heads or 1, model.mamba_head_dim
        if heads * size % model.hidden_size:  # the family cannot express such heads
            heads, size = 1, model.hidden_size
        return {
            **super().write(model, vocab),
            "conv_kernel": _CONVOLUTION,
            "num_heads": heads,
            "head_dim": size,
            "expand": heads * size // model.hidden_size,
            "n_groups": math.gcd(model.mamba_num_groups, heads),
        }

    def names(self, model: ModelConfig) -> rules.Names:
        """Yield each of our modules with the corresponding Hugging Face modules, in file order."""
        yield "embedding.word", [f"{_PREFIX}embeddings"]
        experts = max(model.num_experts or (0,))
        for layer, symbol in enumerate(layer_symbols(model.hybrid_layer_pattern)):
            modules = rules.expert_names(_MODULES[symbol], experts)
            yield from rules.layer_names(f"layers.{layer}", f"{_PREFIX}layers.{layer}", modules)
        yield "final_norm", [f"{_PREFIX}norm_f"]
        yield "output", ["lm_head"]

    def conversion(
        self, layer: plans.LayerPlan, module: str, tensors: int
    ) -> rules.TensorConversion:
        """Return the conversion between Hugging Face tensors and the parameters of a module."""
        mixer = layer.mixer
        if isinstance(mixer, MambaPlan):
            if module == "attention.input":
                return by_group(mixer.groups, mixer.widths)
            if module == "attention.convolution":
                return convolution(mixer.groups, mixer.widths[1:4])
            return rules.SAME
        return super().conversion(layer, module, tensors)


@dataclass(frozen=True)
class NemotronH(Mamba2):
    """Nemotron-H. A layer is Mamba-2, attention (without positions), an MLP or a mixture."""

    module_prefix: str | None = "model."
    keys: tuple[rules.Key, ...] = (
        rules.Key("hidden_size", "hidden_size"),
        rules.Key("layer_norm_epsilon", "norm_epsilon", "number", 1e-5),
        rules.Key("num_attention_heads", "num_attention_heads", max_value=MAX_HEADS),
        rules.Key("head_dim", "kv_channels", default=128, max_value=MAX_HEADS),
        rules.Key("intermediate_size", "ffn_hidden_size", default=21504),
        rules.Key("max_position_embeddings", "max_position_embeddings", default=4096),
        rules.Key("attention_dropout", "attention_dropout", "fraction", 0.0),
        rules.Key("hidden_dropout", "hidden_dropout", "fraction", 0.0),
        rules.Key("mamba_num_heads", "mamba_num_heads", max_value=MAX_HEADS),
        rules.Key("mamba_head_dim", "mamba_head_dim", default=64, max_value=MAX_HEADS),
        rules.Key("n_groups", "mamba_num_groups", default=8),
        rules.Key("ssm_state_size", "mamba_state_dim", default=128),
    )
    fixed: Mapping[str, Any] = field(
        default_factory=lambda: {
            **_FIXED,
            **dict.fromkeys(("attention_bias", "mamba_proj_bias", "mlp_bias"), False),
            "mamba_hidden_act": "silu",
            "mlp_hidden_act": "relu2",
            "num_nextn_predict_layers": 0,
        }
    )

    def network(self, settings: Settings, flags: dict[str, Any]) -> ModelConfig:
        """Return the network that a config.json describes."""
        pattern = _read_pattern(settings)
        settings.ignore(*_WITHOUT_EFFECT, *_NEMOTRON_KEYS)
        settings.must_be("attention_head_dim", flags["kv_channels"])
        heads = flags["num_attention_heads"]
        kv_heads = settings.size("num_key_value_heads", heads)
        if heads % kv_heads:
            raise settings.error("num_key_value_heads", f"does not divide {heads} heads")
        return ModelConfig(
            **flags,
            **_read_mamba(settings, "mamba_num_heads", flags),
            **_read_mixture(settings, pattern),
            hybrid_layer_pattern=pattern,
            num_layers=len(pattern),
            group_query_attention=kv_heads != heads,
            num_query_groups=kv_heads if kv_heads != heads else 1,
            squared_relu=True,
        )

    def write(self, model: ModelConfig, vocab: int) -> dict[str, Any]:
        """Return the content of config.json, with one layer for each symbol of the pattern.

        Args:
            model: The network.
            vocab: Number of rows of the word embedding.
        """
        pattern = layer_symbols(model.hybrid_layer_pattern) or MAMBA * model.num_layers
        heads = model.mamba_num_heads or 1
        values = rules.Family.write(self, model, vocab)
        return {
            **values,
            "conv_kernel": _CONVOLUTION,
            "layers_block_type": [_KINDS[symbol] for symbol in pattern],
            "num_key_value_heads": model.kv_heads,
            "mamba_num_heads": heads,
            "n_groups": math.gcd(model.mamba_num_groups, heads),
            "mlp_hidden_act": "relu2",
            **(_write_mixture(model) if MIXTURE in pattern else {}),
        }


_KINDS = {MAMBA: "linear_attention", ATTENTION: "full_attention", MLP: "mlp", MIXTURE: "moe"}
# Names of layer kinds in older files.
_OLD_KINDS = {"mamba": MAMBA, "attention": ATTENTION}
# Keys that do not affect the network, in addition to those of both families.
_NEMOTRON_KEYS = (
    *(
        "expand",
        "mamba_ssm_cache_dtype",
        "moe_shared_expert_overlap",
        "mtp_hybrid_override_pattern",
    ),
    *("mtp_layers_block_type", "num_logits_to_keep", "use_mamba_kernels"),
)
_MIXTURE_KEYS = (
    *(
        "moe_intermediate_size",
        "moe_shared_expert_intermediate_size",
        "n_group",
        "n_routed_experts",
    ),
    *("n_shared_experts", "norm_topk_prob", "num_experts_per_tok", "routed_scaling_factor"),
    *("topk_group",),
)


def read_limit(settings: Settings) -> None:
    """Check that config.json does not limit the time steps of Mamba-2.

    Raises:
        CheckpointError: The time steps are limited.
    """
    limit = settings.values.get("time_step_limit")
    if limit not in _NO_LIMIT:
        raise settings.error("time_step_limit", "time steps with limits are not supported")
    settings.ignore("time_step_limit")


def _read_mamba(settings: Settings, heads_key: str, flags: Mapping[str, Any]) -> dict[str, Any]:
    """Check the sizes of Mamba-2, and return the flags that both families share.

    Args:
        settings: The keys of config.json.
        heads_key: The key with the number of heads, for messages.
        flags: The flags that have been read so far.
    """
    read_limit(settings)
    if flags["mamba_num_heads"] % flags["mamba_num_groups"]:
        raise settings.error("n_groups", f"does not divide {heads_key}")
    return {
        "position_embedding_type": "none",
        "normalization": "RMSNorm",
        "add_bias_linear": False,
    }


def _read_pattern(settings: Settings) -> str:
    """Return the symbol of each layer, from the newer or the older key, whichever the file has."""
    symbols = {kind: symbol for symbol, kind in _KINDS.items()} | _OLD_KINDS
    kinds, text = (
        settings.strings("layers_block_type"),
        settings.values.get("hybrid_override_pattern"),
    )
    unknown = sorted(set(kinds) - symbols.keys())
    if unknown:
        raise settings.error("layers_block_type", f"{unknown[0]} is not supported")
    pattern = "".join(symbols[kind] for kind in kinds)
    if not kinds:
        if not isinstance(text, str):
            raise settings.error("layers_block_type", "expected a list with each layer's kind")
        try:
            (pattern,) = pattern_parts(text)
        except ValueError as error:
            raise settings.error("hybrid_override_pattern", str(error)) from None
    if len(pattern) > MAX_LAYERS:
        raise settings.error("layers_block_type", f"more than {MAX_LAYERS} layers")
    settings.must_be("hybrid_override_pattern", text if text is None else pattern)
    settings.must_be("num_hidden_layers", len(pattern))
    return pattern


def _read_mixture(settings: Settings, pattern: str) -> dict[str, Any]:
    """Return the flags for mixtures of experts, which resemble DeepSeek-V3's but are not gated.

    Args:
        settings: The keys of config.json.
        pattern: The symbol of each layer.
    """
    if MIXTURE not in pattern:
        settings.ignore(*_MIXTURE_KEYS, "moe_latent_size")
        return {}
    if "moe_latent_size" in settings.values:
        raise settings.error("moe_latent_size", "experts on projected inputs are not supported")
    settings.must_be("norm_topk_prob", True)
    settings.ignore("n_shared_experts")
    experts = settings.size("n_routed_experts", 8, max_experts(len(pattern)))
    chosen = settings.size("num_experts_per_tok", 2, experts)
    if chosen < 2:
        raise settings.error("num_experts_per_tok", "only 2 or more are supported")
    groups = read_groups(settings, experts, chosen, counted=2, default=1)
    scale = settings.number("routed_scaling_factor", 1.0)
    return {
        **groups,
        "num_experts": (experts,),
        "moe_layer_freq": layer_pattern(symbol == MIXTURE for symbol in pattern),
        "moe_router_topk": chosen,
        "moe_ffn_hidden_size": settings.size("moe_intermediate_size", 7688),
        "moe_shared_expert_intermediate_size": settings.size(
            "moe_shared_expert_intermediate_size", 7688
        ),
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_topk_scaling_factor": None if scale == 1 else scale,
    }


def _write_mixture(model: ModelConfig) -> dict[str, Any]:
    """Return the keys of config.json that describe mixtures of experts."""
    experts = max(2, *(model.num_experts or (2,)))
    chosen = min(max(model.moe_router_topk, 2), experts)
    groups, best = written_groups(model, experts, chosen)
    return {
        "n_routed_experts": experts,
        "num_experts_per_tok": chosen,
        "n_group": groups,
        "topk_group": best,
        "moe_intermediate_size": model.moe_ffn_hidden_size or model.ffn_hidden_size,
        "moe_shared_expert_intermediate_size": model.moe_shared_expert_intermediate_size or 1,
        "routed_scaling_factor": model.moe_router_topk_scaling_factor or 1.0,
    }
