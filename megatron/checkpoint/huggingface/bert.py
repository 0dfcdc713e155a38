"""BERT: an encoder with token types, and a pooler and two heads that files may lack.

BERT normalizes after each residual sum. Our BERT, with --apply-residual-connection-post-layernorm,
normalizes before attention and before the MLP, and adds their outputs to the normalized values. The
computation is the same, but the boundaries between layers differ: the normalization after the
embeddings is the first normalization of our layer 0, and the last normalization of Hugging Face's
layer i is the first of our layer i + 1. Training differs in one respect: Hugging Face applies
dropout to the embeddings after normalizing them, whereas we apply it before.
"""

from __future__ import annotations

from typing import Any

from megatron.checkpoint.huggingface import rules
from megatron.checkpoint.huggingface.gpt2 import gelu_name
from megatron.checkpoint.huggingface.settings import MAX_HEADS, MAX_LAYERS, Settings
from megatron.config.model import ModelConfig

_TANH = {"gelu": False, "gelu_new": True, "gelu_pytorch_tanh": True}
# Parts of the model that a folder may omit entirely.
_POOLER, _MASKED, _ORDER = "pooler", "masked tokens", "sentence order"
_KEYS = (
    rules.Key("hidden_size", "hidden_size"),
    rules.Key("num_attention_heads", "num_attention_heads", max_value=MAX_HEADS),
    rules.Key("num_hidden_layers", "num_layers", max_value=MAX_LAYERS),
    rules.Key("intermediate_size", "ffn_hidden_size"),
    rules.Key("max_position_embeddings", "max_position_embeddings"),
    rules.Key("layer_norm_eps", "norm_epsilon", "number", 1e-12),
    rules.Key("attention_probs_dropout_prob", "attention_dropout", "fraction", 0.1),
    rules.Key("hidden_dropout_prob", "hidden_dropout", "fraction", 0.1),
)
_LAYER = {
    "attention.qkv": tuple(f"attention.self.{part}" for part in ("query", "key", "value")),
    "attention.output": ("attention.output.dense",),
    "mlp_norm": ("attention.output.LayerNorm",),
    "mlp.up": ("intermediate.dense",),
    "mlp.down": ("output.dense",),
}
_TABLES = {"position_embedding_type": "absolute", "type_vocab_size": 2}
_FIXED = {
    **_TABLES,
    **dict.fromkeys(("is_decoder", "add_cross_attention"), False),
    "tie_word_embeddings": True,
    "directionality": "bidi",
    "pruned_heads": {},
}


class Bert(rules.Family):
    """The BERT family."""

    def __init__(self) -> None:
        """Define the family's names and keys, and the parts that files may omit."""
        super().__init__(
            "bert",
            "BertForPreTraining",
            prefix="bert.",
            tied_head="cls.predictions.decoder.weight",
            pieces={"pooler": _POOLER, "output": _MASKED, "head": _MASKED, "binary_head": _ORDER},
            keys=_KEYS,
            fixed=_FIXED,
            # Older files also contain the position indices 0, 1, 2, ..., and the output bias twice.
            derived=r".*embeddings\.position_ids|cls\.predictions\.decoder\.bias",
            head_activates=True,
        )

    def architecture(self, pieces: frozenset[str]) -> str:
        """Return the name of the class in `transformers` that has these optional parts."""
        if _ORDER in pieces:
            both = _MASKED in pieces
            return self.language_model if both else "BertForNextSentencePrediction"
        return "BertForMaskedLM" if _MASKED in pieces else "BertModel"

    def network(self, settings: Settings, flags: dict[str, Any]) -> ModelConfig:
        """Return the network that a config.json describes."""
        hidden, heads = flags["hidden_size"], flags["num_attention_heads"]
        if hidden % heads:
            raise settings.error("num_attention_heads", f"does not divide hidden_size {hidden}")
        settings.fraction("classifier_dropout", 0.1)
        tanh = settings.choice("hidden_act", _TANH, "gelu")
        return ModelConfig(
            **flags,
            architecture="bert",
            kv_channels=hidden // heads,
            apply_residual_connection_post_layernorm=True,
            openai_gelu=tanh,
            onnx_safe=None if tanh else True,
        )

    def write(self, model: ModelConfig, vocab: int) -> dict[str, Any]:
        """Return the content of config.json for a network."""
        return {
            **super().write(model, vocab),
            "hidden_act": gelu_name(model),
            **_TABLES,
        }

    def names(self, model: ModelConfig) -> rules.Names:
        """Yield each of our modules with the corresponding Hugging Face modules, in file order."""
        for table in ("word", "position", "token_type"):
            yield f"embedding.{table}", [f"bert.embeddings.{table}_embeddings"]
        norm_before = "bert.embeddings.LayerNorm"
        for layer in range(model.num_layers):
            hf_layer = f"bert.encoder.layer.{layer}"
            yield f"layers.{layer}.attention_norm", [norm_before]
            yield from rules.layer_names(f"layers.{layer}", hf_layer, _LAYER)
            norm_before = f"{hf_layer}.output.LayerNorm"
        yield "final_norm", [norm_before]
        yield "pooler.dense", ["bert.pooler.dense"]
        yield "output", ["cls.predictions"]
        yield "head.dense", ["cls.predictions.transform.dense"]
        yield "head.norm", ["cls.predictions.transform.LayerNorm"]
        yield "binary_head", ["cls.seq_relationship"]
