"""GPT-2: learned positions, LayerNorm, GeLU, biases everywhere, tied word embeddings."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from megatron.checkpoint.huggingface.rules import (
    Described,
    FusedByHead,
    ParameterRule,
    Same,
    TensorForm,
    Transposed,
)
from megatron.checkpoint.huggingface.settings import MOST_HEADS, MOST_LAYERS, Settings
from megatron.config.model import ModelConfig

_EXACT_GELU = {"gelu_new": False, "gelu_pytorch_tanh": False, "gelu": True}


class GPT2:
    """See `Family`."""

    name = "gpt2"
    prefix = "transformer."
    tied_head = "lm_head.weight"
    head_follows_files = False
    word_copies: tuple[str, ...] = ()

    def architecture(self, pieces: frozenset[str]) -> str:
        """See `Family`."""
        return "GPT2LMHeadModel"

    def read(self, settings: Settings) -> Described:
        """See `Family`."""
        hidden, heads = settings.size("n_embd"), settings.size("n_head", most=MOST_HEADS)
        settings.must_be("model_type", self.name)
        settings.must_be("add_cross_attention", False)
        settings.must_be("scale_attn_weights", True)
        settings.must_be("scale_attn_by_inverse_layer_idx", False)
        settings.must_be("reorder_and_upcast_attn", False)
        settings.must_be("n_special", 0)
        settings.must_be("pruned_heads", {})
        settings.share("embd_pdrop", 0.1)
        model = ModelConfig(
            num_layers=settings.size("n_layer", most=MOST_LAYERS),
            hidden_size=hidden,
            ffn_hidden_size=settings.size("n_inner", 4 * hidden),
            num_attention_heads=heads,
            kv_channels=hidden // heads,
            max_position_embeddings=settings.size("n_positions"),
            norm_epsilon=settings.number("layer_norm_epsilon", 1e-5),
            onnx_safe=settings.word("activation_function", _EXACT_GELU, "gelu_new") or None,
            untie_embeddings_and_output_weights=not settings.switch("tie_word_embeddings", True),
            attention_dropout=settings.share("attn_pdrop", 0.1),
            hidden_dropout=settings.share("resid_pdrop", 0.1),
        )
        if hidden % heads:
            raise settings.error("n_head", f"does not divide n_embd {hidden}")
        vocab = settings.size("vocab_size")
        settings.refuse_the_rest()
        return Described(model, vocab)

    def write(self, model: ModelConfig, vocab: int) -> dict[str, Any]:
        """See `Family`."""
        return {
            "model_type": self.name,
            "vocab_size": vocab,
            "n_positions": model.max_position_embeddings,
            "n_ctx": model.max_position_embeddings,
            "n_embd": model.hidden_size,
            "n_layer": model.num_layers,
            "n_head": model.num_attention_heads,
            "n_inner": model.ffn_hidden_size,
            "activation_function": "gelu" if model.activation == "gelu" else "gelu_new",
            "layer_norm_epsilon": model.norm_epsilon,
            "attn_pdrop": model.attention_dropout,
            "embd_pdrop": model.hidden_dropout,
            "resid_pdrop": model.hidden_dropout,
            "tie_word_embeddings": not model.untie_embeddings_and_output_weights,
        }

    def rules(self, model: ModelConfig, vocab: int) -> list[ParameterRule]:
        """See `Family`."""
        hidden = model.hidden_size
        places = (model.max_position_embeddings, hidden)
        rules = [
            _rule("embedding.word.weight", (vocab, hidden), "transformer.wte.weight"),
            _rule("embedding.position.weight", places, "transformer.wpe.weight"),
        ]
        for layer in range(model.num_layers):
            rules += _layer(model, f"layers.{layer}", f"transformer.h.{layer}")
        rules += _norm("final_norm", hidden, "transformer.ln_f")
        if model.untie_embeddings_and_output_weights:
            rules.append(_rule("output.weight", (vocab, hidden), "lm_head.weight"))
        return rules

    def is_derived(self, name: str) -> bool:
        """Older files hold the causal mask of every layer."""
        return re.fullmatch(r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)", name) is not None


def _layer(model: ModelConfig, ours: str, theirs: str) -> Iterator[ParameterRule]:
    hidden, ffn = model.hidden_size, model.ffn_hidden_size
    by_head = FusedByHead(model.num_attention_heads)
    yield from _norm(f"{ours}.attention_norm", hidden, f"{theirs}.ln_1")
    for our_part, part, out, size, form in (
        ("attention.qkv", "attn.c_attn", 3 * hidden, hidden, by_head),
        ("attention.output", "attn.c_proj", hidden, hidden, Transposed()),
        ("mlp.up", "mlp.c_fc", ffn, hidden, Transposed()),
        ("mlp.down", "mlp.c_proj", hidden, ffn, Transposed()),
    ):
        yield _rule(f"{ours}.{our_part}.weight", (out, size), f"{theirs}.{part}.weight", form)
        bias_form = by_head if form is by_head else Same()
        yield _rule(f"{ours}.{our_part}.bias", (out,), f"{theirs}.{part}.bias", bias_form)
    yield from _norm(f"{ours}.mlp_norm", hidden, f"{theirs}.ln_2")


def _norm(ours: str, hidden: int, theirs: str) -> list[ParameterRule]:
    return [_rule(f"{ours}.{kind}", (hidden,), f"{theirs}.{kind}") for kind in ("weight", "bias")]


def _rule(
    name: str, shape: tuple[int, ...], theirs: str, form: TensorForm | None = None
) -> ParameterRule:
    return ParameterRule(f"model.{name}", shape, (theirs,), form or Same())
