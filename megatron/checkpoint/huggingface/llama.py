"""Llama 2 and 3, and the models that are Llama but for a detail: Mistral, Qwen2, Qwen3."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megatron.checkpoint.huggingface.rules import (
    ByGroup,
    Described,
    GateUp,
    ParameterRule,
    Same,
    TensorForm,
)
from megatron.checkpoint.huggingface.settings import MOST_HEADS, MOST_LAYERS, Settings
from megatron.config.model import ModelConfig

# What --use-rope-scaling computes with; other values cannot be expressed.
_LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@dataclass(frozen=True)
class LlamaLike:
    """RMSNorm, rotary positions, grouped queries, SwiGLU, no biases; and what differs.

    Attributes:
        name: `model_type`.
        language_model: class of `transformers`.
        qkv_bias: queries, keys and values have biases.
        head_norm: queries and keys are normalized, head by head.
        window: config.json may limit attention to a window.
        old_files: config.json may leave out what its first version did not have.
        head_size: where config.json does not say it; None: hidden size / heads.
    """

    name: str
    language_model: str
    qkv_bias: bool = False
    head_norm: bool = False
    window: bool = False
    old_files: bool = False
    head_size: int | None = None
    prefix: str = ""
    tied_head: str = "lm_head.weight"
    head_follows_files: bool = False
    word_copies: tuple[str, ...] = ()

    def architecture(self, pieces: frozenset[str]) -> str:
        """See `Family`."""
        return self.language_model

    def read(self, settings: Settings) -> Described:
        """See `Family`."""
        heads, hidden = (
            settings.size("num_attention_heads", most=MOST_HEADS),
            settings.size("hidden_size"),
        )
        kv_heads = settings.size("num_key_value_heads", heads if self.old_files else None)
        positions = settings.size("max_position_embeddings")
        window = self._window(settings, positions)
        settings.must_be("model_type", self.name)
        settings.must_be("hidden_act", "silu")
        if not self.qkv_bias:
            settings.must_be("attention_bias", False)
        settings.must_be("mlp_bias", False)
        settings.must_be("rope_interleaved", False)
        settings.must_be("use_mrope", False)
        model = ModelConfig(
            num_layers=settings.size("num_hidden_layers", most=MOST_LAYERS),
            hidden_size=hidden,
            ffn_hidden_size=settings.size("intermediate_size"),
            num_attention_heads=heads,
            kv_channels=settings.size("head_dim", self.head_size or hidden // heads, MOST_HEADS),
            group_query_attention=kv_heads != heads,
            num_query_groups=kv_heads if kv_heads != heads else 1,
            max_position_embeddings=window or positions,
            position_embedding_type="rope",
            **_read_rotation(settings),
            normalization="RMSNorm",
            norm_epsilon=settings.number("rms_norm_eps"),
            swiglu=True,
            untie_embeddings_and_output_weights=not settings.switch("tie_word_embeddings", False),
            add_bias_linear=False,
            add_qkv_bias=self.qkv_bias,
            qk_layernorm=self.head_norm,
            attention_dropout=settings.share("attention_dropout", 0.0),
            hidden_dropout=0.0,
        )
        if heads % kv_heads:
            raise settings.error("num_key_value_heads", f"does not divide {heads} heads")
        vocab = settings.size("vocab_size")
        settings.refuse_the_rest()
        notice = (
            f"sliding_window {window}: sequences up to {window} tokens only (of {positions}), "
            f"where full attention is the same: --max-position-embeddings {window}"
        )
        return Described(model, vocab, (notice,) if window else (), window)

    def _window(self, settings: Settings, positions: int) -> int | None:
        """To how many tokens attention is limited; None where that is no limit."""
        if not self.window:
            return None
        layers = settings.words("layer_types")
        used = settings.switch("use_sliding_window", True) or "sliding_attention" in layers
        window = settings.size("sliding_window", positions)
        settings.size("max_window_layers", 1)
        other = set(layers) - {"full_attention", "sliding_attention"}
        if other:
            raise settings.error("layer_types", f"{', '.join(sorted(other))} is not known here")
        return window if used and window < positions else None

    def write(self, model: ModelConfig, vocab: int) -> dict[str, Any]:
        """See `Family`. The older spelling of keys, which all versions of `transformers` read."""
        config = {
            "model_type": self.name,
            "vocab_size": vocab,
            "hidden_size": model.hidden_size,
            "intermediate_size": model.ffn_hidden_size,
            "num_hidden_layers": model.num_layers,
            "num_attention_heads": model.num_attention_heads,
            "num_key_value_heads": model.kv_heads,
            "head_dim": model.kv_channels,
            "hidden_act": "silu",
            "max_position_embeddings": model.max_position_embeddings,
            "rms_norm_eps": model.norm_epsilon,
            "rope_theta": model.rotary_base,
            "rope_scaling": _write_scaling(model),
            "tie_word_embeddings": not model.untie_embeddings_and_output_weights,
            "attention_dropout": model.attention_dropout,
        }
        if not self.qkv_bias:
            config["attention_bias"] = False
        if self.window:
            config["sliding_window"] = None
            config["use_sliding_window"] = False
        return config

    def rules(self, model: ModelConfig, vocab: int) -> list[ParameterRule]:
        """See `Family`."""
        hidden = model.hidden_size
        rules = [_same("embedding.word.weight", (vocab, hidden), "model.embed_tokens.weight")]
        for layer in range(model.num_layers):
            rules += self._layer(model, f"layers.{layer}", f"model.layers.{layer}")
        rules.append(_same("final_norm.weight", (hidden,), "model.norm.weight"))
        if model.untie_embeddings_and_output_weights:
            rules.append(_same("output.weight", (vocab, hidden), "lm_head.weight"))
        return rules

    def _layer(self, model: ModelConfig, ours: str, theirs: str) -> Iterator[ParameterRule]:
        hidden, ffn = model.hidden_size, model.ffn_hidden_size
        heads, size = model.num_attention_heads, model.kv_channels
        groups, attention = model.kv_heads, f"{theirs}.self_attn"
        by_group, rows = ByGroup(heads, groups), (heads + 2 * groups) * size
        kinds = [("weight", (rows, hidden))] + [("bias", (rows,))] * self.qkv_bias
        for kind, shape in kinds:
            names = tuple(f"{attention}.{part}_proj.{kind}" for part in "qkv")
            yield _rule(f"{ours}.attention.qkv.{kind}", shape, names, by_group)
        for our_norm, norm in (("query", "q"), ("key", "k")) if self.head_norm else ():
            yield _same(
                f"{ours}.attention.{our_norm}_norm.weight",
                (size,),
                f"{attention}.{norm}_norm.weight",
            )
        yield _same(
            f"{ours}.attention.output.weight", (hidden, heads * size), f"{attention}.o_proj.weight"
        )
        names = tuple(f"{theirs}.mlp.{part}_proj.weight" for part in ("gate", "up"))
        yield _rule(f"{ours}.mlp.up.weight", (2, ffn, hidden), names, GateUp())
        yield _same(f"{ours}.mlp.down.weight", (hidden, ffn), f"{theirs}.mlp.down_proj.weight")
        for our_norm, norm in (("attention", "input"), ("mlp", "post_attention")):
            yield _same(
                f"{ours}.{our_norm}_norm.weight", (hidden,), f"{theirs}.{norm}_layernorm.weight"
            )

    def is_derived(self, name: str) -> bool:
        """Llama 2's first files hold the rotary frequencies."""
        return name.endswith("rotary_emb.inv_freq")


def _rule(
    name: str, shape: tuple[int, ...], theirs: tuple[str, ...], form: TensorForm
) -> ParameterRule:
    return ParameterRule(f"model.{name}", shape, theirs, form)


def _same(name: str, shape: tuple[int, ...], theirs: str) -> ParameterRule:
    return _rule(name, shape, (theirs,), Same())


def _read_rotation(settings: Settings) -> dict[str, Any]:
    """Flags of the rotary embedding, from the keys of transformers 4 or of 5."""
    new, old = settings.part("rope_parameters"), settings.part("rope_scaling")
    base = settings.number("rope_theta", 10000.0)
    flags: dict[str, Any] = {"rotary_base": new.number("rope_theta", base)}
    for rope in (new, old):
        kind_key = "rope_type" if "rope_type" in rope.values else "type"
        rope.must_be("type", rope.values.get(kind_key))  # where a file has both, they agree
        rope.must_be("partial_rotary_factor", 1.0)
        match rope.word(kind_key, {"default": "", "linear": "l", "llama3": "3"}, "default"):
            case "l":
                factor = rope.number("factor")
                if factor != int(factor):
                    raise rope.error("factor", "--rotary-seq-len-interpolation-factor is whole")
                flags["rotary_seq_len_interpolation_factor"] = int(factor)
            case "3":
                for key, value in _LLAMA3.items():
                    rope.must_be(key, value)
                flags |= {"use_rope_scaling": True, "rope_scaling_factor": rope.number("factor")}
        rope.refuse_the_rest()
    return flags


def _write_scaling(model: ModelConfig) -> dict[str, Any] | None:
    if model.use_rope_scaling:
        return {"rope_type": "llama3", "factor": model.rope_scaling_factor, **_LLAMA3}
    factor = model.rotary_seq_len_interpolation_factor or 1
    return {"rope_type": "linear", "factor": float(factor)} if factor > 1 else None
