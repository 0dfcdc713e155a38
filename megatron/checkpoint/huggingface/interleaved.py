"""GPT-J and Cohere, whose attention and MLP share a normalization and run in parallel.

In the files of these families, channels 2i and 2i + 1 of a head rotate together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

import megatron.models.plan as plans
from megatron.checkpoint.huggingface import rules
from megatron.checkpoint.huggingface.gpt2 import EXACT_GELU, gelu_name
from megatron.checkpoint.huggingface.llama import (
    LAYER,
    LLAMA_KEYS,
    LlamaLike,
    read_alternating_windows,
    write_alternating_windows,
)
from megatron.checkpoint.huggingface.settings import MAX_HEADS, MAX_LAYERS, Settings
from megatron.config.attention import layer_windows
from megatron.config.model import ModelConfig
from megatron.config.patterns import layer_pattern

_J_KEYS = (
    rules.Key("n_embd", "hidden_size"),
    rules.Key("n_head", "num_attention_heads", max_value=MAX_HEADS),
    rules.Key("n_layer", "num_layers", max_value=MAX_LAYERS),
    rules.Key("n_positions", "max_position_embeddings", default=2048),
    rules.Key("layer_norm_epsilon", "norm_epsilon", "number", 1e-5),
    rules.Key("attn_pdrop", "attention_dropout", "fraction", 0.0),
    rules.Key("resid_pdrop", "hidden_dropout", "fraction", 0.0),
)
_J_LAYER = {
    "attention_norm": ("ln_1",),
    "attention.qkv": ("attn.q_proj", "attn.k_proj", "attn.v_proj"),
    "attention.output": ("attn.out_proj",),
    "mlp.up": ("mlp.fc_in",),
    "mlp.down": ("mlp.fc_out",),
}
_COHERE_KEYS = (
    *(key for key in LLAMA_KEYS if key.field != "norm_epsilon"),
    rules.Key("layer_norm_eps", "norm_epsilon", "number", 1e-5),
)
_COHERE_LAYER = {native: hf_name for native, hf_name in LAYER.items() if native != "mlp_norm"}
_EVERY, _WINDOW = 4, 4096  # Cohere 2: every nth layer has full attention, the others a window
# Keys in published files that `transformers` does not read, with the only supported values.
_DESCRIPTIONS = {
    "order_of_interleaved_layers": "local_attn_first",
    "position_embedding_type": "rope_gptj",
    "rotary_pct": 1.0,
    "use_gated_activation": True,
    "use_parallel_block": True,
}


def interleaved(
    layer: plans.LayerPlan, conversion: rules.TensorConversion
) -> rules.TensorConversion:
    """Return the conversion of queries, keys and values whose adjacent channels rotate together.

    In a layer without rotary embeddings, this is the given conversion.

    Args:
        layer: The plan of the layer.
        conversion: The conversion of queries, keys and values without reordering of channels.
    """
    mixer = rules.attention_of(layer)
    if mixer.rotary is None:
        return conversion
    order = rules.halves(mixer.head_size, range(mixer.rotary.channels))
    return rules.TensorConversion(
        lambda parts: conversion.join(
            [*(rules.by_head(part, order) for part in parts[:2]), parts[2]],
        ),
        lambda whole: [
            part if index == 2 else rules.by_head(part, order.argsort())
            for index, part in enumerate(conversion.split(whole))
        ],
    )


def _norm_of_heads(layer: plans.LayerPlan) -> rules.TensorConversion:
    """Return the conversion of a query or key norm's weight, from [n, d] in files to our [n d]."""
    mixer = rules.attention_of(layer)
    order = torch.arange(mixer.head_size)
    if mixer.rotary is not None:
        order = rules.halves(mixer.head_size, range(mixer.rotary.channels))
    return rules.TensorConversion(
        lambda parts: rules.by_head(parts[0].flatten(), order),
        lambda whole: [rules.by_head(whole, order.argsort()).unflatten(0, (-1, len(order)))],
    )


@dataclass(frozen=True)
class GPTJ(rules.Family):
    """GPT-J. Its MLP and its output layer have biases, but its attention has none."""

    prefix: str = "transformer."
    keys: tuple[rules.Key, ...] = _J_KEYS
    tied: bool | None = False
    # Causal masks and rotary embeddings, in older files.
    derived: str = r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias|embed_positions)"

    def network(self, settings: Settings, flags: dict[str, Any]) -> ModelConfig:
        """Return the network that a config.json describes."""
        hidden, heads = flags["hidden_size"], flags["num_attention_heads"]
        if hidden % heads:
            raise settings.error("n_head", f"does not divide n_embd {hidden}")
        size = hidden // heads
        channels = settings.size("rotary_dim", 64)
        if channels % 2 or channels > size:
            raise settings.error("rotary_dim", f"must be even and at most {size}, a head's size")
        share = channels / size
        if int(size * share) < channels:  # the quotient was rounded down
            share = math.nextafter(share, 1)
        settings.must_be("scale_attn_weights", True)
        settings.must_be("rotary", True)
        settings.fraction("embd_pdrop", 0.0)
        is_exact = settings.choice("activation_function", EXACT_GELU, "gelu_new")
        return ModelConfig(
            **flags,
            ffn_hidden_size=settings.size("n_inner", 4 * hidden),
            kv_channels=size,
            position_embedding_type="rope",
            rotary_percent=share,
            parallel_residual=True,
            shared_parallel_norm=True,
            add_bias_attention=False,
            lm_head_bias=True,
            onnx_safe=is_exact or None,
        )

    def write(self, model: ModelConfig, vocab: int) -> dict[str, Any]:
        """Return the content of config.json for a network."""
        size = model.hidden_size // model.num_attention_heads
        return {
            **super().write(model, vocab),
            "activation_function": gelu_name(model),
            "embd_pdrop": model.hidden_dropout,
            "n_inner": model.ffn_hidden_size,
            "rotary_dim": max(2, int(size * model.rotary_percent) // 2 * 2),
        }

    def names(self, model: ModelConfig) -> rules.Names:
        """Yield each of our modules with the corresponding Hugging Face modules, in file order."""
        yield "embedding.word", ["transformer.wte"]
        for layer in range(model.num_layers):
            yield from rules.layer_names(f"layers.{layer}", f"transformer.h.{layer}", _J_LAYER)
        yield "final_norm", ["transformer.ln_f"]
        yield "output", ["lm_head"]

    def conversion(
        self, layer: plans.LayerPlan, module: str, tensors: int
    ) -> rules.TensorConversion:
        """Return the conversion between Hugging Face tensors and the parameters of a module."""
        conversion = super().conversion(layer, module, tensors)
        return interleaved(layer, conversion) if module == "attention.qkv" else conversion


@dataclass(frozen=True)
class Cohere(LlamaLike):
    """Cohere's Command R: Llama with bias-free LayerNorm and scaled logits.

    Command R+ also normalizes queries and keys, with separate weights for each head.

    Attributes:
        has_windows: Whether most layers have attention windows, and only these layers have rotary
            embeddings (Command R7B, Command A).
    """

    keys: tuple[rules.Key, ...] = _COHERE_KEYS
    fixed: Mapping[str, Any] = field(
        default_factory=lambda: {"hidden_act": "silu", **_DESCRIPTIONS}
    )
    optional_kv_heads: bool = True
    tied: bool | None = True
    classifies: bool = False
    has_windows: bool = False

    def network(self, settings: Settings, flags: dict[str, Any]) -> ModelConfig:
        """Return the network that a config.json describes."""
        settings.ignore("layer_switch", "use_embedding_sharing", "use_parallel_embedding")
        model = replace(
            super().network(settings, flags),
            normalization="LayerNorm",
            layernorm_bias=False,
            parallel_residual=True,
            shared_parallel_norm=True,
            logit_scale=settings.number("logit_scale", 0.0625),
        )
        if self.has_windows:
            settings.must_be("use_qk_norm", False)
        elif settings.boolean("use_qk_norm", False):
            model = replace(model, qk_layernorm=True, qk_layernorm_scope="each-head")
        windows = layer_windows(model, model.num_layers)
        if not self.has_windows or None not in windows:
            return model
        return replace(model, no_rope_freq=layer_pattern(window is None for window in windows))

    def _read_windows(self, settings: Settings, layers: int) -> dict[str, Any]:
        """Return the flags for attention windows."""
        if not self.has_windows:
            return {}
        if settings.has("sliding_window") and "sliding_window" not in settings.values:
            raise settings.error("sliding_window", "must be a number")
        every = settings.size("sliding_window_pattern", _EVERY)
        settings.size("_sliding_window_pattern", every)  # transformers 4 writes it
        return read_alternating_windows(settings, layers, every=every, window=_WINDOW)

    def write(self, model: ModelConfig, vocab: int) -> dict[str, Any]:
        """Return the content of config.json for a network."""
        qk_norm = {"use_qk_norm": model.qk_layernorm}
        return {
            **super().write(model, vocab),
            **(write_alternating_windows(model, _WINDOW) if self.has_windows else qk_norm),
            "logit_scale": model.logit_scale or 1.0,
        }

    def modules(self, model: ModelConfig) -> Mapping[str, Sequence[str]]:
        """Return the Hugging Face modules in a layer, by native module name."""
        return _COHERE_LAYER

    def conversion(
        self, layer: plans.LayerPlan, module: str, tensors: int
    ) -> rules.TensorConversion:
        """Return the conversion between Hugging Face tensors and the parameters of a module."""
        conversion = super().conversion(layer, module, tensors)
        match module:
            case "attention.qkv":
                return interleaved(layer, conversion)
            case "attention.query_norm" | "attention.key_norm":
                return _norm_of_heads(layer)
        return conversion
