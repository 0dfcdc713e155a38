"""T5 of Google: relative positions, RMSNorm, no biases, unscaled attention scores.

The first version has ReLU and an output that shares the words' matrix and divides by the root of
the width before; version 1.1 (and mT5's and Flan's T5s) a gated GeLU and an output of its own. In
training two things differ: they drop out of the MLP's inner values too, and after the last
normalization of each half.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megatron.checkpoint.huggingface.rules import (
    ByGroup,
    Described,
    GateUp,
    KeyValueByHead,
    ParameterRule,
    Same,
    TensorForm,
)
from megatron.checkpoint.huggingface.settings import MOST_HEADS, MOST_LAYERS, Settings
from megatron.config.model import ModelConfig

# `feed_forward_proj` with our flag.
_ACTIVATIONS: Mapping[str, Mapping[str, bool]] = {
    "relu": {"relu": True},
    "gated-gelu": {"geglu": True},
    "gated-silu": {"swiglu": True},
    "gelu_new": {"openai_gelu": True},
    "gelu": {"onnx_safe": True},
}
_PROJECTIONS = {
    "relu": "relu",
    "geglu": "gated-gelu",
    "swiglu": "gated-silu",
    "gelu_tanh": "gelu_new",
    "gelu": "gelu",
}
_POSITIONS = 512  # that it was trained with; it computes any


class T5:
    """See `Family`."""

    name = "t5"
    prefix = ""
    tied_head = "lm_head.weight"
    head_follows_files = True
    word_copies = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")

    def architecture(self, pieces: frozenset[str]) -> str:
        """See `Family`."""
        return "T5ForConditionalGeneration"

    def read(self, settings: Settings) -> Described:
        """See `Family`."""
        settings.must_be("model_type", self.name)
        layers = settings.size("num_layers", 6, most=MOST_LAYERS)
        tied = settings.switch("tie_word_embeddings", True)
        dropout = settings.share("dropout_rate", 0.1)
        buckets = settings.size("relative_attention_num_buckets", 32)
        longest = settings.size("relative_attention_max_distance", 128)
        model = ModelConfig(
            architecture="t5",
            num_layers=layers,
            decoder_num_layers=settings.size("num_decoder_layers", layers, most=MOST_LAYERS),
            hidden_size=settings.size("d_model", 512),
            ffn_hidden_size=settings.size("d_ff", 2048),
            num_attention_heads=settings.size("num_heads", 8, most=MOST_HEADS),
            kv_channels=settings.size("d_kv", 64, most=MOST_HEADS),
            max_position_embeddings=settings.size("n_positions", _POSITIONS),
            position_embedding_type="relative",
            relative_attention_num_buckets=buckets,
            relative_attention_max_distance=longest,
            normalization="RMSNorm",
            norm_epsilon=settings.number("layer_norm_epsilon", 1e-6),
            untie_embeddings_and_output_weights=not tied,
            scale_decoder_outputs=settings.switch("scale_decoder_outputs", tied),
            add_output_bias=False,
            add_bias_linear=False,
            softmax_scale=1.0,
            attention_dropout=dropout,
            hidden_dropout=dropout,
            **_activation(settings),
        )
        if buckets % 2 or not 4 <= buckets < 2 * longest:
            raise settings.error(
                "relative_attention_num_buckets",
                f"expected an even number from 4 to below twice the max_distance {longest}",
            )
        vocab = settings.size("vocab_size", 32128)
        settings.number("initializer_factor", 1.0)
        settings.share("classifier_dropout", 0.0)
        settings.refuse_the_rest()
        return Described(model, vocab)

    def write(self, model: ModelConfig, vocab: int) -> dict[str, Any]:
        """See `Family`."""
        return {
            "model_type": self.name,
            "is_encoder_decoder": True,
            "vocab_size": vocab,
            "d_model": model.hidden_size,
            "d_kv": model.kv_channels,
            "d_ff": model.ffn_hidden_size,
            "num_layers": model.num_layers,
            "num_decoder_layers": model.decoder_num_layers,
            "num_heads": model.num_attention_heads,
            "n_positions": model.max_position_embeddings,
            "relative_attention_num_buckets": model.relative_attention_num_buckets,
            "relative_attention_max_distance": model.relative_attention_max_distance,
            "feed_forward_proj": _PROJECTIONS.get(model.activation, "relu"),
            "layer_norm_epsilon": model.norm_epsilon,
            "dropout_rate": model.hidden_dropout,
            "tie_word_embeddings": not model.untie_embeddings_and_output_weights,
            "scale_decoder_outputs": model.scale_decoder_outputs,
        }

    def rules(self, model: ModelConfig, vocab: int) -> list[ParameterRule]:
        """See `Family`."""
        hidden = model.hidden_size
        rules = [_rule("embedding.word.weight", (vocab, hidden), "shared.weight")]
        for stack, layers in (
            ("encoder", model.num_layers),
            ("decoder", model.decoder_layers),
        ):
            table = (model.relative_attention_num_buckets, model.num_attention_heads)
            first = f"{stack}.block.0.layer.0.SelfAttention"
            name = f"{first}.relative_attention_bias.weight"
            rules.append(_rule(f"{stack}.position_bias.weight", table, name))
            for layer in range(layers):
                rules += _layer(model, stack, layer)
            norm = f"{stack}.final_layer_norm.weight"
            rules.append(_rule(f"{stack}.final_norm.weight", (hidden,), norm))
        if model.untie_embeddings_and_output_weights:
            rules.append(_rule("output.weight", (vocab, hidden), self.tied_head))
        return rules

    def is_derived(self, name: str) -> bool:
        """The first files hold a bias between decoder and encoder, which T5 does not use."""
        return name == "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"


def _activation(settings: Settings) -> Mapping[str, Any]:
    """Our flag for the key, whose two parts newer files repeat."""
    flags: Mapping[str, bool] = settings.word("feed_forward_proj", _ACTIVATIONS, "relu")
    name = next(name for name, ours in _ACTIVATIONS.items() if ours == flags)
    settings.must_be("is_gated_act", name.startswith("gated-"))
    settings.must_be("dense_act_fn", "gelu_new" if flags.get("geglu") else name.split("-")[-1])
    return flags


def _layer(model: ModelConfig, stack: str, layer: int) -> Iterator[ParameterRule]:
    hidden, ffn = model.hidden_size, model.ffn_hidden_size
    heads = model.num_attention_heads
    inner = heads * model.kv_channels
    ours, theirs = f"{stack}.layers.{layer}", f"{stack}.block.{layer}.layer"
    attention = f"{theirs}.0.SelfAttention"
    yield _rule(f"{ours}.attention_norm.weight", (hidden,), f"{theirs}.0.layer_norm.weight")
    names = tuple(f"{attention}.{part}.weight" for part in "qkv")
    form: TensorForm = ByGroup(heads, heads)
    yield _rule(f"{ours}.attention.qkv.weight", (3 * inner, hidden), *names, form=form)
    yield _rule(f"{ours}.attention.output.weight", (hidden, inner), f"{attention}.o.weight")
    last = 1
    if stack == "decoder":
        last, cross, part = 2, f"{theirs}.1.EncDecAttention", f"{ours}.cross_attention"
        yield _rule(f"{ours}.cross_norm.weight", (hidden,), f"{theirs}.1.layer_norm.weight")
        yield _rule(f"{part}.query.weight", (inner, hidden), f"{cross}.q.weight")
        names = (f"{cross}.k.weight", f"{cross}.v.weight")
        form = KeyValueByHead(heads)
        yield _rule(f"{part}.key_value.weight", (2 * inner, hidden), *names, form=form)
        yield _rule(f"{part}.output.weight", (hidden, inner), f"{cross}.o.weight")
    dense = f"{theirs}.{last}.DenseReluDense"
    yield _rule(f"{ours}.mlp_norm.weight", (hidden,), f"{theirs}.{last}.layer_norm.weight")
    if model.is_gated:
        names = (f"{dense}.wi_0.weight", f"{dense}.wi_1.weight")
        yield _rule(f"{ours}.mlp.up.weight", (2, ffn, hidden), *names, form=GateUp())
    else:
        yield _rule(f"{ours}.mlp.up.weight", (ffn, hidden), f"{dense}.wi.weight")
    yield _rule(f"{ours}.mlp.down.weight", (hidden, ffn), f"{dense}.wo.weight")


def _rule(
    name: str, shape: tuple[int, ...], *theirs: str, form: TensorForm | None = None
) -> ParameterRule:
    return ParameterRule(f"model.{name}", shape, theirs, form or Same())
