"""Options for attention and rotary embeddings, named as in Megatron Core."""

from __future__ import annotations

import re
from dataclasses import dataclass

from megatron.config.fields import MAX_IDS, MAX_WIDTH, ROTARY, Requirement, flag
from megatron.config.patterns import read_pattern

_WINDOW = Requirement(lambda run: run.model.window_size, "--window-size")
_LATENT = Requirement(lambda run: run.model.multi_latent_attention, "--multi-latent-attention")
_WITHOUT_BIASES = Requirement(
    lambda run: run.model.position_embedding_type in ("rope", "learned_absolute", "none"),
    "--position-embedding-type rope, learned_absolute or none",
)
_YARN = Requirement(lambda run: run.model.rope_type == "yarn", "--rope-type yarn")
_DELTA = Requirement(
    lambda run: run.model.experimental_attention_variant == "gated_delta_net",
    "--experimental-attention-variant gated_delta_net",
)
_SCALED = Requirement(
    lambda run: run.model.rope_type in ("yarn", "dynamic"), "--rope-type yarn or dynamic"
)
_WITHOUT_ROTATION = Requirement(lambda run: run.model.no_rope_freq, "--no-rope-freq")
_TEMPERED = Requirement(
    lambda run: run.model.attention_temperature_scale, "--attention-temperature-scale"
)
_LONG_ROPE = Requirement(lambda run: run.model.rope_type == "longrope", "--rope-type longrope")
# Sizes of latent attention.
LATENT_FIELDS = (
    "q_lora_rank",
    "kv_lora_rank",
    "qk_head_dim",
    "qk_pos_emb_head_dim",
    "v_head_dim",
)
# Sizes of gated delta nets, and the layers that have one.
DELTA_FIELDS = (
    "linear_attention_freq",
    "linear_conv_kernel_dim",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
)
# Fields that set the frequencies of YaRN.
YARN_FIELDS = (
    "rope_type",
    "rotary_scaling_factor",
    "yarn_original_max_position_embeddings",
    "yarn_beta_fast",
    "yarn_beta_slow",
    "yarn_correction_range_round_to_int",
    "mscale",
    "mscale_all_dim",
)
# Fields that set the frequencies of LongRoPE.
LONGROPE_FIELDS = (
    "longrope_original_max_position_embeddings",
    "longrope_short_factor",
    "longrope_long_factor",
    "longrope_attention_factor",
)
_NUMBER = re.compile(r"[1-9][0-9]{0,4}")
_SIZES = re.compile(r"\(?([0-9]{1,9}),(-1|0)\)?")


@dataclass(frozen=True, kw_only=True)
class SelfAttentionOptions:
    """Attention.

    Attributes:
        multi_latent_attention: Multi-head latent attention (DeepSeek-V2): keys and values are
            computed from a short vector for each token. --qk-layernorm normalizes these vectors.
        q_lora_rank: Size of the vector from which queries are computed. Default: queries are
            computed directly from the hidden states.
        kv_lora_rank: Size of the vector from which keys and values are computed.
        qk_head_dim: Channels of each head's queries and keys without rotary embeddings.
        qk_pos_emb_head_dim: Additional channels of queries and keys, which carry rotary embeddings.
            All heads share the additional channels of the keys.
        v_head_dim: Channels of each head's values.
        attention_output_gate: Multiply the output of each attention head by the sigmoid of a gate
            that is computed with its query (Qwen3-Next).
        experimental_attention_variant: Mixer that replaces attention in the layers that
            --linear-attention-freq selects. gated_delta_net: a recurrent state for each head, in
            which the delta rule overwrites the value of a key (Yang et al., 2024).
        linear_attention_freq: The layers with --experimental-attention-variant: a number N means
            all layers except every Nth, which keeps its attention; a pattern such as ([1]*3+[0])*4
            has a 1 for each layer with the variant.
        linear_conv_kernel_dim: Kernel size of the causal convolution of a gated delta net.
        linear_key_head_dim: Channels of a query and a key of a gated delta net.
        linear_value_head_dim: Channels of a value of a gated delta net.
        linear_num_key_heads: Number of query and key heads of a gated delta net.
        linear_num_value_heads: Number of value heads of a gated delta net. Consecutive value heads
            share a query and a key head, in groups of equal size.
        window_size: Limit self-attention to a sliding window: 511,0 lets a token attend to itself
            and the 511 tokens before it. The second number is for encoders and must be 0 or -1.
        window_attn_skip_freq: The layers with --window-size: a number N gives every Nth layer full
            attention and the others the window, and a pattern such as ([1]*5+[0])*4 has a 1 for
            each layer with the window. Default: all layers.
        softmax_type: Softmax of the attention scores. vanilla: a query's weights add up to 1.
            off-by-one: they add up to less than 1, as if there were an additional key with score 0
            and value 0. learnable: likewise, with a learned score for each head (attention sinks,
            as in GPT-OSS).
        attn_logit_softcapping: Bound c of the attention scores, which become c x tanh(score / c)
            (Gemma 2). Default: no bound.
        window_rotary_base: Base of the rotary frequencies in the layers with --window-size, which
            are then neither interpolated nor scaled (Gemma 3). Default: as in the other layers.
        no_rope_freq: The layers without rotary embeddings: a number N means every Nth layer, and a
            pattern such as ([0]*3+[1])*6 has a 1 for each such layer. Default: none.
        attention_chunk_size: Cut each document into chunks of this many tokens. In the layers with
            rotary embeddings, a token attends only within its chunk (Llama 4). Default: no chunks.
        attention_temperature_scale: Factor a of the temperature of attention in the layers without
            rotary embeddings (Llama 4): the query at position p, from 0, is multiplied by
            1 + a ln(1 + floor((p + 1) / --attention-temperature-floor)). Default: no such factor.
        attention_temperature_floor: Number of consecutive positions for which the factor of
            --attention-temperature-scale is the same.
        qk_l2_norm: Divide each head's queries and keys by their root mean square in the layers with
            rotary embeddings, without learned weights (Llama 4).
        rope_type: How rotary embeddings extend beyond the training context. yarn: low frequencies
            are divided by --rotary-scaling-factor (Peng et al., 2023). longrope: each frequency has
            its own divisor (Phi-3, Phi-4). dynamic: the base grows with sequences that are longer
            than --max-position-embeddings (dynamic NTK). proportional: the training context is not
            extended, but --rotary-percent of the frequencies are those of a head that rotates
            completely. Default: rope; yarn for latent attention with --rotary-scaling-factor,
            --mscale or --mscale-all-dim, as in Megatron Core.
        rotary_scaling_factor: Factor of YaRN and of dynamic NTK: the desired context length divided
            by the training context length.
        yarn_original_max_position_embeddings: The context that the model was trained with.
            Default for latent attention and --position-embedding-type yarn: 4096, as in Megatron
            Core.
        yarn_beta_fast: YaRN does not change frequencies that complete at least this many rotations
            within the training context.
        yarn_beta_slow: YaRN divides frequencies that complete at most this many rotations within
            the training context by the full factor.
        yarn_correction_range_round_to_int: Round the channels at which --yarn-beta-fast and
            --yarn-beta-slow are reached to whole numbers.
        mscale: YaRN multiplies queries and keys by m(--mscale) / m(--mscale-all-dim), where m(x) is
            0.1 x ln(--rotary-scaling-factor) + 1.
        mscale_all_dim: Second number in the factor of --mscale. Latent attention also multiplies
            its scores by the square of m(--mscale-all-dim).
        longrope_original_max_position_embeddings: The context that the model was trained with.
            Sequences of up to this many tokens use the short divisors, longer ones the long
            divisors.
        longrope_short_factor: LongRoPE's divisors of the frequencies in short sequences, one for
            each pair of rotated channels.
        longrope_long_factor: LongRoPE's divisors of the frequencies in long sequences, one for each
            pair of rotated channels.
        longrope_attention_factor: Factor by which LongRoPE multiplies queries and keys.
    """

    multi_latent_attention: bool = flag(False, only_for=("gpt",), requires=_WITHOUT_BIASES)
    q_lora_rank: int | None = flag(
        None, unit="channels", at_least=1, at_most=MAX_WIDTH, requires=_LATENT
    )
    kv_lora_rank: int = flag(32, unit="channels", at_least=1, at_most=MAX_WIDTH, requires=_LATENT)
    qk_head_dim: int = flag(128, unit="channels", at_least=1, at_most=MAX_WIDTH, requires=_LATENT)
    qk_pos_emb_head_dim: int = flag(
        64, unit="channels", at_least=2, at_most=MAX_WIDTH, requires=_LATENT
    )
    v_head_dim: int = flag(128, unit="channels", at_least=1, at_most=MAX_WIDTH, requires=_LATENT)
    attention_output_gate: bool = flag(False, only_for=("gpt",))
    experimental_attention_variant: str | None = flag(
        None, choices=("gated_delta_net",), only_for=("gpt",)
    )
    linear_attention_freq: str | None = flag(None, requires=_DELTA)
    linear_conv_kernel_dim: int = flag(
        4, unit="tokens", at_least=1, at_most=MAX_WIDTH, requires=_DELTA
    )
    linear_key_head_dim: int = flag(
        128, unit="channels", at_least=1, at_most=MAX_WIDTH, requires=_DELTA
    )
    linear_value_head_dim: int = flag(
        128, unit="channels", at_least=1, at_most=MAX_WIDTH, requires=_DELTA
    )
    linear_num_key_heads: int = flag(16, unit="heads", at_least=1, at_most=2**16, requires=_DELTA)
    linear_num_value_heads: int = flag(32, unit="heads", at_least=1, at_most=2**16, requires=_DELTA)
    window_size: str | None = flag(None, only_for=("gpt",))
    window_attn_skip_freq: str | None = flag(None, requires=_WINDOW)
    softmax_type: str = flag(
        "vanilla", choices=("vanilla", "off-by-one", "learnable"), only_for=("gpt",)
    )
    attn_logit_softcapping: float | None = flag(None, above=0, only_for=("gpt",))
    window_rotary_base: float | None = flag(None, above=0, requires=ROTARY, needs=_WINDOW)
    no_rope_freq: str | None = flag(None, requires=ROTARY)
    attention_chunk_size: int | None = flag(
        None, unit="tokens", at_least=1, at_most=MAX_IDS, requires=ROTARY, only_for=("gpt",)
    )
    attention_temperature_scale: float | None = flag(
        None, above=0, requires=_WITHOUT_ROTATION, only_for=("gpt",)
    )
    attention_temperature_floor: int = flag(
        8192, unit="tokens", at_least=1, at_most=MAX_IDS, requires=_TEMPERED
    )
    qk_l2_norm: bool = flag(False, requires=ROTARY, only_for=("gpt",))
    rope_type: str | None = flag(
        None, choices=("rope", "yarn", "longrope", "dynamic", "proportional")
    )
    rotary_scaling_factor: float = flag(1.0, at_least=1, requires=_SCALED)
    yarn_original_max_position_embeddings: int | None = flag(
        None, unit="tokens", at_least=1, at_most=MAX_IDS, requires=_YARN
    )
    yarn_beta_fast: float = flag(32.0, unit="rotations", above=0, requires=_YARN)
    yarn_beta_slow: float = flag(1.0, unit="rotations", above=0, requires=_YARN)
    yarn_correction_range_round_to_int: bool = flag(True, requires=_YARN)
    mscale: float = flag(1.0, at_least=0, requires=_YARN)
    mscale_all_dim: float = flag(0.0, at_least=0, requires=_YARN)
    longrope_original_max_position_embeddings: int | None = flag(
        None, unit="tokens", at_least=1, at_most=MAX_IDS, requires=_LONG_ROPE
    )
    longrope_short_factor: tuple[float, ...] = flag((), above=0, requires=_LONG_ROPE)
    longrope_long_factor: tuple[float, ...] = flag((), above=0, requires=_LONG_ROPE)
    longrope_attention_factor: float = flag(1.0, above=0, requires=_LONG_ROPE)

    @property
    def latent_head_size(self) -> int:
        """The number of channels of a latent attention head's query and key, or value if larger."""
        return max(self.qk_head_dim + self.qk_pos_emb_head_dim, self.v_head_dim)

    @property
    def window(self) -> int | None:
        """The number of earlier tokens that a token attends to. `None` means all of them.

        Raises:
            ValueError: `window_size` is not two numbers, or the second is neither 0 nor -1.
        """
        if self.window_size is None:
            return None
        sizes = _SIZES.fullmatch("".join(self.window_size.split()))
        if sizes is None:
            raise ValueError(
                f"--window-size {self.window_size}: expected the number of earlier tokens and 0, "
                "for example 511,0"
            )
        return int(sizes[1])


def layer_windows(options: SelfAttentionOptions, layers: int) -> tuple[int | None, ...]:
    """Return each layer's `SelfAttentionOptions.window`; `None` for layers with full attention.

    Args:
        options: The flags.
        layers: The number of layers of the model.

    Raises:
        ValueError: `window_size` is invalid, or `window_attn_skip_freq` is neither a number nor a
            pattern with one entry per layer. The message names the flag.
    """
    window, frequency = options.window, options.window_attn_skip_freq
    if frequency is None:
        return (window,) * layers
    limited = _chosen("--window-attn-skip-freq", frequency, layers, number_is_one=False)
    return tuple(window if is_limited else None for is_limited in limited)


def rotary_layers(options: SelfAttentionOptions, layers: int) -> tuple[bool, ...]:
    """Return whether each layer has rotary embeddings, assuming that the model uses them.

    Args:
        options: The flags.
        layers: The number of layers of the model.

    Raises:
        ValueError: `no_rope_freq` is neither a number nor a pattern with one entry per layer. The
            message names the flag.
    """
    if options.no_rope_freq is None:
        return (True,) * layers
    chosen = _chosen("--no-rope-freq", options.no_rope_freq, layers, number_is_one=True)
    return tuple(not is_chosen for is_chosen in chosen)


def delta_net_layers(options: SelfAttentionOptions, layers: int) -> tuple[bool, ...]:
    """Return whether each layer has a gated delta net instead of attention.

    No layer has one if either flag is missing.

    Args:
        options: The flags.
        layers: The number of layers of the model.

    Raises:
        ValueError: `linear_attention_freq` is neither a number nor a pattern with one entry per
            layer. The message names the flag.
    """
    frequency = options.linear_attention_freq
    if options.experimental_attention_variant is None or frequency is None:
        return (False,) * layers
    return _chosen("--linear-attention-freq", frequency, layers, number_is_one=False)


def _chosen(flag: str, given: str, layers: int, *, number_is_one: bool) -> tuple[bool, ...]:
    """Return whether a flag selects each layer.

    A pattern selects the layers that it marks with a 1. A number N selects every Nth layer if
    `number_is_one`, and otherwise all layers except every Nth.
    """
    text = "".join(given.split())
    if _NUMBER.fullmatch(text):
        return tuple(((index + 1) % int(text) == 0) == number_is_one for index in range(layers))
    try:
        return read_pattern(text, layers)
    except ValueError as error:
        raise ValueError(f"{flag} {given}: {error}") from None
