"""Google's T5: relative positions, RMSNorm, no biases, unscaled attention scores.

The first version has ReLU, and an output layer that shares the word embeddings and divides its
input by the square root of the hidden size. Version 1.1 (also Flan-T5) has a gated GeLU and
a separate output matrix. Training differs in two respects: Hugging Face also applies dropout inside
the MLP and after the last normalization of each stack.
"""

from __future__ import annotations

from typing import Any

from megatron.checkpoint.huggingface import rules
from megatron.checkpoint.huggingface.settings import MAX_HEADS, MAX_LAYERS, Settings
from megatron.config.model import ModelConfig

# Our flag and our activation by the value of `feed_forward_proj`.
_ACTIVATIONS = {
    "relu": ("relu", "relu"),
    "gated-gelu": ("geglu", "geglu"),
    "gated-silu": ("swiglu", "swiglu"),
    "gelu_new": ("openai_gelu", "gelu_tanh"),
    "gelu": ("onnx_safe", "gelu"),
}
_KEYS = (
    rules.Key("num_layers", "num_layers", default=6, max_value=MAX_LAYERS),
    rules.Key("d_model", "hidden_size", default=512),
    rules.Key("d_ff", "ffn_hidden_size", default=2048),
    rules.Key("num_heads", "num_attention_heads", default=8, max_value=MAX_HEADS),
    rules.Key("d_kv", "kv_channels", default=64, max_value=MAX_HEADS),
    # The context length in training. The model accepts any length.
    rules.Key("n_positions", "max_position_embeddings", default=512),
    rules.Key("relative_attention_num_buckets", "relative_attention_num_buckets", default=32),
    rules.Key("relative_attention_max_distance", "relative_attention_max_distance", default=128),
    rules.Key("layer_norm_epsilon", "norm_epsilon", "number", 1e-6),
)


class T5(rules.Family):
    """The T5 family."""

    def __init__(self) -> None:
        """Define the family's names and keys."""
        super().__init__(
            "t5",
            "T5ForConditionalGeneration",
            head_follows_files=True,
            embedding_copies=("encoder.embed_tokens.weight", "decoder.embed_tokens.weight"),
            keys=_KEYS,
            tied=True,
            vocab=32128,
            # The earliest files contain a position bias for cross attention, which T5 does not use.
            derived=r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",
        )

    def network(self, settings: Settings, flags: dict[str, Any]) -> ModelConfig:
        """Return the network that a config.json describes."""
        tied = not flags["untie_embeddings_and_output_weights"]
        dropout = settings.fraction("dropout_rate", 0.1)
        decoder = settings.size("num_decoder_layers", flags["num_layers"], MAX_LAYERS)
        name = settings.choice("feed_forward_proj", {key: key for key in _ACTIVATIONS}, "relu")
        # Newer files repeat both parts of feed_forward_proj in separate keys.
        settings.must_be("is_gated_act", name.startswith("gated-"))
        settings.must_be("dense_act_fn", {"gated-gelu": "gelu_new"}.get(name, name.split("-")[-1]))
        model = ModelConfig(
            **flags,
            **dict[str, Any]({_ACTIVATIONS[name][0]: True}),
            architecture="t5",
            decoder_num_layers=decoder,
            position_embedding_type="relative",
            normalization="RMSNorm",
            scale_decoder_outputs=settings.boolean("scale_decoder_outputs", tied),
            add_output_bias=False,
            add_bias_linear=False,
            softmax_scale=1.0,
            attention_dropout=dropout,
            hidden_dropout=dropout,
        )
        buckets = model.relative_attention_num_buckets
        longest = model.relative_attention_max_distance
        if buckets % 2 or not 4 <= buckets < 2 * longest:
            raise settings.error(
                "relative_attention_num_buckets",
                f"expected an even number, at least 4 and below twice the max_distance {longest}",
            )
        settings.number("initializer_factor", 1.0)
        settings.fraction("classifier_dropout", 0.0)
        return model

    def write(self, model: ModelConfig, vocab: int) -> dict[str, Any]:
        """Return the content of config.json for a network."""
        names = {activation: name for name, (_, activation) in _ACTIVATIONS.items()}
        return {
            **super().write(model, vocab),
            "is_encoder_decoder": True,
            "num_decoder_layers": model.decoder_num_layers,
            "feed_forward_proj": names.get(model.activation, "relu"),
            "dropout_rate": model.hidden_dropout,
            "scale_decoder_outputs": model.scale_decoder_outputs,
        }

    def names(self, model: ModelConfig) -> rules.Names:
        """Yield each of our modules with the corresponding Hugging Face modules, in file order."""
        yield "embedding.word", ["shared"]
        up = ("wi_0", "wi_1") if model.is_gated else ("wi",)
        for stack, layers in (("encoder", model.num_layers), ("decoder", model.decoder_layers)):
            bias = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias"
            yield f"{stack}.position_bias", [bias]
            last = 2 if stack == "decoder" else 1
            modules = {
                "attention_norm": ["0.layer_norm"],
                "attention.qkv": [f"0.SelfAttention.{part}" for part in "qkv"],
                "attention.output": ["0.SelfAttention.o"],
                "cross_norm": ["1.layer_norm"],
                "cross_attention.query": ["1.EncDecAttention.q"],
                "cross_attention.key_value": ["1.EncDecAttention.k", "1.EncDecAttention.v"],
                "cross_attention.output": ["1.EncDecAttention.o"],
                "mlp_norm": [f"{last}.layer_norm"],
                "mlp.up": [f"{last}.DenseReluDense.{part}" for part in up],
                "mlp.down": [f"{last}.DenseReluDense.wo"],
            }
            for layer in range(layers):
                hf_prefix = f"{stack}.block.{layer}.layer"
                yield from rules.layer_names(f"{stack}.layers.{layer}", hf_prefix, modules)
            yield f"{stack}.final_norm", [f"{stack}.final_layer_norm"]
        yield "output", ["lm_head"]
