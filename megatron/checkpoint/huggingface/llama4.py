"""Llama 4's text models: chunked attention, layers without positions, weighted expert inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

import megatron.models.plan as plans
from megatron.checkpoint.huggingface import rules
from megatron.checkpoint.huggingface.gpt_oss import DOWN
from megatron.checkpoint.huggingface.interleaved import interleaved
from megatron.checkpoint.huggingface.llama import FULL, LAYER
from megatron.checkpoint.huggingface.mixtures import Mixtral
from megatron.checkpoint.huggingface.settings import Settings
from megatron.config.attention import rotary_layers
from megatron.config.experts import mixture_layers
from megatron.config.model import ModelConfig
from megatron.config.patterns import layer_pattern

_CHUNKED = "chunked_attention"  # a value of layer_types
_SCALE, _FLOOR = 0.1, 8192  # the settings of the attention temperature
_MODULES = {
    "mlp.up": ("feed_forward.gate_proj", "feed_forward.up_proj"),
    "mlp.down": ("feed_forward.down_proj",),
    "mlp.router": ("feed_forward.router",),
    "mlp.experts.up": ("feed_forward.experts.gate_up_proj",),
    "mlp.experts.down": ("feed_forward.experts.down_proj",),
    "mlp.shared.up": (
        "feed_forward.shared_expert.gate_proj",
        "feed_forward.shared_expert.up_proj",
    ),
    "mlp.shared.down": ("feed_forward.shared_expert.down_proj",),
}


def _join_up(parts: Sequence[Tensor]) -> Tensor:
    """Convert [e, h, 2 f], in which all of gate precedes all of up, to [e, 2, f, h]."""
    return parts[0].transpose(1, 2).unflatten(1, (2, -1))


def _split_up(whole: Tensor) -> list[Tensor]:
    return [whole.flatten(1, 2).transpose(1, 2)]


_UP = rules.TensorConversion(_join_up, _split_up)


@dataclass(frozen=True)
class Llama4(Mixtral):
    """Llama 4 without image inputs. Its files store all experts of a layer in one tensor."""

    mixture: Mapping[str, Sequence[str]] = field(default_factory=lambda: _MODULES)
    fixed: Mapping[str, Any] = field(
        default_factory=lambda: {
            "hidden_act": "silu",
            **dict.fromkeys(("attention_bias", "for_llm_compressor"), False),
        }
    )
    head_size: int | None = 128
    rotary_base: float = 500000.0
    classifies: bool = False
    stacks_experts: bool = True
    whole_names: tuple[str, ...] = ("experts.gate_up_proj", "experts.down_proj")

    def network(self, settings: Settings, flags: dict[str, Any]) -> ModelConfig:
        """Return the network that a config.json describes."""
        layers, width = flags["num_layers"], flags["ffn_hidden_size"]
        dense = {**flags, "ffn_hidden_size": settings.size("intermediate_size_mlp", 16384)}
        model = super().network(settings, dense)
        if model.moe_router_topk != 1:
            raise settings.error("num_experts_per_tok", "only 1 is supported")
        rotates = _read_rotating(settings, layers)
        chunk = settings.size("attention_chunk_size", 8192)
        scale, floor = settings.number("attn_scale", _SCALE), settings.size("floor_scale", _FLOOR)
        tunes = settings.values.get("attn_temperature_tuning", True)
        if type(tunes) not in (bool, int):
            raise settings.error("attn_temperature_tuning", "expected true or false")
        settings.ignore("attn_temperature_tuning")  # 4 in published files
        has_chunks = any(rotates) and chunk < model.max_position_embeddings
        return replace(
            model,
            no_rope_freq=None if all(rotates) else layer_pattern(not value for value in rotates),
            attention_chunk_size=chunk if has_chunks else None,
            attention_temperature_scale=scale if tunes and not all(rotates) else None,
            attention_temperature_floor=floor,
            qk_l2_norm=settings.boolean("use_qk_norm", True),
            moe_layer_freq=_read_mixtures(settings, layers),
            moe_ffn_hidden_size=width,
            moe_shared_expert_intermediate_size=width,
            moe_router_score_function="sigmoid",
            moe_apply_probs_on_input=True,
        )

    def write(self, model: ModelConfig, vocab: int) -> dict[str, Any]:
        """Return the content of config.json. A dense network becomes a mixture of one expert."""
        rotates = rotary_layers(model, model.num_layers)
        mixtures = mixture_layers(model, model.num_layers) if model.num_experts else ()
        chosen = [layer for layer, is_mixture in enumerate(mixtures) if is_mixture]
        return {
            **super().write(model, vocab),
            "attention_chunk_size": model.attention_chunk_size or model.max_position_embeddings,
            "attn_scale": model.attention_temperature_scale or _SCALE,
            "attn_temperature_tuning": model.attention_temperature_scale is not None,
            "floor_scale": model.attention_temperature_floor,
            "intermediate_size_mlp": model.ffn_hidden_size,
            "layer_types": [_CHUNKED if value else FULL for value in rotates],
            "moe_layers": chosen or [*range(model.num_layers)],
            "no_rope_layers": [*map(int, rotates)],
            "num_experts_per_tok": 1,
            "use_qk_norm": model.qk_l2_norm,
        }

    def modules(self, model: ModelConfig) -> Mapping[str, Sequence[str]]:
        """Return the Hugging Face modules in a layer, by native module name."""
        return {**LAYER, **self.mixture}

    def conversion(
        self, layer: plans.LayerPlan, module: str, tensors: int
    ) -> rules.TensorConversion:
        """Return the conversion between Hugging Face tensors and the parameters of a module."""
        conversion = super().conversion(layer, module, tensors)
        match module:
            case "attention.qkv":
                return interleaved(layer, conversion)
            case "mlp.experts.up":
                return _UP
            case "mlp.experts.down":
                return DOWN
        return conversion


def _read_rotating(settings: Settings, layers: int) -> list[bool]:
    """Return, for each layer, whether it has rotary embeddings and hence chunked attention.

    Despite its name, the key no_rope_layers is 1 for layers with rotary embeddings.

    Args:
        settings: The keys of config.json.
        layers: The number of layers.
    """
    every = settings.size("no_rope_layer_interval", 4)
    explicit = settings.indices("no_rope_layers", 2)
    if explicit and len(explicit) != layers:
        raise settings.error("no_rope_layers", f"has {len(explicit)} entries for {layers} layers")
    rotates = [bool(value) for value in explicit] or [(i + 1) % every > 0 for i in range(layers)]
    kinds = [_CHUNKED if value else FULL for value in rotates]
    if settings.strings("layer_types") not in ([], kinds):
        raise settings.error(
            "layer_types",
            "only layers with rotary embeddings may have chunks, and all of them must",
        )
    return rotates


def _read_mixtures(settings: Settings, layers: int) -> str:
    """Return the value of --moe-layer-freq, which chooses the layers that are mixtures.

    Args:
        settings: The keys of config.json.
        layers: The number of layers.
    """
    step = settings.size("interleave_moe_layer_step", 1)
    chosen = {*range(step - 1, layers, step)}
    if "moe_layers" in settings.values:
        chosen = {*settings.indices("moe_layers", layers)}
    if not chosen:
        raise settings.error("moe_layers", "at least one layer must be a mixture of experts")
    return "1" if len(chosen) == layers else layer_pattern(i in chosen for i in range(layers))
