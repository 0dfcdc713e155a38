"""GPT-2: learned positions, LayerNorm, GeLU, biases everywhere, tied word embeddings."""

from __future__ import annotations

import re
from typing import Any

from megatron.checkpoint.huggingface import rules
from megatron.checkpoint.huggingface.settings import MOST_HEADS, MOST_LAYERS, Settings
from megatron.config.model import ModelConfig
from megatron.models.plan import LayerPlan

_EXACT_GELU = {"gelu_new": False, "gelu_pytorch_tanh": False, "gelu": True}
_KEYS = (
    rules.Key("n_embd", "hidden_size"),
    rules.Key("n_head", "num_attention_heads", most=MOST_HEADS),
    rules.Key("n_layer", "num_layers", most=MOST_LAYERS),
    rules.Key("n_positions", "max_position_embeddings"),
    rules.Key("layer_norm_epsilon", "norm_epsilon", "number", 1e-5),
    rules.Key("attn_pdrop", "attention_dropout", "share", 0.1),
    rules.Key("resid_pdrop", "hidden_dropout", "share", 0.1),
)
_LAYER = {
    "attention_norm": ("ln_1",),
    "attention.qkv": ("attn.c_attn",),
    "attention.output": ("attn.c_proj",),
    "mlp.up": ("mlp.c_fc",),
    "mlp.down": ("mlp.c_proj",),
    "mlp_norm": ("ln_2",),
}


class GPT2(rules.Family):
    """The GPT-2 family."""

    def __init__(self) -> None:
        """State the family's names and keys."""
        super().__init__("gpt2", "GPT2LMHeadModel", prefix="transformer.", keys=_KEYS)

    def read(self, settings: Settings) -> rules.Described:
        """Return the network that a config.json describes."""
        flags = rules.read_keys(settings, self.keys)
        hidden, heads = flags["hidden_size"], flags["num_attention_heads"]
        settings.must_be("model_type", self.name)
        settings.must_be("add_cross_attention", False)
        settings.must_be("scale_attn_weights", True)
        settings.must_be("scale_attn_by_inverse_layer_idx", False)
        settings.must_be("reorder_and_upcast_attn", False)
        settings.must_be("n_special", 0)
        settings.must_be("pruned_heads", {})
        settings.share("embd_pdrop", 0.1)
        model = ModelConfig(
            **flags,
            ffn_hidden_size=settings.size("n_inner", 4 * hidden),
            kv_channels=hidden // heads,
            onnx_safe=settings.word("activation_function", _EXACT_GELU, "gelu_new") or None,
            untie_embeddings_and_output_weights=not settings.switch("tie_word_embeddings", True),
        )
        if hidden % heads:
            raise settings.error("n_head", f"does not divide n_embd {hidden}")
        vocab = settings.size("vocab_size")
        settings.refuse_the_rest()
        return rules.Described(model, vocab)

    def write(self, model: ModelConfig, vocab: int) -> dict[str, Any]:
        """Return a config.json for a network."""
        return {
            **super().write(model, vocab),
            "n_ctx": model.max_position_embeddings,
            "n_inner": model.ffn_hidden_size,
            "activation_function": "gelu" if model.activation == "gelu" else "gelu_new",
            "embd_pdrop": model.hidden_dropout,
            "tie_word_embeddings": not model.untie_embeddings_and_output_weights,
        }

    def names(self, model: ModelConfig) -> rules.Names:
        """Yield each of our modules with their modules."""
        yield "embedding.word", ["transformer.wte"]
        yield "embedding.position", ["transformer.wpe"]
        for layer in range(model.num_layers):
            yield from rules.layer_names(f"layers.{layer}", f"transformer.h.{layer}", _LAYER)
        yield "final_norm", ["transformer.ln_f"]
        yield "output", ["lm_head"]

    def form(self, layer: LayerPlan, module: str, tensors: int) -> rules.TensorForm:
        """Return the form of a layer's module."""
        if module in ("attention.output", "mlp.up", "mlp.down"):
            return rules.Transposed()
        return super().form(layer, module, tensors)

    def is_derived(self, name: str) -> bool:
        """Return whether a tensor is a layer's causal mask, as stored in older files."""
        return re.fullmatch(r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)", name) is not None
