"""Gemma, Gemma 2 and the text models of Gemma 3."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megatron.checkpoint.huggingface.llama import (
    LAYER,
    LlamaLike,
    read_alternating_windows,
    read_rope_by_kind,
    write_alternating_windows,
)
from megatron.checkpoint.huggingface.settings import Settings
from megatron.config.model import ModelConfig

_GELU = "gelu_pytorch_tanh"
_WINDOW = 4096  # the default, also written without windows: transformers requires a number
_SANDWICH = {
    **LAYER,
    "attention_output_norm": ("post_attention_layernorm",),
    "mlp_norm": ("pre_feedforward_layernorm",),
    "mlp_output_norm": ("post_feedforward_layernorm",),
}


@dataclass(frozen=True)
class Gemma(LlamaLike):
    """A family with scaled embeddings, GeGLU, and normalizations that scale by 1 plus the weight.

    Attributes:
        version: 1, 2 or 3. From version 2 on, the outputs of attention and MLP are also normalized,
            and some layers have attention windows. Version 2 caps attention scores and logits.
            Version 3 normalizes queries and keys, and uses different rotary frequencies in layers
            with windows.
    """

    fixed: Mapping[str, Any] = field(
        default_factory=lambda: {"hidden_act": _GELU, "hidden_activation": _GELU}
    )
    head_size: int | None = 256
    tied: bool | None = True
    version: int = 1

    def network(self, settings: Settings, flags: dict[str, Any]) -> ModelConfig:
        """Return the network that a config.json describes."""
        model = replace(
            super().network(settings, flags),
            swiglu=False,
            geglu=True,
            apply_layernorm_1p=True,
            scale_embeddings=True,
        )
        settings.must_be("use_bidirectional_attention", False)
        if self.version == 1:
            return model
        scalar = settings.number("query_pre_attn_scalar", 256.0)
        caps: dict[str, Any] = {}
        for key, default in (("attn_logit_softcapping", 50.0), ("final_logit_softcapping", 30.0)):
            # Gemma 2 has default caps if the keys are missing, but no caps if they are null.
            if key in settings.values or (self.version == 2 and not settings.has(key)):
                caps[key] = settings.number(key, default)
        return replace(
            model,
            **caps,
            norm_placement="both",
            softmax_scale=None if scalar == model.kv_channels else scalar**-0.5,
        )

    def _read_windows(self, settings: Settings, layers: int) -> dict[str, Any]:
        """Return the flags for attention windows."""
        if self.version == 1:
            return {}
        every = 6 if self.version == 3 else 2
        if self.version == 3:
            every = settings.size("sliding_window_pattern", every)
            settings.size("_sliding_window_pattern", every)  # transformers 5 writes it
        return read_alternating_windows(settings, layers, every=every, window=_WINDOW)

    def _read_rotation(self, settings: Settings) -> dict[str, Any]:
        """Return the flags for rotary embeddings."""
        if self.version < 3:
            return super()._read_rotation(settings)
        base = settings.number("rope_theta", 1e6)
        local_base = settings.number("rope_local_base_freq", 10000.0)
        return read_rope_by_kind(settings, base, local_base)

    def write(self, model: ModelConfig, vocab: int) -> dict[str, Any]:
        """Return the content of config.json for a network."""
        values = super().write(model, vocab)
        if self.version == 1:
            return {**values, "hidden_act": _GELU}
        del values["hidden_act"]
        scalar = (model.softmax_scale or model.kv_channels**-0.5) ** -2
        values |= {
            "hidden_activation": _GELU,
            "query_pre_attn_scalar": max(1, round(scalar)),  # `transformers` accepts only integers
            "attn_logit_softcapping": model.attn_logit_softcapping,
            "final_logit_softcapping": model.final_logit_softcapping,
            **write_alternating_windows(model, _WINDOW),
        }
        if self.version == 3:
            values["rope_local_base_freq"] = model.window_rotary_base or model.rotary_base
        return values

    def modules(self, model: ModelConfig) -> Mapping[str, Sequence[str]]:
        """Return the Hugging Face modules in a layer, by native module name."""
        return LAYER if self.version == 1 else _SANDWICH
