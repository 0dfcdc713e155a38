"""BERT: an encoder with token types, a pooler and two heads, of which files may lack some.

It normalizes after each residual sum, ours with --apply-residual-connection-post-layernorm before
each half of a layer, and goes on from the normalized values: the same sums and the same
normalizations, cut into layers at another place. So the normalization after the embeddings is the
first of our layer 0, and the last one of their layer i is the first of our layer i + 1. In training
one thing differs: they drop out of the embeddings after they were normalized, we before.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron.checkpoint.huggingface.rules import (
    ByGroup,
    Described,
    ParameterRule,
    Same,
    TensorForm,
)
from megatron.checkpoint.huggingface.settings import MOST_HEADS, MOST_LAYERS, Settings
from megatron.config.model import ModelConfig

_TANH = {"gelu": False, "gelu_new": True, "gelu_pytorch_tanh": True}
# Pieces that files may lack as a whole.
_POOLER, _MASKED, _ORDER = "pooler", "masked tokens", "sentence order"
_KINDS = ("weight", "bias")


class Bert:
    """See `Family`."""

    name = "bert"
    prefix = "bert."
    tied_head = "cls.predictions.decoder.weight"
    head_follows_files = False
    word_copies: tuple[str, ...] = ()

    def architecture(self, pieces: frozenset[str]) -> str:
        """See `Family`."""
        if _ORDER in pieces:
            both = _MASKED in pieces
            return "BertForPreTraining" if both else "BertForNextSentencePrediction"
        return "BertForMaskedLM" if _MASKED in pieces else "BertModel"

    def read(self, settings: Settings) -> Described:
        """See `Family`."""
        hidden = settings.size("hidden_size")
        heads = settings.size("num_attention_heads", most=MOST_HEADS)
        settings.must_be("model_type", self.name)
        settings.must_be("is_decoder", False)
        settings.must_be("add_cross_attention", False)
        settings.must_be("position_embedding_type", "absolute")
        settings.must_be("type_vocab_size", 2)
        settings.must_be("tie_word_embeddings", True)
        settings.must_be("directionality", "bidi")
        settings.must_be("pruned_heads", {})
        settings.share("classifier_dropout", 0.1)
        tanh = settings.word("hidden_act", _TANH, "gelu")
        model = ModelConfig(
            architecture="bert",
            num_layers=settings.size("num_hidden_layers", most=MOST_LAYERS),
            hidden_size=hidden,
            ffn_hidden_size=settings.size("intermediate_size"),
            num_attention_heads=heads,
            kv_channels=hidden // heads,
            max_position_embeddings=settings.size("max_position_embeddings"),
            norm_epsilon=settings.number("layer_norm_eps", 1e-12),
            apply_residual_connection_post_layernorm=True,
            openai_gelu=tanh,
            onnx_safe=None if tanh else True,
            attention_dropout=settings.share("attention_probs_dropout_prob", 0.1),
            hidden_dropout=settings.share("hidden_dropout_prob", 0.1),
        )
        if hidden % heads:
            raise settings.error("num_attention_heads", f"does not divide hidden_size {hidden}")
        vocab = settings.size("vocab_size")
        settings.refuse_the_rest()
        return Described(model, vocab)

    def write(self, model: ModelConfig, vocab: int) -> dict[str, Any]:
        """See `Family`."""
        return {
            "model_type": self.name,
            "vocab_size": vocab,
            "hidden_size": model.hidden_size,
            "intermediate_size": model.ffn_hidden_size,
            "num_hidden_layers": model.num_layers,
            "num_attention_heads": model.num_attention_heads,
            "hidden_act": "gelu" if model.activation == "gelu" else "gelu_new",
            "max_position_embeddings": model.max_position_embeddings,
            "position_embedding_type": "absolute",
            "type_vocab_size": 2,
            "layer_norm_eps": model.norm_epsilon,
            "attention_probs_dropout_prob": model.attention_dropout,
            "hidden_dropout_prob": model.hidden_dropout,
        }

    def rules(self, model: ModelConfig, vocab: int) -> list[ParameterRule]:
        """See `Family`."""
        hidden, layers = model.hidden_size, model.num_layers
        places = model.max_position_embeddings
        rules = [
            _rule(f"embedding.{ours}.weight", (rows, hidden), f"bert.embeddings.{theirs}.weight")
            for ours, rows, theirs in (
                ("word", vocab, "word_embeddings"),
                ("position", places, "position_embeddings"),
                ("token_type", 2, "token_type_embeddings"),
            )
        ]
        before = "bert.embeddings.LayerNorm"
        for layer in range(layers):
            theirs = f"bert.encoder.layer.{layer}"
            rules += _layer(model, f"layers.{layer}", theirs, before)
            before = f"{theirs}.output.LayerNorm"
        rules += _norm("final_norm", hidden, before)
        rules += _linear("pooler.dense", hidden, hidden, "bert.pooler.dense", piece=_POOLER)
        head = "cls.predictions"
        rules.append(_rule("output.bias", (vocab,), f"{head}.bias", piece=_MASKED))
        rules += _linear("head.dense", hidden, hidden, f"{head}.transform.dense", piece=_MASKED)
        rules += _norm("head.norm", hidden, f"{head}.transform.LayerNorm", piece=_MASKED)
        rules += _linear("binary_head", 2, hidden, "cls.seq_relationship", piece=_ORDER)
        return rules

    def is_derived(self, name: str) -> bool:
        """Places 0, 1, 2, ... in older files, and the second name of the output's bias."""
        return name.endswith("embeddings.position_ids") or name == "cls.predictions.decoder.bias"


def _layer(model: ModelConfig, ours: str, theirs: str, norm_before: str) -> Iterator[ParameterRule]:
    """A layer of ours; `norm_before` follows their layer before it."""
    hidden, ffn = model.hidden_size, model.ffn_hidden_size
    heads = model.num_attention_heads
    yield from _norm(f"{ours}.attention_norm", hidden, norm_before)
    for kind, shape in zip(_KINDS, ((3 * hidden, hidden), (3 * hidden,)), strict=True):
        names = (f"{theirs}.attention.self.{part}.{kind}" for part in ("query", "key", "value"))
        yield _rule(f"{ours}.attention.qkv.{kind}", shape, *names, form=ByGroup(heads, heads))
    dense = f"{theirs}.attention.output.dense"
    yield from _linear(f"{ours}.attention.output", hidden, hidden, dense)
    yield from _norm(f"{ours}.mlp_norm", hidden, f"{theirs}.attention.output.LayerNorm")
    yield from _linear(f"{ours}.mlp.up", ffn, hidden, f"{theirs}.intermediate.dense")
    yield from _linear(f"{ours}.mlp.down", hidden, ffn, f"{theirs}.output.dense")


def _linear(ours: str, out: int, size: int, theirs: str, piece: str = "") -> list[ParameterRule]:
    return [
        _rule(f"{ours}.{kind}", shape, f"{theirs}.{kind}", piece=piece)
        for kind, shape in zip(_KINDS, ((out, size), (out,)), strict=True)
    ]


def _norm(ours: str, hidden: int, theirs: str, piece: str = "") -> list[ParameterRule]:
    return [_rule(f"{ours}.{kind}", (hidden,), f"{theirs}.{kind}", piece=piece) for kind in _KINDS]


def _rule(
    name: str, shape: tuple[int, ...], *theirs: str, form: TensorForm | None = None, piece: str = ""
) -> ParameterRule:
    return ParameterRule(f"model.{name}", shape, theirs, form or Same(), piece)
