"""Phi-3 and Phi-4, whose files fuse queries, keys and values, and gate and up projections."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

import megatron.models.plan as plans
from megatron.checkpoint.huggingface import rules
from megatron.checkpoint.huggingface.llama import LAYER, LlamaLike, read_rope
from megatron.checkpoint.huggingface.settings import Settings
from megatron.config.model import ModelConfig

_TRAINED = "original_max_position_embeddings"
_LONG = ("longrope", "su")  # "su" in Phi-3's first files
_MODULES = {
    **LAYER,
    "attention.qkv": ("self_attn.qkv_proj",),
    "mlp.up": ("mlp.gate_up_proj",),
}
# Gate and up projections: one tensor [2 f, h] in files, [2, f, h] here.
_JOINED = rules.TensorConversion(
    lambda parts: parts[0].unflatten(0, (2, -1)), lambda whole: [whole.flatten(0, 1)]
)


def joined_heads(mixer: plans.AttentionPlan) -> rules.TensorConversion:
    """Return the conversion of a tensor that contains all queries, all keys, then all values."""
    by_group = rules.grouped(mixer.kv_heads, (mixer.heads // mixer.kv_heads, 1, 1))
    sizes = [mixer.query, *[mixer.kv_heads * mixer.head_size] * 2]
    return rules.TensorConversion(
        lambda parts: by_group.join(parts[0].split(sizes)),
        lambda whole: [torch.cat(by_group.split(whole))],
    )


def _attention_factor(factor: float, original: int) -> float:
    """Return LongRoPE's default for the factor that scales queries and keys.

    Args:
        factor: The extended context length divided by the original one.
        original: The original context length in tokens.
    """
    return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0


def _read_long_rope(rope: Settings, settings: Settings, share: float) -> dict[str, Any]:
    """Return the flags for LongRoPE, with the defaults of `transformers`.

    Args:
        rope: The keys of rope_scaling or rope_parameters.
        settings: All keys of config.json.
        share: The fraction of a head's channels that rotates.
    """
    positions = settings.size("max_position_embeddings")
    original = rope.size(_TRAINED, settings.size(_TRAINED, positions))
    strength = _attention_factor(rope.number("factor", positions / original), original)
    size = settings.size("hidden_size") // settings.size("num_attention_heads")
    planes = int(settings.size("head_dim", size) * share) // 2
    rope.ignore("rope_type", "type")
    rope.must_be("partial_rotary_factor", share)
    flags = {
        "rope_type": "longrope",
        "longrope_original_max_position_embeddings": original,
        "longrope_short_factor": rope.numbers("short_factor", planes),
        "longrope_long_factor": rope.numbers("long_factor", planes),
        "longrope_attention_factor": rope.number("attention_factor", strength),
    }
    rope.refuse_unread_keys()
    return flags


@dataclass(frozen=True)
class Phi(LlamaLike):
    """Phi-3 and Phi-4. In some of these models, only part of each head rotates."""

    optional_kv_heads: bool = True
    window: str | None = "model"

    def network(self, settings: Settings, flags: dict[str, Any]) -> ModelConfig:
        """Return the network that a config.json describes."""
        settings.size(_TRAINED, 1)  # affects only LongRoPE's frequencies
        settings.ignore("auto_map")  # no code is run
        settings.fraction("embd_pdrop", 0.0)
        dropout = settings.fraction("resid_pdrop", 0.0)
        return replace(super().network(settings, flags), hidden_dropout=dropout)

    def _read_rotation(self, settings: Settings) -> dict[str, Any]:
        """Return the flags for rotary embeddings."""
        new, old = settings.section("rope_parameters"), settings.section("rope_scaling")
        share = settings.number("partial_rotary_factor", 1.0)
        share = new.number("partial_rotary_factor", share)
        base = settings.number("rope_theta", self.rotary_base)
        flags = {"rotary_base": new.number("rope_theta", base), "rotary_percent": share}
        for rope in (new, old):
            kind = rope.values.get("rope_type", rope.values.get("type"))
            if kind in _LONG:
                flags |= _read_long_rope(rope, settings, share)
                continue
            for key in ("rope_type", "type"):  # transformers reads other kinds as longrope
                rope.must_be(key, "default")
            flags |= read_rope(rope, settings, share)
        return flags

    def write(self, model: ModelConfig, vocab: int) -> dict[str, Any]:
        """Return the content of config.json for a network."""
        keys: dict[str, Any] = {"rope_scaling": None}
        original = model.longrope_original_max_position_embeddings
        if model.rope_type == "longrope" and original is not None:
            keys = {_TRAINED: original, "rope_scaling": {"type": "longrope"}}
            scaling = keys["rope_scaling"]
            scaling["short_factor"] = list(model.longrope_short_factor)
            scaling["long_factor"] = list(model.longrope_long_factor)
            strength = _attention_factor(model.max_position_embeddings / original, original)
            if model.longrope_attention_factor != strength:
                scaling["attention_factor"] = model.longrope_attention_factor
        return {
            **super().write(model, vocab),
            **keys,
            "partial_rotary_factor": model.rotary_percent,
        }

    def modules(self, model: ModelConfig) -> Mapping[str, Sequence[str]]:
        """Return the Hugging Face modules in a layer, by native module name."""
        return _MODULES

    def conversion(
        self, layer: plans.LayerPlan, module: str, tensors: int
    ) -> rules.TensorConversion:
        """Return the conversion between Hugging Face tensors and the parameters of a module."""
        match module:
            case "attention.qkv":
                return joined_heads(rules.attention_of(layer))
            case "mlp.up":
                return _JOINED
        return super().conversion(layer, module, tensors)
