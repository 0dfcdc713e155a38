"""Falcon-H1: attention and Mamba-2 in parallel in every layer, with constant multipliers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import megatron.models.plan as plans
from megatron.checkpoint.huggingface import rules
from megatron.checkpoint.huggingface.llama import LLAMA_KEYS, LlamaLike
from megatron.checkpoint.huggingface.mamba import by_group, convolution, read_limit
from megatron.checkpoint.huggingface.settings import MAX_HEADS, Settings
from megatron.config.model import ModelConfig
from megatron.models.recurrent_plan import ParallelMambaPlan

_FACTORS = {
    "embedding_multiplier": "embedding_multiplier",
    "key_multiplier": "key_multiplier",
    "attention_in_multiplier": "attention_input_multiplier",
    "attention_out_multiplier": "attention_output_multiplier",
    "ssm_in_multiplier": "mamba_input_multiplier",
    "ssm_out_multiplier": "mamba_output_multiplier",
}
_SEVERAL = {"ssm_multipliers": ("mamba_multipliers", 5), "mlp_multipliers": ("mlp_multipliers", 2)}
_KEYS = (
    *LLAMA_KEYS,
    rules.Key("mamba_n_heads", "mamba_num_heads", default=128, max_value=MAX_HEADS),
    rules.Key("mamba_n_groups", "mamba_num_groups", default=1),
    rules.Key("mamba_d_state", "mamba_state_dim", default=256),
    rules.Key("mamba_rms_norm", "mamba_norm", "boolean", False),
    *(rules.Key(key, field, "number", 1.0) for key, field in _FACTORS.items()),
)
_FIXED = {
    **dict.fromkeys(("attention_bias", "mamba_proj_bias", "mlp_bias", "projectors_bias"), False),
    "hidden_act": "silu",
    "mamba_conv_bias": True,
    "mamba_d_conv": 4,
    "mamba_use_mlp": True,
}
_LAYER = {
    "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.output": ("self_attn.o_proj",),
    "attention.mamba.input": ("mamba.in_proj",),
    "attention.mamba.convolution": ("mamba.conv1d",),
    "attention.mamba.decay": ("mamba.A_log",),
    "attention.mamba.skip": ("mamba.D",),
    "attention.mamba.time_step": ("mamba.dt_bias",),
    "attention.mamba.norm": ("mamba.norm",),
    "attention.mamba.output": ("mamba.out_proj",),
    "mlp.up": ("feed_forward.gate_proj", "feed_forward.up_proj"),
    "mlp.down": ("feed_forward.down_proj",),
    "attention_norm": ("input_layernorm",),
    "mlp_norm": ("pre_ff_layernorm",),
}


@dataclass(frozen=True)
class FalconH1(LlamaLike):
    """Falcon-H1: Llama with a Mamba-2 mixer in parallel with the attention of every layer."""

    keys: tuple[rules.Key, ...] = _KEYS
    fixed: Mapping[str, Any] = field(default_factory=lambda: _FIXED)
    optional_kv_heads: bool = True
    classifies: bool = False
    whole_names: tuple[str, ...] = (".A_log", ".D", ".dt_bias")

    def network(self, settings: Settings, flags: dict[str, Any]) -> ModelConfig:
        """Return the network that a config.json describes."""
        read_limit(settings)
        settings.ignore("attn_layer_indices", "mamba_chunk_size", "num_logits_to_keep")
        heads, groups = flags["mamba_num_heads"], flags["mamba_num_groups"]
        if heads % groups:
            raise settings.error("mamba_n_groups", f"does not divide {heads} heads")
        expand = settings.size("mamba_expand", 2)
        inner = expand * flags["hidden_size"]
        if "mamba_d_ssm" in settings.values or not settings.has("mamba_d_ssm"):
            inner = settings.size("mamba_d_ssm", 1024)
        if inner % heads:
            raise settings.error("mamba_n_heads", f"does not divide {inner} channels")
        settings.must_be("mamba_d_head", inner // heads)
        first = settings.boolean("mamba_norm_before_gate", True)
        if flags["mamba_norm"] and first:
            raise settings.error("mamba_norm_before_gate", "must be false with mamba_rms_norm")
        several = {
            field: settings.numbers(key, count) if key in settings.values else (1.0,) * count
            for key, (field, count) in _SEVERAL.items()
        }
        scale = settings.number("lm_head_multiplier", 1.0)
        return replace(
            super().network(settings, {**flags, **several}),
            parallel_mamba=True,
            mamba_head_dim=inner // heads,
            logit_scale=None if scale == 1 else scale,
        )

    def write(self, model: ModelConfig, vocab: int) -> dict[str, Any]:
        """Return the content of config.json for a network."""
        heads = model.mamba_num_heads or 1
        return {
            **super().write(model, vocab),
            "lm_head_multiplier": model.logit_scale or 1.0,
            "mamba_conv_bias": True,
            "mamba_d_conv": 4,
            "mamba_d_head": model.mamba_head_dim,
            "mamba_d_ssm": heads * model.mamba_head_dim,
            "mamba_n_groups": math.gcd(model.mamba_num_groups, heads),
            "mamba_n_heads": heads,
            "mamba_norm_before_gate": False,
            **{key: [*getattr(model, field)] for key, (field, _) in _SEVERAL.items()},
        }

    def names(self, model: ModelConfig) -> rules.Names:
        """Yield each of our modules with the corresponding Hugging Face modules, in file order."""
        yield "embedding.word", ["model.embed_tokens"]
        for layer in range(model.num_layers):
            yield from rules.layer_names(f"layers.{layer}", f"model.layers.{layer}", _LAYER)
        yield "final_norm", ["model.final_layernorm"]
        yield "output", ["lm_head"]

    def conversion(
        self, layer: plans.LayerPlan, module: str, tensors: int
    ) -> rules.TensorConversion:
        """Return the conversion between Hugging Face tensors and the parameters of a module."""
        mixer = layer.mixer
        if isinstance(mixer, ParallelMambaPlan) and module.startswith("attention.mamba."):
            mamba = mixer.mamba
            match module.rpartition(".")[2]:
                case "input":
                    return by_group(mamba.groups, mamba.widths)
                case "convolution":
                    return convolution(mamba.groups, mamba.widths[1:4])
            return rules.SAME
        return super().conversion(layer, module, tensors)

    def modules(self, model: ModelConfig) -> Mapping[str, Sequence[str]]:
        """Return the Hugging Face modules in a layer, by native module name."""
        return _LAYER
