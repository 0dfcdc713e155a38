"""OLMo 2 and OLMo 3, which normalize the outputs of attention and MLP instead of the inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron.checkpoint.huggingface.llama import (
    FULL,
    LAYER,
    SLIDING,
    LlamaLike,
    read_alternating_windows,
    read_rope_by_kind,
    write_alternating_windows,
)
from megatron.checkpoint.huggingface.settings import Settings
from megatron.config.model import ModelConfig

_EVERY, _WINDOW = 4, 4096  # OLMo 3: every nth layer has full attention, the others a window
_MODULES = {
    **{native: hf_name for native, hf_name in LAYER.items() if not native.endswith("_norm")},
    "attention.query_norm": ("self_attn.q_norm",),
    "attention.key_norm": ("self_attn.k_norm",),
    "attention_output_norm": ("post_attention_layernorm",),
    "mlp_output_norm": ("post_feedforward_layernorm",),
}


@dataclass(frozen=True)
class Olmo(LlamaLike):
    """A family that normalizes the outputs of attention and MLP, not the inputs.

    Attributes:
        has_windows: Whether most layers have attention windows, and rotary frequencies that are not
            scaled (OLMo 3).
    """

    qk_norm: str | None = "projection"
    optional_kv_heads: bool = True
    has_windows: bool = False

    def network(self, settings: Settings, flags: dict[str, Any]) -> ModelConfig:
        """Return the network that a config.json describes."""
        return replace(super().network(settings, flags), norm_placement="after")

    def _read_windows(self, settings: Settings, layers: int) -> dict[str, Any]:
        """Return the flags for attention windows."""
        if not self.has_windows:
            return {}
        return read_alternating_windows(settings, layers, every=_EVERY, window=_WINDOW)

    def _read_rotation(self, settings: Settings) -> dict[str, Any]:
        """Return the flags for rotary embeddings."""
        if not self.has_windows:
            return super()._read_rotation(settings)
        base = settings.number("rope_theta", self.rotary_base)
        return read_rope_by_kind(settings, base, base)

    def write(self, model: ModelConfig, vocab: int) -> dict[str, Any]:
        """Return the content of config.json for a network."""
        values = super().write(model, vocab)
        if not self.has_windows:
            return values
        # transformers before version 5 reads rope_theta and rope_scaling. Version 5 would ignore
        # this rope_theta in layers with windows.
        base = model.rotary_base
        kinds = {
            FULL: {"rope_theta": base, **(values["rope_scaling"] or {"rope_type": "default"})},
            SLIDING: {"rope_theta": model.window_rotary_base or base, "rope_type": "default"},
        }
        return {**values, **write_alternating_windows(model, _WINDOW), "rope_parameters": kinds}

    def modules(self, model: ModelConfig) -> Mapping[str, Sequence[str]]:
        """Return the Hugging Face modules in a layer, by native module name."""
        return _MODULES
