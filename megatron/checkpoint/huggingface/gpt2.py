"""GPT-2: learned positions, LayerNorm, GeLU, biases in all layers, tied word embeddings."""

from __future__ import annotations

from typing import Any

from megatron.checkpoint.huggingface import rules
from megatron.checkpoint.huggingface.settings import MAX_HEADS, MAX_LAYERS, Settings
from megatron.config.model import ModelConfig
from megatron.models.plan import LayerPlan

EXACT_GELU = {"gelu_new": False, "gelu_pytorch_tanh": False, "gelu": True}
_KEYS = (
    rules.Key("n_embd", "hidden_size"),
    rules.Key("n_head", "num_attention_heads", max_value=MAX_HEADS),
    rules.Key("n_layer", "num_layers", max_value=MAX_LAYERS),
    rules.Key("n_positions", "max_position_embeddings"),
    rules.Key("layer_norm_epsilon", "norm_epsilon", "number", 1e-5),
    rules.Key("attn_pdrop", "attention_dropout", "fraction", 0.1),
    rules.Key("resid_pdrop", "hidden_dropout", "fraction", 0.1),
)
_OFF = ("add_cross_attention", "scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn")
_FIXED: dict[str, Any] = {"scale_attn_weights": True, "n_special": 0, "pruned_heads": {}}
_FIXED |= dict.fromkeys(_OFF, False)
_MASKS = r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)"  # causal masks, in older files
_LAYER = {
    "attention_norm": ("ln_1",),
    "attention.qkv": ("attn.c_attn",),
    "attention.output": ("attn.c_proj",),
    "mlp.up": ("mlp.c_fc",),
    "mlp.down": ("mlp.c_proj",),
    "mlp_norm": ("ln_2",),
}


def gelu_name(model: ModelConfig) -> str:
    """Return config.json's name for the network's GELU, exact or approximate."""
    return "gelu" if model.activation == "gelu" else "gelu_new"


class GPT2(rules.Family):
    """The GPT-2 family."""

    def __init__(self) -> None:
        """Define the family's names and keys."""
        names = ("gpt2", "GPT2LMHeadModel", "transformer.")
        super().__init__(*names, keys=_KEYS, fixed=_FIXED, tied=True, derived=_MASKS)

    def network(self, settings: Settings, flags: dict[str, Any]) -> ModelConfig:
        """Return the network that a config.json describes."""
        hidden, heads = flags["hidden_size"], flags["num_attention_heads"]
        if hidden % heads:
            raise settings.error("n_head", f"does not divide n_embd {hidden}")
        settings.fraction("embd_pdrop", 0.1)
        return ModelConfig(
            **flags,
            ffn_hidden_size=settings.size("n_inner", 4 * hidden),
            kv_channels=hidden // heads,
            onnx_safe=settings.choice("activation_function", EXACT_GELU, "gelu_new") or None,
        )

    def write(self, model: ModelConfig, vocab: int) -> dict[str, Any]:
        """Return the content of config.json for a network."""
        return {
            **super().write(model, vocab),
            "n_ctx": model.max_position_embeddings,
            "n_inner": model.ffn_hidden_size,
            "activation_function": gelu_name(model),
            "embd_pdrop": model.hidden_dropout,
        }

    def names(self, model: ModelConfig) -> rules.Names:
        """Yield each of our modules with the corresponding Hugging Face modules, in file order."""
        yield "embedding.word", ["transformer.wte"]
        yield "embedding.position", ["transformer.wpe"]
        for layer in range(model.num_layers):
            yield from rules.layer_names(f"layers.{layer}", f"transformer.h.{layer}", _LAYER)
        yield "final_norm", ["transformer.ln_f"]
        yield "output", ["lm_head"]

    def conversion(self, layer: LayerPlan, module: str, tensors: int) -> rules.TensorConversion:
        """Return the conversion between Hugging Face tensors and the parameters of a module."""
        if module in ("attention.output", "mlp.up", "mlp.down"):
            return rules.TRANSPOSED
        return super().conversion(layer, module, tensors)
