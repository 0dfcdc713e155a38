"""Llama 2 and 3, and similar models: Mistral, Qwen2 and Qwen3."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron.checkpoint.huggingface import rules
from megatron.checkpoint.huggingface.settings import MAX_HEADS, MAX_LAYERS, Settings
from megatron.config.attention import layer_windows
from megatron.config.model import ModelConfig
from megatron.config.patterns import layer_pattern
from megatron.models.plans import yarn

# The values that --use-rope-scaling uses. No others are supported.
_LLAMA3 = {
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
}
_SCORE = "score"  # a reward model's head
FULL, SLIDING = "full_attention", "sliding_attention"  # values of layer_types
LLAMA_KEYS = (
    rules.Key("num_attention_heads", "num_attention_heads", max_value=MAX_HEADS),
    rules.Key("hidden_size", "hidden_size"),
    rules.Key("num_hidden_layers", "num_layers", max_value=MAX_LAYERS),
    rules.Key("intermediate_size", "ffn_hidden_size"),
    rules.Key("rms_norm_eps", "norm_epsilon", "number"),
    rules.Key("attention_dropout", "attention_dropout", "fraction", 0.0),
)
_FIXED = {
    "hidden_act": "silu",
    **dict.fromkeys(("mlp_bias", "rope_interleaved", "use_mrope"), False),
}
LAYER = {
    "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.query_norm": ("self_attn.q_norm",),
    "attention.key_norm": ("self_attn.k_norm",),
    "attention.output": ("self_attn.o_proj",),
    "mlp.up": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.down": ("mlp.down_proj",),
    "attention_norm": ("input_layernorm",),
    "mlp_norm": ("post_attention_layernorm",),
}


@dataclass(frozen=True)
class LlamaLike(rules.Family):
    """A family with RMSNorm, rotary embeddings, grouped-query attention, SwiGLU and no biases.

    Attributes:
        qkv_bias: Whether queries, keys and values have biases.
        qk_norm: Which channels of queries and keys are normalized together: those of a "head" or of
            the whole "projection". None means that queries and keys are not normalized.
        window: Where config.json may limit attention to a window: in the whole "model" or in some
            "layers". None means nowhere.
        optional_kv_heads: Whether config.json may lack num_key_value_heads, which then equals
            num_attention_heads, as in files of early versions.
        head_size: The head size if config.json does not give one. None means hidden size / heads.
        rotary_base: The base of the rotary frequencies if config.json does not give one.
        classifies: Whether `transformers` has a class for the family's reward models.
    """

    pieces: Mapping[str, str] = field(default_factory=lambda: {_SCORE: _SCORE})
    keys: tuple[rules.Key, ...] = LLAMA_KEYS
    fixed: Mapping[str, Any] = field(default_factory=lambda: _FIXED)
    derived: str = r".*rotary_emb\.inv_freq"  # in Llama 2's first files
    qkv_bias: bool = False
    qk_norm: str | None = None
    window: str | None = None
    optional_kv_heads: bool = False
    head_size: int | None = None
    rotary_base: float = 10000.0
    tied: bool | None = False
    classifies: bool = True

    @property
    def reward_model(self) -> str:
        """The class of a reward model in `transformers`."""
        return self.language_model.replace("ForCausalLM", "ForSequenceClassification")

    def architecture(self, pieces: frozenset[str]) -> str:
        """Return the name of a model's class in `transformers`."""
        return self.reward_model if _SCORE in pieces else super().architecture(pieces)

    def network(self, settings: Settings, flags: dict[str, Any]) -> ModelConfig:
        """Return the network that a config.json describes."""
        heads, hidden = flags["num_attention_heads"], flags["hidden_size"]
        kv_heads = settings.size("num_key_value_heads", heads if self.optional_kv_heads else None)
        if heads % kv_heads:
            raise settings.error("num_key_value_heads", f"does not divide {heads} heads")
        if not self.qkv_bias:
            settings.must_be("attention_bias", False)
        return ModelConfig(
            **flags,
            reward_head=self._is_reward_model(settings),
            **self._read_windows(settings, flags["num_layers"]),
            **self._read_rotation(settings),
            kv_channels=settings.size("head_dim", self.head_size or hidden // heads, MAX_HEADS),
            group_query_attention=kv_heads != heads,
            num_query_groups=kv_heads if kv_heads != heads else 1,
            max_position_embeddings=settings.size("max_position_embeddings"),
            position_embedding_type="rope",
            normalization="RMSNorm",
            swiglu=True,
            add_bias_linear=False,
            add_qkv_bias=self.qkv_bias,
            qk_layernorm=self.qk_norm is not None,
            qk_layernorm_scope=self.qk_norm or "head",
            hidden_dropout=0.0,
        )

    def _is_reward_model(self, settings: Settings) -> bool:
        """Return whether config.json describes a reward model.

        Raises:
            CheckpointError: config.json describes a classifier with several labels.
        """
        if not self.classifies or settings.values.get("architectures") != [self.reward_model]:
            return False
        labels, names = settings.values.get("num_labels"), settings.values.get("id2label")
        if labels is None:  # `transformers` counts the names, or assumes two labels
            labels = len(names) if isinstance(names, dict) else 2
        if labels != 1:
            raise settings.error(
                "num_labels",
                f"the class is {self.reward_model}, which is supported only for reward models with "
                "a single label",
            )
        return True

    def _read_windows(self, settings: Settings, layers: int) -> dict[str, Any]:
        """Return the flags for attention windows."""
        if self.window is None:
            return {}
        positions = settings.size("max_position_embeddings")
        limited = limited_layers(settings, layers)
        all_layers = self.window == "model"
        full_layers = 0
        if settings.values.get("max_window_layers") == 0:
            settings.must_be("max_window_layers", 0)
        else:
            known = settings.size("max_window_layers", layers)
            full_layers = 0 if all_layers else known
        used = settings.boolean("use_sliding_window", all_layers) or any(limited or ())
        if not used and settings.values.get("sliding_window") == 0:
            settings.must_be("sliding_window", 0)  # transformers 5 writes it if there is no window
            return {}
        window = settings.size("sliding_window", positions)
        if limited is None:
            limited = [layer >= full_layers for layer in range(layers)]
        return window_flags(window, limited) if used and window < positions else {}

    def _read_rotation(self, settings: Settings) -> dict[str, Any]:
        """Return the flags for rotary embeddings, from the keys of transformers 4 or 5."""
        return read_rotation(settings, settings.number("rope_theta", self.rotary_base))

    def _write_windows(self, model: ModelConfig) -> dict[str, Any]:
        """Return the keys for attention windows."""
        if self.window is None:
            return {}
        limited = [window is not None for window in layer_windows(model, model.num_layers)]
        size = None if model.window is None else model.window + 1
        keys: dict[str, Any] = {"sliding_window": size, "use_sliding_window": size is not None}
        if self.window == "layers" and size is not None:
            # Versions of `transformers` without layer_types need the number of layers with full
            # attention before the first window.
            full_layers = limited.index(True) if any(limited) else len(limited)
            kinds = [SLIDING if is_limited else FULL for is_limited in limited]
            keys |= {"max_window_layers": full_layers, "layer_types": kinds}
        return keys

    def write(self, model: ModelConfig, vocab: int) -> dict[str, Any]:
        """Return the content of config.json, with keys that all versions of `transformers` read."""
        score: dict[str, Any] = {}
        if model.reward_head:  # a model with a single label
            score = {"architectures": [self.reward_model], "num_labels": 1}
            score |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
        return {
            **super().write(model, vocab),
            "num_key_value_heads": model.kv_heads,
            "head_dim": model.kv_channels,
            "hidden_act": "silu",
            "max_position_embeddings": model.max_position_embeddings,
            "rope_theta": model.rotary_base,
            "rope_scaling": write_rope(model),
            **({} if self.qkv_bias else {"attention_bias": False}),
            **score,
            **self._write_windows(model),
        }

    def modules(self, model: ModelConfig) -> Mapping[str, Sequence[str]]:
        """Return the Hugging Face modules in a layer, by native module name."""
        return LAYER

    def layer_modules(self, model: ModelConfig) -> Sequence[Mapping[str, Sequence[str]]]:
        """Return the Hugging Face modules in each layer, by native module name."""
        return [self.modules(model)] * model.num_layers

    def names(self, model: ModelConfig) -> rules.Names:
        """Yield each of our modules with the corresponding Hugging Face modules, in file order."""
        yield "embedding.word", ["model.embed_tokens"]
        for layer, modules in enumerate(self.layer_modules(model)):
            yield from rules.layer_names(f"layers.{layer}", f"model.layers.{layer}", modules)
        yield "final_norm", ["model.norm"]
        yield "output", ["lm_head"]
        yield _SCORE, ["score"]


def write_rope(model: ModelConfig) -> dict[str, Any] | None:
    """Return the value of rope_scaling, or `None` if rotary frequencies are not scaled.

    The result is also `None` for LongRoPE, which only Phi's files express.
    """
    factor = model.rotary_seq_len_interpolation_factor or 1
    if model.use_rope_scaling:
        return {
            "rope_type": "llama3",
            "factor": model.rope_scaling_factor,
            "high_freq_factor": model.rope_high_freq_factor,
            **_LLAMA3,
        }
    if factor > 1:
        return {"rope_type": "linear", "factor": float(factor)}
    if model.rope_type == "yarn":
        return _write_yarn(model)
    if model.rope_type == "dynamic":
        return {"rope_type": "dynamic", "factor": model.rotary_scaling_factor}
    return None


def _write_yarn(model: ModelConfig) -> dict[str, Any]:
    """Return the value of rope_scaling for YaRN."""
    keys: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": model.rotary_scaling_factor,
        "original_max_position_embeddings": model.yarn_original_max_position_embeddings,
        "beta_fast": model.yarn_beta_fast,
        "beta_slow": model.yarn_beta_slow,
        "truncate": model.yarn_correction_range_round_to_int,
    }
    if model.mscale_all_dim:
        return {**keys, "mscale": model.mscale, "mscale_all_dim": model.mscale_all_dim}
    if model.mscale != 1:
        keys["attention_factor"] = yarn(model).concentration
    return keys


def _read_yarn(rope: Settings, settings: Settings) -> dict[str, Any]:
    """Return the flags for YaRN. The defaults are those of `transformers`, from the paper.

    Args:
        rope: The keys of rope_scaling or rope_parameters.
        settings: All keys of config.json.
    """
    positions = settings.size("max_position_embeddings")
    original = rope.size("original_max_position_embeddings", positions)
    flags: dict[str, Any] = {
        "rope_type": "yarn",
        "rotary_scaling_factor": rope.number("factor", positions / original),
        "yarn_original_max_position_embeddings": original,
        "yarn_beta_fast": rope.number("beta_fast", 32.0),
        "yarn_beta_slow": rope.number("beta_slow", 1.0),
        "yarn_correction_range_round_to_int": rope.boolean("truncate", True),
    }
    scales = ("mscale", "mscale_all_dim")
    have_both = all(rope.values.get(name) for name in scales)
    both = {name: rope.number(name) for name in scales if rope.values.get(name)}
    for name in (*scales, "attention_factor"):
        if not rope.values.get(name):
            rope.ignore(name)  # null or 0
    if rope.values.get("attention_factor"):
        strength = 0.1 * math.log(flags["rotary_scaling_factor"])
        factor = rope.number("attention_factor")
        if strength == 0 and factor != 1:
            raise rope.error("attention_factor", "must be 1 if factor is")
        flags["mscale"] = round((factor - 1) / strength, 12) if strength else 1.0
    elif have_both:
        flags |= both
    return flags


def read_rotation(settings: Settings, base: float, share: float = 1.0) -> dict[str, Any]:
    """Return the flags for rotary embeddings, from the keys of transformers 4 or 5.

    Args:
        settings: All keys of config.json.
        base: The base if rope_parameters does not contain it.
        share: The fraction of a head's channels that rotates.
    """
    new = settings.section("rope_parameters")
    flags: dict[str, Any] = {"rotary_base": new.number("rope_theta", base)}
    for rope in (new, settings.section("rope_scaling")):
        flags |= read_rope(rope, settings, share)
    return flags


def read_partial_rotation(settings: Settings, base: float, share: float) -> dict[str, Any]:
    """Return the flags for rotary embeddings that rotate only some channels of each head.

    Args:
        settings: All keys of config.json.
        base: The base if rope_parameters does not contain it.
        share: The fraction of channels that rotate if rope_parameters does not say.
    """
    share = settings.section("rope_parameters").number("partial_rotary_factor", share)
    return {**read_rotation(settings, base, share), "rotary_percent": share}


def read_rope(rope: Settings, settings: Settings, share: float = 1.0) -> dict[str, Any]:
    """Return the flags that scale rotary frequencies.

    Args:
        rope: The keys of rope_scaling or rope_parameters.
        settings: All keys of config.json.
        share: The fraction of a head's channels that rotates.
    """
    flags: dict[str, Any] = {}
    kind_key = "rope_type" if "rope_type" in rope.values else "type"
    rope.must_be("type", rope.values.get(kind_key))  # if a file has both keys, they must agree
    rope.must_be("partial_rotary_factor", share)
    kinds = {"default": "", "linear": "l", "llama3": "3", "yarn": "y", "dynamic": "d"}
    match rope.choice(kind_key, kinds, "default"):
        case "l":
            flags["rotary_seq_len_interpolation_factor"] = _read_factor(rope)
        case "3":
            for key, value in _LLAMA3.items():
                rope.must_be(key, value)
            flags |= {
                "use_rope_scaling": True,
                "rope_scaling_factor": rope.number("factor"),
                "rope_high_freq_factor": rope.number("high_freq_factor", 4.0),
            }
            if flags["rope_high_freq_factor"] < 1:
                raise rope.error("high_freq_factor", "must be at least low_freq_factor, 1")
        case "y":
            flags |= _read_yarn(rope, settings)
        case "d":
            flags |= {"rope_type": "dynamic", "rotary_scaling_factor": _read_factor(rope)}
    rope.refuse_unread_keys()
    return flags


def _read_factor(rope: Settings) -> float:
    """Read `factor`, by which the context is extended. It must be at least 1."""
    factor = rope.number("factor")
    if factor < 1:
        raise rope.error("factor", "must be at least 1")
    return factor


def limited_layers(settings: Settings, layers: int) -> list[bool] | None:
    """Return, for each layer, whether layer_types limits it to a window.

    Return `None` if the key is absent or empty.

    Raises:
        CheckpointError: layer_types names an unknown kind of layer, or has the wrong length.
    """
    kinds = settings.strings("layer_types")
    other = set(kinds) - {FULL, SLIDING}
    if other:
        raise settings.error("layer_types", f"{', '.join(sorted(other))} is not supported")
    if kinds and len(kinds) != layers:
        raise settings.error("layer_types", f"has {len(kinds)} entries for {layers} layers")
    return [kind == SLIDING for kind in kinds] if kinds else None


def window_flags(window: int, limited: Sequence[bool]) -> dict[str, Any]:
    """Return the flags for attention windows in some layers.

    Args:
        window: The number of tokens that a token attends to, including itself.
        limited: Whether each layer has the window.
    """
    if not any(limited):
        return {}
    flags = {"window_size": f"{window - 1},0"}
    if not all(limited):
        flags["window_attn_skip_freq"] = layer_pattern(limited)
    return flags


def read_alternating_windows(
    settings: Settings, layers: int, *, every: int, window: int
) -> dict[str, Any]:
    """Return the flags for attention windows in the layers that layer_types chooses.

    Args:
        settings: The keys of config.json.
        layers: The number of layers.
        every: If layer_types is absent, each layer whose number (from 1) is divisible by `every`
            has full attention, and the others have a window.
        window: The number of tokens that a token attends to, including itself, if sliding_window is
            absent.
    """
    limited = limited_layers(settings, layers)
    if limited is None:
        limited = [(layer + 1) % every > 0 for layer in range(layers)]
    return window_flags(settings.size("sliding_window", window), limited)


def write_alternating_windows(model: ModelConfig, window: int) -> dict[str, Any]:
    """Return the config.json keys that state which layers have an attention window, and its size.

    Args:
        model: The network.
        window: The value of sliding_window, in tokens, if no layer has a window.
    """
    windows = layer_windows(model, model.num_layers)
    return {
        "sliding_window": window if model.window is None else model.window + 1,
        "layer_types": [FULL if layer_window is None else SLIDING for layer_window in windows],
    }


def read_rope_by_kind(settings: Settings, base: float, local_base: float) -> dict[str, Any]:
    """Return the flags for rotary embeddings that differ between full attention and windows.

    Args:
        settings: The keys of config.json.
        base: The base for full attention if rope_parameters does not contain it.
        local_base: The base for windows if rope_parameters does not contain it. The frequencies of
            layers with windows must not be scaled.
    """
    new = settings.section("rope_parameters")
    full, local = new.section(FULL), new.section(SLIDING)
    new.refuse_unread_keys()
    flags = {
        "rotary_base": full.number("rope_theta", base),
        "window_rotary_base": local.number("rope_theta", local_base),
    }
    local.must_be("rope_type", "default")
    local.refuse_unread_keys()
    for rope in (full, settings.section("rope_scaling")):
        flags |= read_rope(rope, settings)
    return flags
