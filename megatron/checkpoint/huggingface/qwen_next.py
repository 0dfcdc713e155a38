"""Qwen3-Next: gated delta nets in most layers, gated attention in the others, and experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import megatron.models.plan as plans
from megatron.checkpoint.huggingface import rules
from megatron.checkpoint.huggingface.llama import (
    FULL,
    LLAMA_KEYS,
    read_partial_rotation,
)
from megatron.checkpoint.huggingface.mixtures import QwenMixture
from megatron.checkpoint.huggingface.settings import MAX_HEADS, Settings
from megatron.config.attention import delta_net_layers
from megatron.config.model import ModelConfig
from megatron.config.patterns import layer_pattern
from megatron.models.recurrent_plan import GatedDeltaNetPlan

_LINEAR = "linear_attention"  # a value of layer_types
_EVERY = 4  # without layer_types, every nth layer has attention
_ROTATING = 0.25  # fraction of a head's channels that rotate
_SIZES = (
    rules.Key("linear_conv_kernel_dim", "linear_conv_kernel_dim", default=4),
    rules.Key("linear_key_head_dim", "linear_key_head_dim", default=128),
    rules.Key("linear_value_head_dim", "linear_value_head_dim", default=128),
    rules.Key("linear_num_key_heads", "linear_num_key_heads", default=16, max_value=MAX_HEADS),
    rules.Key("linear_num_value_heads", "linear_num_value_heads", default=32, max_value=MAX_HEADS),
)
_DELTA_NET = {
    "attention.input": ("linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba"),
    "attention.convolution": ("linear_attn.conv1d",),
    "attention.decay": ("linear_attn.A_log",),
    "attention.time_step": ("linear_attn.dt_bias",),
    "attention.norm": ("linear_attn.norm",),
    "attention.output": ("linear_attn.out_proj",),
}


def gated_heads(mixer: plans.AttentionPlan) -> rules.TensorConversion:
    """Return the conversion of queries, keys and values with output gates.

    In the files, each head's query is followed by its gate. In our weight, each group has all of
    its queries, then all of its gates, then the key and the value.
    """
    groups, heads = mixer.kv_heads, mixer.heads // mixer.kv_heads
    by_group = rules.grouped(groups, (2 * heads, 1, 1))

    def join(parts: Sequence[Tensor]) -> Tensor:
        pairs = parts[0].unflatten(0, (groups, heads, 2, -1))
        return by_group.join([pairs.transpose(1, 2).flatten(0, 3), *parts[1:]])

    def split(whole: Tensor) -> list[Tensor]:
        query, *others = by_group.split(whole)
        pairs = query.unflatten(0, (groups, 2, heads, -1))
        return [pairs.transpose(1, 2).flatten(0, 3), *others]

    return rules.TensorConversion(join, split)


def convolution(mixer: GatedDeltaNetPlan) -> rules.TensorConversion:
    """Return the conversion of a convolution's weight, [c, 1, k] in files and [c, k] in our model.

    In the files, the channels of all queries come first, then all keys, then all values. In our
    weight, they are ordered by key head.
    """
    sizes = (mixer.keys, mixer.keys, mixer.values)
    by_head = rules.grouped(mixer.key_heads, [size // mixer.key_heads for size in sizes])
    return rules.TensorConversion(
        lambda parts: by_head.join(parts[0].squeeze(1).split(sizes)),
        lambda whole: [torch.cat(by_head.split(whole)).unsqueeze(1)],
    )


@dataclass(frozen=True)
class QwenNext(QwenMixture):
    """Qwen3-Next. Outside delta nets, a normalization scales by 1 plus its weight.

    Tensors of multi-token prediction are not read. `transformers` does not read them either.
    """

    keys: tuple[rules.Key, ...] = (*LLAMA_KEYS, *_SIZES)
    derived: str = r"mtp\..*"
    shared: bool = True
    qk_norm: str | None = "head"
    head_size: int | None = 256
    whole_names: tuple[str, ...] = ("A_log", "dt_bias")

    def network(self, settings: Settings, flags: dict[str, Any]) -> ModelConfig:
        """Return the network that a config.json describes."""
        layers = flags["num_layers"]
        every = settings.size("full_attention_interval", _EVERY)
        kinds = settings.strings("layer_types") or [
            FULL if (layer + 1) % every == 0 else _LINEAR for layer in range(layers)
        ]
        other = set(kinds) - {FULL, _LINEAR}
        if other:
            raise settings.error("layer_types", f"{', '.join(sorted(other))} is not supported")
        if len(kinds) != layers:
            raise settings.error("layer_types", f"has {len(kinds)} entries for {layers} layers")
        sizes = {key.field: flags.pop(key.field) for key in _SIZES}
        if sizes["linear_num_value_heads"] % sizes["linear_num_key_heads"]:
            heads = sizes["linear_num_key_heads"]
            raise settings.error(
                "linear_num_value_heads", f"is not a multiple of {heads} key heads"
            )
        for key in ("use_sliding_window", "qkv_bias"):
            settings.must_be(key, False)
        model = replace(
            super().network(settings, flags),
            apply_layernorm_1p=True,
            attention_output_gate=True,
            moe_router_pre_softmax=not settings.boolean("norm_topk_prob", True),
        )
        if _LINEAR not in kinds:
            return model
        return replace(
            model,
            **sizes,
            experimental_attention_variant="gated_delta_net",
            linear_attention_freq=layer_pattern(kind == _LINEAR for kind in kinds),
        )

    def _read_rotation(self, settings: Settings) -> dict[str, Any]:
        """Return the flags for rotary embeddings."""
        share = settings.number("partial_rotary_factor", _ROTATING)
        base = settings.number("rope_theta", self.rotary_base)
        return read_partial_rotation(settings, base, share)

    def write(self, model: ModelConfig, vocab: int) -> dict[str, Any]:
        """Return the content of config.json for a network."""
        values = super().write(model, vocab)
        del values["qkv_bias"]
        deltas = delta_net_layers(model, model.num_layers)
        return {
            **values,
            "layer_types": [_LINEAR if is_delta else FULL for is_delta in deltas],
            "partial_rotary_factor": model.rotary_percent,
        }

    def layer_modules(self, model: ModelConfig) -> Sequence[Mapping[str, Sequence[str]]]:
        """Return the Hugging Face modules in each layer, by native module name."""
        modules = self.modules(model)
        others = [name for name in modules if not name.startswith("attention.")]
        tables = (modules, {**_DELTA_NET, **{name: modules[name] for name in others}})
        return [tables[is_delta] for is_delta in delta_net_layers(model, model.num_layers)]

    def conversion(
        self, layer: plans.LayerPlan, module: str, tensors: int
    ) -> rules.TensorConversion:
        """Return the conversion between Hugging Face tensors and the parameters of a module."""
        mixer = layer.mixer
        if isinstance(mixer, GatedDeltaNetPlan):
            match module:
                case "attention.input":
                    *wide, rates, decays = (width // mixer.key_heads for width in mixer.widths)
                    return rules.grouped(mixer.key_heads, (sum(wide), rates + decays))
                case "attention.convolution":
                    return convolution(mixer)
        elif module == "attention.qkv":
            return gated_heads(rules.attention_of(layer))
        return super().conversion(layer, module, tensors)
