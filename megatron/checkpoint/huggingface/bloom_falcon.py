"""BLOOM and Falcon: LayerNorm, an MLP without gates, and ALiBi or rotary embeddings.

Their files order queries, keys and values by group, as our tensors do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron.checkpoint.huggingface import rules
from megatron.checkpoint.huggingface.gpt2 import EXACT_GELU, gelu_name
from megatron.checkpoint.huggingface.llama import read_rotation, write_rope
from megatron.checkpoint.huggingface.settings import MAX_HEADS, MAX_LAYERS, Settings
from megatron.config.model import ModelConfig

_BLOOM_POSITIONS = 2048  # the context length of the published models
_BLOOM_KEYS = (
    rules.Key("hidden_size", "hidden_size"),
    rules.Key("n_head", "num_attention_heads", max_value=MAX_HEADS),
    rules.Key("n_layer", "num_layers", max_value=MAX_LAYERS),
    rules.Key("seq_length", "max_position_embeddings", default=_BLOOM_POSITIONS),
    rules.Key("layer_norm_epsilon", "norm_epsilon", "number", 1e-5),
    rules.Key("attention_dropout", "attention_dropout", "fraction", 0.0),
    rules.Key("hidden_dropout", "hidden_dropout", "fraction", 0.0),
    rules.Key(
        "apply_residual_connection_post_layernorm",
        "apply_residual_connection_post_layernorm",
        "boolean",
        False,
    ),
)
_FALCON_KEYS = (
    rules.Key("hidden_size", "hidden_size"),
    rules.Key("num_attention_heads", "num_attention_heads", max_value=MAX_HEADS),
    rules.Key("num_hidden_layers", "num_layers", max_value=MAX_LAYERS),
    rules.Key("max_position_embeddings", "max_position_embeddings", default=2048),
    rules.Key("layer_norm_epsilon", "norm_epsilon", "number", 1e-5),
    rules.Key("attention_dropout", "attention_dropout", "fraction", 0.0),
    rules.Key("hidden_dropout", "hidden_dropout", "fraction", 0.0),
    rules.Key("bias", "add_bias_linear", "boolean", False),
)
# Keys in published files that only BLOOM's training code reads, and `transformers` ignores.
_TRAINING_KEYS = (
    "attention_softmax_in_fp32",
    "bias_dropout_fusion",
    "masked_softmax_fusion",
    "offset_alibi",
    "skip_bias_add",
    "skip_bias_add_qkv",
    "slow_but_exact",
    "unk_token_id",
)
_LAYER = {
    "attention_norm": ("input_layernorm",),
    "attention.qkv": ("self_attention.query_key_value",),
    "attention.output": ("self_attention.dense",),
    "mlp_norm": ("post_attention_layernorm",),
    "mlp.up": ("mlp.dense_h_to_4h",),
    "mlp.down": ("mlp.dense_4h_to_h",),
}


@dataclass(frozen=True)
class _Shared(rules.Family):
    """The common base of the BLOOM and Falcon families.

    Attributes:
        older: The current names of keys, by their names in older files.
    """

    prefix: str = "transformer."
    tied: bool | None = True
    older: dict[str, str] = field(default_factory=dict)

    def read(self, settings: Settings) -> rules.ModelDescription:
        """Return the network that a config.json describes. Its keys may have older names."""
        values = dict(settings.values)
        for old, new in self.older.items():
            if old in values:
                value = values.pop(old)
                if values.setdefault(new, value) != value:
                    raise settings.error(old, f"differs from {new} {values[new]}")
        return super().read(Settings(values, settings.path))

    def modules(self, model: ModelConfig) -> Mapping[str, Sequence[str]]:
        """Return the Hugging Face modules in a layer, by native module name."""
        return _LAYER

    def names(self, model: ModelConfig) -> rules.Names:
        """Yield each of our modules with the corresponding Hugging Face modules, in file order."""
        yield "embedding.word", ["transformer.word_embeddings"]
        yield "embedding.norm", ["transformer.word_embeddings_layernorm"]
        modules = self.modules(model)
        for layer in range(model.num_layers):
            yield from rules.layer_names(f"layers.{layer}", f"transformer.h.{layer}", modules)
        yield "final_norm", ["transformer.ln_f"]
        yield "output", ["lm_head"]

    def conversion(self, layer: Any, module: str, tensors: int) -> rules.TensorConversion:
        """Return the conversion for a module, which leaves every tensor unchanged."""
        return rules.SAME


def _head_size(settings: Settings, flags: dict[str, Any]) -> int:
    """Return the head size, hidden size / heads.

    Raises:
        CheckpointError: The number of heads does not divide the hidden size.
    """
    hidden, heads = flags["hidden_size"], flags["num_attention_heads"]
    if hidden % heads:
        raise settings.error("hidden_size", f"is not divisible by {heads} heads")
    return int(hidden // heads)


@dataclass(frozen=True)
class Bloom(_Shared):
    """The BLOOM family, whose word embeddings are normalized."""

    keys: tuple[rules.Key, ...] = _BLOOM_KEYS
    older: dict[str, str] = field(
        default_factory=lambda: {
            "n_embed": "hidden_size",
            "num_attention_heads": "n_head",
            "num_hidden_layers": "n_layer",
        }
    )

    def network(self, settings: Settings, flags: dict[str, Any]) -> ModelConfig:
        """Return the network that a config.json describes."""
        settings.ignore(*_TRAINING_KEYS)
        return ModelConfig(
            **flags,
            ffn_hidden_size=settings.size("n_inner", 4 * flags["hidden_size"]),
            kv_channels=_head_size(settings, flags),
            position_embedding_type="alibi",
            embed_layernorm=True,
        )


@dataclass(frozen=True)
class Falcon(_Shared):
    """The Falcon family: 7B, 40B (`new_decoder_architecture`), and the RW models with ALiBi."""

    keys: tuple[rules.Key, ...] = _FALCON_KEYS
    older: dict[str, str] = field(
        default_factory=lambda: {
            "n_embed": "hidden_size",
            "n_head": "num_attention_heads",
            "n_head_kv": "num_kv_heads",
            "n_layer": "num_hidden_layers",
        }
    )

    def network(self, settings: Settings, flags: dict[str, Any]) -> ModelConfig:
        """Return the network that a config.json describes."""
        settings.ignore("auto_map")  # no code is run
        settings.must_be("apply_residual_connection_post_layernorm", False)
        heads, is_new = (
            flags["num_attention_heads"],
            settings.boolean("new_decoder_architecture", False),
        )
        kv_heads = settings.size("num_kv_heads", heads, MAX_HEADS)
        multi_query = settings.boolean("multi_query", True)
        if not is_new:
            kv_heads = 1 if multi_query else heads
        elif heads % kv_heads:
            raise settings.error("num_kv_heads", f"does not divide {heads} heads")
        parallel = settings.boolean("parallel_attn", True)
        if is_new and not parallel:
            raise settings.error("parallel_attn", "must be true if new_decoder_architecture is")
        norms = settings.size("num_ln_in_parallel_attn", 2 if is_new else 1, 2)
        if norms == 2 and parallel and not is_new:
            raise settings.error("num_ln_in_parallel_attn", "2 requires new_decoder_architecture")
        is_exact = settings.choice("activation", EXACT_GELU, "gelu")
        return ModelConfig(
            **flags,
            **self._positions(settings),
            ffn_hidden_size=settings.size("ffn_hidden_size", 4 * flags["hidden_size"]),
            kv_channels=_head_size(settings, flags),
            group_query_attention=kv_heads != heads,
            num_query_groups=kv_heads if kv_heads != heads else 1,
            parallel_residual=parallel,
            shared_parallel_norm=parallel and norms == 1,
            onnx_safe=is_exact or None,
            openai_gelu=not is_exact,
        )

    def _positions(self, settings: Settings) -> dict[str, Any]:
        """Return the flags for position embeddings. With ALiBi, rotary keys have no effect."""
        flags = read_rotation(settings, settings.number("rope_theta", 10000.0))
        if settings.boolean("alibi", False):
            return {"position_embedding_type": "alibi", "scale_alibi": True}
        return {**flags, "position_embedding_type": "rope"}

    def write(self, model: ModelConfig, vocab: int) -> dict[str, Any]:
        """Return the content of config.json for a network."""
        parallel, heads = model.parallel_residual, model.num_attention_heads
        shares = parallel and model.shared_parallel_norm
        is_new = parallel and not (shares and model.kv_heads in (1, heads))
        keys: dict[str, Any] = {"num_ln_in_parallel_attn": 1 if shares else 2} if is_new else {}
        return {
            **super().write(model, vocab),
            **keys,
            "activation": gelu_name(model),
            "alibi": model.position_embedding_type == "alibi",
            "ffn_hidden_size": model.ffn_hidden_size,
            "multi_query": model.kv_heads == 1,
            "new_decoder_architecture": is_new,
            "num_kv_heads": model.kv_heads,
            "parallel_attn": parallel,
            "rope_scaling": write_rope(model),
            "rope_theta": model.rotary_base,
        }

    def modules(self, model: ModelConfig) -> Mapping[str, Sequence[str]]:
        """Return the Hugging Face modules in a layer, by native module name."""
        if model.parallel_residual and not model.shared_parallel_norm:
            return {**_LAYER, "attention_norm": ("ln_attn",), "mlp_norm": ("ln_mlp",)}
        return _LAYER
