"""GPT-NeoX, Pythia and StableLM: LayerNorm, partial rotation, parallel attention and MLP."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from megatron.checkpoint.huggingface import rules
from megatron.checkpoint.huggingface.gpt2 import EXACT_GELU, gelu_name
from megatron.checkpoint.huggingface.llama import (
    LLAMA_KEYS,
    LlamaLike,
    read_partial_rotation,
    write_rope,
)
from megatron.checkpoint.huggingface.settings import MAX_HEADS, MAX_LAYERS, Settings
from megatron.config.model import ModelConfig

_KEYS = (
    rules.Key("hidden_size", "hidden_size"),
    rules.Key("num_attention_heads", "num_attention_heads", max_value=MAX_HEADS),
    rules.Key("num_hidden_layers", "num_layers", max_value=MAX_LAYERS),
    rules.Key("intermediate_size", "ffn_hidden_size"),
    rules.Key("max_position_embeddings", "max_position_embeddings"),
    rules.Key("layer_norm_eps", "norm_epsilon", "number", 1e-5),
    rules.Key("attention_dropout", "attention_dropout", "fraction", 0.0),
    rules.Key("hidden_dropout", "hidden_dropout", "fraction", 0.0),
    rules.Key("use_parallel_residual", "parallel_residual", "boolean", True),
)
_LAYER = {
    "attention_norm": ("input_layernorm",),
    "attention.qkv": ("attention.query_key_value",),
    "attention.output": ("attention.dense",),
    "mlp_norm": ("post_attention_layernorm",),
    "mlp.up": ("mlp.dense_h_to_4h",),
    "mlp.down": ("mlp.dense_4h_to_h",),
}


@dataclass(frozen=True)
class NeoX(rules.Family):
    """The GPT-NeoX family. Its files order queries, keys and values by head, as our tensors do."""

    prefix: str = "gpt_neox."
    tied_head: str = "embed_out.weight"
    tied: bool | None = False
    keys: tuple[rules.Key, ...] = _KEYS
    fixed: dict[str, Any] = field(default_factory=lambda: {"attention_bias": True})
    # Causal masks and rotary frequencies, in older files.
    derived: str = r"gpt_neox\.layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)"

    def network(self, settings: Settings, flags: dict[str, Any]) -> ModelConfig:
        """Return the network that a config.json describes."""
        hidden, heads = flags["hidden_size"], flags["num_attention_heads"]
        if hidden % heads:
            raise settings.error("num_attention_heads", f"does not divide hidden_size {hidden}")
        settings.fraction("classifier_dropout", 0.1)
        share = settings.number("rotary_pct", 0.25)
        base = settings.number("rotary_emb_base", 10000.0)
        return ModelConfig(
            **flags,
            **read_partial_rotation(settings, base, share),
            kv_channels=hidden // heads,
            position_embedding_type="rope",
            onnx_safe=settings.choice("hidden_act", EXACT_GELU, "gelu") or None,
        )

    def write(self, model: ModelConfig, vocab: int) -> dict[str, Any]:
        """Return the content of config.json for a network."""
        return {
            **super().write(model, vocab),
            "attention_bias": True,
            "hidden_act": gelu_name(model),
            "rotary_emb_base": model.rotary_base,
            "rotary_pct": model.rotary_percent,
            "rope_scaling": write_rope(model),
        }

    def names(self, model: ModelConfig) -> rules.Names:
        """Yield each of our modules with the corresponding Hugging Face modules, in file order."""
        yield "embedding.word", ["gpt_neox.embed_in"]
        for layer in range(model.num_layers):
            yield from rules.layer_names(f"layers.{layer}", f"gpt_neox.layers.{layer}", _LAYER)
        yield "final_norm", ["gpt_neox.final_layer_norm"]
        yield "output", ["embed_out"]

    def conversion(self, layer: Any, module: str, tensors: int) -> rules.TensorConversion:
        """Return the conversion for a module, which leaves every tensor unchanged."""
        return rules.SAME


_STABLE_KEYS = (
    *(key for key in LLAMA_KEYS if key.field != "norm_epsilon"),
    rules.Key("layer_norm_eps", "norm_epsilon", "number", 1e-5),
)


@dataclass(frozen=True)
class StableLm(LlamaLike):
    """StableLM: Llama with LayerNorm, which attention and MLP share if they are parallel."""

    keys: tuple[rules.Key, ...] = _STABLE_KEYS
    optional_kv_heads: bool = True

    def network(self, settings: Settings, flags: dict[str, Any]) -> ModelConfig:
        """Return the network that a config.json describes."""
        settings.must_be("qk_layernorm", False)
        parallel = settings.boolean("use_parallel_residual", False)
        return replace(
            super().network(settings, flags),
            normalization="LayerNorm",
            parallel_residual=parallel,
            shared_parallel_norm=parallel,
            add_qkv_bias=settings.boolean("use_qkv_bias", False),
            hidden_dropout=settings.fraction("hidden_dropout", 0.0),
        )

    def _read_rotation(self, settings: Settings) -> dict[str, Any]:
        """Return the flags for rotary embeddings."""
        share = settings.number("partial_rotary_factor", 0.25)
        base = settings.number("rope_theta", self.rotary_base)
        return read_partial_rotation(settings, base, share)

    def write(self, model: ModelConfig, vocab: int) -> dict[str, Any]:
        """Return the content of config.json for a network."""
        keys = super().write(model, vocab)
        del keys["attention_bias"]
        return {
            **keys,
            "hidden_dropout": model.hidden_dropout,
            "partial_rotary_factor": model.rotary_percent,
            "qk_layernorm": False,
            "use_parallel_residual": model.parallel_residual,
            "use_qkv_bias": model.add_qkv_bias,
        }
