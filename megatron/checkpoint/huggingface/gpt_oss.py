"""GPT-OSS: attention sinks, windows in every other layer, experts with biases and clamped gates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

import megatron.models.plan as plans
from megatron.checkpoint.huggingface import rules
from megatron.checkpoint.huggingface.llama import (
    LAYER,
    read_alternating_windows,
    write_alternating_windows,
)
from megatron.checkpoint.huggingface.mixtures import Mixtral
from megatron.checkpoint.huggingface.settings import Settings
from megatron.config.model import ModelConfig

_LIMIT = 7.0  # clamps gate and up projections
_WINDOW = 128
_MODULES = {
    "attention.sinks": ("self_attn.sinks",),
    "mlp.router": ("mlp.router",),
    "mlp.experts.up": ("mlp.experts.gate_up_proj",),
    "mlp.experts.down": ("mlp.experts.down_proj",),
}


def _join_up(parts: Sequence[Tensor]) -> Tensor:
    """Convert [e, h, 2 f], in which gate and up alternate, to [e, 2, f, h]; a bias has no h."""
    x = parts[0].transpose(1, 2) if parts[0].dim() == 3 else parts[0]
    return x.unflatten(1, (-1, 2)).transpose(1, 2)


def _split_up(whole: Tensor) -> list[Tensor]:
    x = whole.transpose(1, 2).flatten(1, 2)
    return [x.transpose(1, 2) if x.dim() == 3 else x]


def _swapped(x: Tensor) -> Tensor:
    return x.transpose(1, 2) if x.dim() == 3 else x


UP = rules.TensorConversion(_join_up, _split_up)
# The experts' matrices, which are [e, in, out] in files and [e, out, in] here.
DOWN = rules.TensorConversion(lambda parts: _swapped(parts[0]), lambda whole: [_swapped(whole)])


@dataclass(frozen=True)
class GptOss(Mixtral):
    """GPT-OSS, whose files store all experts of a layer in one tensor."""

    mixture: Mapping[str, Sequence[str]] = field(default_factory=lambda: _MODULES)
    qkv_bias: bool = True
    head_size: int | None = 64
    rotary_base: float = 150000.0
    classifies: bool = False
    whole_names: tuple[str, ...] = ("sinks",)
    stacks_experts: bool = True

    def network(self, settings: Settings, flags: dict[str, Any]) -> ModelConfig:
        """Return the network that a config.json describes."""
        model = super().network(settings, flags)
        settings.must_be("attention_bias", True)
        settings.must_be("swiglu_alpha", 1.702)
        settings.must_be("experts_per_token", model.moe_router_topk)  # the authors' own files
        settings.ignore("initial_context_length")
        return replace(
            model,
            add_bias_linear=True,
            add_qkv_bias=False,
            moe_router_bias=True,
            softmax_type="learnable",
            swiglu=False,
            quick_geglu=True,
            glu_linear_offset=1.0,
            activation_func_clamp_value=settings.number("swiglu_limit", _LIMIT),
        )

    def _read_windows(self, settings: Settings, layers: int) -> dict[str, Any]:
        """Return the flags for attention windows."""
        return read_alternating_windows(settings, layers, every=2, window=_WINDOW)

    def _read_rotation(self, settings: Settings) -> dict[str, Any]:
        """Return the flags for rotary embeddings."""
        if not {"rope_parameters", "rope_scaling"} & settings.values.keys():
            raise settings.error(
                "rope_scaling", "is required: without it, versions of transformers disagree"
            )
        return super()._read_rotation(settings)

    def write(self, model: ModelConfig, vocab: int) -> dict[str, Any]:
        """Return the content of config.json for a network."""
        values = super().write(model, vocab)
        return {
            **values,
            **write_alternating_windows(model, _WINDOW),
            "attention_bias": True,
            "rope_scaling": values["rope_scaling"] or {"rope_type": "default"},
            "swiglu_alpha": 1.702,
            "swiglu_limit": model.activation_func_clamp_value or _LIMIT,
        }

    def modules(self, model: ModelConfig) -> Mapping[str, Sequence[str]]:
        """Return the Hugging Face modules in a layer, by native module name."""
        return {**LAYER, **self.mixture}

    def tensor_name(self, module: str, kind: str) -> str:
        """Return the name of the weight or bias of a Hugging Face module."""
        if ".experts." in module:
            return module if kind == "weight" else f"{module}_bias"
        return super().tensor_name(module, kind)

    def conversion(
        self, layer: plans.LayerPlan, module: str, tensors: int
    ) -> rules.TensorConversion:
        """Return the conversion between Hugging Face tensors and the parameters of a module."""
        match module:
            case "mlp.experts.up":
                return UP
            case "mlp.experts.down":
                return DOWN
        return super().conversion(layer, module, tensors)
