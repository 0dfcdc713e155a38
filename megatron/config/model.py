"""The network: sizes, shapes of its blocks, dropout and initialization."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields

from megatron.config.adapters import AdapterOptions
from megatron.config.attention import (
    DELTA_FIELDS,
    LATENT_FIELDS,
    LONGROPE_FIELDS,
    YARN_FIELDS,
    SelfAttentionOptions,
)
from megatron.config.experts import ExpertOptions
from megatron.config.fields import (
    HALF,
    LOADS,
    MAX_IDS,
    MAX_LAYERS,
    MAX_WIDTH,
    QK_NORM,
    ROTARY,
    Requirement,
    flag,
)
from megatron.config.hybrid import MAMBA_FIELDS, HybridOptions
from megatron.config.multi_token import MultiTokenOptions
from megatron.config.retro import RetroOptions

ARCHITECTURES = ("gpt", "bert", "t5", "retro", "ict")
_FLASH_HEAD_STEP, _LARGEST_FLASH_HEAD = 8, 256


# Conditions for the flags below, used as their `needs` or `requires`.
_GROUPED = Requirement(lambda run: run.model.group_query_attention, "--group-query-attention")
_SCALED = Requirement(lambda run: run.model.use_rope_scaling, "--use-rope-scaling")
_UNBIASED = Requirement(
    lambda run: not run.model.add_bias_linear,
    "--disable-bias-linear: all linear layers have biases",
)
_BIASED = Requirement(
    lambda run: run.model.add_bias_linear, "biases, which --disable-bias-linear leaves out"
)
_LAYER_NORM = Requirement(
    lambda run: run.model.normalization == "LayerNorm", "--normalization LayerNorm"
)
_PLAIN_SCORES = Requirement(
    lambda run: not run.model.use_flash_attn,
    "attention scores in memory, which --use-flash-attn avoids",
)
_MUP = Requirement(lambda run: run.model.use_mup, "--use-mup")
_RELATIVE = Requirement(
    lambda run: run.model.position_embedding_type == "relative",
    "--position-embedding-type relative",
)
_ALIBI = Requirement(
    lambda run: run.model.position_embedding_type == "alibi", "--position-embedding-type alibi"
)
_PARALLEL = Requirement(lambda run: run.model.parallel_residual, "--parallel-residual")
_GATED = Requirement(
    lambda run: run.model.is_gated, "--swiglu, --geglu or --quick-geglu, which have a gate"
)
# Values of --position-embedding-type. `resolve` replaces yarn.
POSITIONS = ("learned_absolute", "rope", "yarn", "relative", "alibi", "none")


@dataclass(frozen=True, kw_only=True)
class DenseOptions:
    """Network, apart from its experts.

    Attributes:
        architecture: Network architecture, set by the script that trains it.
        reward_head: Whether the model gives each token a reward instead of logits, set by
            --preference-loss bradley-terry.
        num_layers: Number of transformer layers. Default: see --hybrid-layer-pattern.
        decoder_num_layers: Number of layers of the T5 decoder. Default: --num-layers.
        hidden_size: Width of the residual stream.
        ffn_hidden_size: Inner width of the MLP. Default: 4 x --hidden-size; with --swiglu or
            --geglu, 8/3 x --hidden-size rounded down to a multiple of 64.
        num_attention_heads: Number of query heads.
        kv_channels: Size of an attention head. Default: --hidden-size / --num-attention-heads.
        group_query_attention: Make each group of query heads share one head of keys and values.
        num_query_groups: Number of key-value heads with --group-query-attention.
        max_position_embeddings: Longest sequence the position embedding covers; with --rope-type
            dynamic, up to --rotary-scaling-factor times as many tokens. Default: --seq-length.
        position_embedding_type: How the network encodes positions. relative adds learned biases to
            the attention scores (T5 only). alibi subtracts the distance between query and key,
            times a fixed slope for each head, from the scores (GPT only). yarn is short for rope
            with --rope-type yarn, as in Megatron Core. Latent attention always
            has rotary embeddings, so with it rope and none are the same, and learned_absolute adds
            a table, as in Megatron Core.
        scale_alibi: Scale the biases of --position-embedding-type alibi by the same factor as the
            attention scores (Falcon-RW).
        relative_attention_num_buckets: Distance buckets of --position-embedding-type relative. Each
            has one bias per head.
        relative_attention_max_distance: Distance from which all relative positions share one
            bucket.
        rotary_percent: Fraction of each head that is rotated with --position-embedding-type rope.
        rotary_base: Base of the rotary frequencies.
        rotary_seq_len_interpolation_factor: Divide positions by this factor before rotating.
            Default: 1.
        use_rope_scaling: Lower the rotary frequencies as Llama 3.1 does (original context length
            8192).
        rope_scaling_factor: Factor by which --use-rope-scaling divides the lowest frequencies.
        rope_high_freq_factor: Frequencies that complete at least this many rotations within 8192
            tokens are not changed by --use-rope-scaling (1 in Llama 4).
        make_vocab_size_divisible_by: Pad the vocabulary to a multiple of this times the
            tensor-parallel size.
        normalization: Normalization before each block.
        norm_epsilon: Constant added to the variance in normalization layers.
        layernorm_bias: Add a bias to each LayerNorm.
        apply_layernorm_1p: Store the weights of normalizations as offsets from one.
        norm_placement: Where the layers normalize: before attention and MLP, after them (what they
            add to the residual stream, as in OLMo 2), or both (Gemma 2).
        parallel_residual: Compute attention and MLP of a layer from the same input, and add both to
            the residual (GPT-NeoX).
        shared_parallel_norm: Make attention and MLP of --parallel-residual read the same normalized
            input (Falcon-7B), instead of normalizing it separately for each.
        apply_residual_connection_post_layernorm: Take the residual after the normalization
            (original BERT order).
        openai_gelu: Use the tanh approximation of GeLU, as OpenAI's GPT-2 does.
        squared_relu: Use squared ReLU instead of GeLU.
        relu: Use ReLU instead of GeLU (original T5).
        swiglu: Use gated SiLU (SwiGLU) instead of GeLU.
        geglu: Use gated GeLU with the tanh approximation (T5 1.1) instead of GeLU.
        quick_geglu: Use a gated MLP whose gate x becomes x times sigmoid(1.702 x), instead of GeLU.
        glu_linear_offset: Number added to the ungated part of a gated MLP (1 in GPT-OSS).
        activation_func_clamp_value: Limit c of a gated MLP: gates are clamped to at most c, and the
            values that they multiply to between -c and c (7 in GPT-OSS).
        onnx_safe: Use the exact (erf) GeLU, the variant that ONNX exports.
        bias_gelu_fusion: Compute tanh GeLU and its bias in one kernel. Off: exact (erf) GeLU with
            PyTorch's operations.
        untie_embeddings_and_output_weights: Give the output layer its own weights instead of the
            word embeddings.
        scale_embeddings: Multiply word embeddings by the square root of --hidden-size (Gemma).
        embed_layernorm: Normalize word embeddings (BLOOM).
        lm_head_bias: Add a bias for every vocabulary entry in the output layer of a GPT (GPT-J).
        logit_scale: Factor applied to the logits (Cohere). Default: 1.
        final_logit_softcapping: Bound c of the logits, which become c x tanh(logit / c) (Gemma 2).
            Default: no bound.
        scale_decoder_outputs: Divide the input of the T5 output layer by the square root of
            --hidden-size (original T5).
        add_output_bias: Add a bias for every vocabulary entry in the T5 output layer.
        softmax_scale: Factor applied to the attention scores of GPT and T5 (1.0 in Google's T5
            models). Default: 1 / square root of --kv-channels.
        add_bias_linear: Add biases to the linear layers.
        add_bias_attention: Also add biases to the linear layers of attention (GPT-J has none
            there).
        add_qkv_bias: Add biases to queries, keys and values, even with --disable-bias-linear.
        qk_layernorm: Normalize queries and keys with --normalization before the attention scores.
        qk_layernorm_scope: What --qk-layernorm normalizes together: the channels of a "head", with
            the same weights for all heads (Qwen3); those of "each-head", with its own weights
            (Command R+); or the whole "projection", all heads at once (OLMoE).
        bert_binary_head: Train BERT to predict whether two segments are in order. Off: train on
            masked tokens only, without token types and without a pooler.
        biencoder_projection_dim: Size of a bi-encoder's vectors. 0: --hidden-size, without a
            projection.
        biencoder_shared_query_context_model: Embed queries and contexts with the same tower.
        attention_dropout: Dropout on attention probabilities.
        hidden_dropout: Dropout on block outputs and embeddings.
        init_method_std: Standard deviation of the initial weights.
        init_method_xavier_uniform: Draw the initial weights from the Xavier uniform distribution.
        perform_initialization: Draw initial weights. Turn it off to save time when --load
            overwrites them.
        use_flash_attn: Require attention kernels that never materialize the scores (GPU, fp16 or
            bf16): FlashAttention 4 if flash-attn-4 is installed and faster (--micro-batch-size 1,
            no dropout, no mask), otherwise the first suitable kernel of cuDNN or PyTorch.
        batch_invariant_mode: Compute bitwise identical results for each token in any batch, so that
            training assigns a model's answers the same log-probabilities as generation did
            (docs/reinforcement.md). Runs on CPUs, in fp32, and is slower.
        masked_softmax_fusion: Allow a fused attention kernel. Off: compute scores, mask and softmax
            separately.
        apply_rope_fusion: Split queries, keys and values and rotate them in one kernel. Off: use
            PyTorch's operations.
        bias_dropout_fusion: Apply bias, hidden dropout and residual in one kernel with its own
            random masks. Off: use PyTorch's operations.
        no_persist_layer_norm: Accepted for compatibility; no effect.
    """

    architecture: str = flag("gpt", choices=ARCHITECTURES, is_flag=False)
    reward_head: bool = flag(False, is_flag=False)
    num_layers: int | None = flag(
        None,
        unit="layers",
        names="--num-layers --encoder-num-layers",
        required="required",
        at_least=1,
        at_most=MAX_LAYERS,
    )
    decoder_num_layers: int | None = flag(
        None, unit="layers", at_least=1, at_most=MAX_LAYERS, only_for=("t5",)
    )
    hidden_size: int | None = flag(None, required="required", at_least=1, at_most=MAX_WIDTH)
    ffn_hidden_size: int | None = flag(None, at_least=1, at_most=MAX_WIDTH)
    num_attention_heads: int | None = flag(
        None, unit="heads", required="required", at_least=1, at_most=2**16
    )
    kv_channels: int | None = flag(None, at_least=1, at_most=2**16)
    group_query_attention: bool = False
    num_query_groups: int = flag(1, unit="groups", at_least=1, at_most=2**16, needs=_GROUPED)
    max_position_embeddings: int | None = flag(None, unit="tokens", at_least=1, at_most=MAX_IDS)
    position_embedding_type: str = flag("learned_absolute", choices=POSITIONS)
    scale_alibi: bool = flag(False, requires=_ALIBI)
    relative_attention_num_buckets: int = flag(
        32, unit="buckets", at_most=MAX_WIDTH, requires=_RELATIVE
    )
    relative_attention_max_distance: int = flag(128, unit="tokens", at_least=1, requires=_RELATIVE)
    rotary_percent: float = flag(1.0, unit="0 to 1", above=0, at_most=1, needs=ROTARY)
    rotary_base: float = flag(10000.0, above=0, needs=ROTARY)
    rotary_seq_len_interpolation_factor: float | None = flag(None, at_least=1, needs=ROTARY)
    use_rope_scaling: bool = flag(False, requires=ROTARY)
    rope_scaling_factor: float = flag(8.0, above=0, needs=_SCALED)
    rope_high_freq_factor: float = flag(4.0, unit="rotations", at_least=1, needs=_SCALED)
    make_vocab_size_divisible_by: int = flag(128, unit="entries", at_least=1, at_most=MAX_IDS)
    normalization: str = flag("LayerNorm", choices=("LayerNorm", "RMSNorm"))
    norm_epsilon: float = flag(1e-5, names="--norm-epsilon --layernorm-epsilon", above=0)
    layernorm_bias: bool = flag(True, off="--disable-layernorm-bias", requires=_LAYER_NORM)
    apply_layernorm_1p: bool = False
    norm_placement: str = flag("before", choices=("before", "after", "both"), only_for=("gpt",))
    parallel_residual: bool = flag(False, only_for=("gpt",))
    shared_parallel_norm: bool = flag(False, requires=_PARALLEL)
    apply_residual_connection_post_layernorm: bool = False
    openai_gelu: bool = False
    squared_relu: bool = False
    relu: bool = False
    swiglu: bool = False
    geglu: bool = False
    quick_geglu: bool = False
    glu_linear_offset: float = flag(0.0, requires=_GATED)
    activation_func_clamp_value: float | None = flag(None, above=0, requires=_GATED)
    onnx_safe: bool | None = None
    bias_gelu_fusion: bool = True
    untie_embeddings_and_output_weights: bool = False
    scale_embeddings: bool = flag(False, only_for=("gpt",))
    embed_layernorm: bool = flag(False, only_for=("gpt",))
    lm_head_bias: bool = flag(False, only_for=("gpt",))
    logit_scale: float | None = flag(None, above=0, only_for=("gpt",))
    final_logit_softcapping: float | None = flag(None, above=0, only_for=("gpt",))
    scale_decoder_outputs: bool = flag(False, only_for=("t5",))
    add_output_bias: bool = flag(True, off="--disable-output-bias", only_for=("t5",))
    softmax_scale: float | None = flag(None, above=0, only_for=("gpt", "t5"))
    add_bias_linear: bool = flag(True, off="--disable-bias-linear")
    add_bias_attention: bool = flag(
        True, off="--disable-bias-attention", requires=_BIASED, only_for=("gpt",)
    )
    add_qkv_bias: bool = flag(False, needs=_UNBIASED)
    qk_layernorm: bool = False
    qk_layernorm_scope: str = flag(
        "head", choices=("head", "each-head", "projection"), needs=QK_NORM
    )
    bert_binary_head: bool = flag(True, off="--bert-no-binary-head", only_for=("bert",))
    biencoder_projection_dim: int = flag(0, at_least=0, at_most=MAX_WIDTH, only_for=("ict",))
    biencoder_shared_query_context_model: bool = flag(False, only_for=("ict",))
    attention_dropout: float = flag(0.1, unit="0 to 1", at_least=0, below=1)
    hidden_dropout: float = flag(0.1, unit="0 to 1", at_least=0, below=1)
    init_method_std: float = flag(0.02, at_least=0)
    init_method_xavier_uniform: bool = False
    perform_initialization: bool = flag(True, off="--no-initialization", requires=LOADS)
    use_flash_attn: bool = flag(False, requires=HALF)
    batch_invariant_mode: bool = flag(False, only_for=("gpt",))
    masked_softmax_fusion: bool = flag(True, needs=_PLAIN_SCORES)
    apply_rope_fusion: bool = flag(True, off="--no-rope-fusion")
    bias_dropout_fusion: bool = True
    no_persist_layer_norm: bool = flag(
        False, notice="there is a single LayerNorm kernel, for rows of every length"
    )

    @property
    def activation(self) -> str:
        """Name of the MLP's activation function, which is defined in `kernels.activation`.

        Flags are tried in Megatron's order of precedence. Megatron's default, the fused bias-GeLU,
        uses the tanh approximation. Without fusion, for which biases are required, Megatron
        computes GeLU exactly.
        """
        for name, is_on in (
            ("swiglu", self.swiglu),
            ("geglu", self.geglu),
            ("quick_geglu", self.quick_geglu),
            ("relu", self.relu),
            ("gelu_tanh", self.openai_gelu),
            ("gelu", self.onnx_safe),
            ("squared_relu", self.squared_relu),
        ):
            if is_on:
                return name
        return "gelu_tanh" if self.bias_gelu_fusion and self.add_bias_linear else "gelu"

    @property
    def is_gated(self) -> bool:
        """Whether the MLP has a gate, so that its first matrix has two parts."""
        return self.swiglu or self.geglu or self.quick_geglu


@dataclass(frozen=True, kw_only=True)
class WidthOptions:
    """Maximal update parametrization (muP; Yang et al., 2022).

    Attributes:
        use_mup: Scale initial weights, learning rates, attention scores and logits with
            --hidden-size, so that the best learning rate of a narrow model is also the best for a
            wide one.
        mup_base_hidden_size: --hidden-size of the narrow model for which the learning rate and
            initial weights were tuned. Default: --hidden-size itself.
        mup_embedding_mult: Factor applied to the word embeddings.
        mup_output_mult: Factor applied to the logits. 1 means --mup-base-hidden-size /
            --hidden-size.
        mup_base_head_dim: --kv-channels of the narrow model, in which attention scores then have
            their usual scale. Default: 1.
        mup_attn_scale_power: Power p in the factor that is applied to the attention scores, the
            square root of --mup-base-head-dim divided by --kv-channels ** p.
    """

    use_mup: bool = flag(False, only_for=("gpt",))
    mup_base_hidden_size: int | None = flag(None, at_least=1, at_most=MAX_WIDTH, requires=_MUP)
    mup_embedding_mult: float = flag(1.0, above=0, requires=_MUP)
    mup_output_mult: float = flag(1.0, above=0, requires=_MUP)
    mup_base_head_dim: float | None = flag(None, above=0, requires=_MUP)
    mup_attn_scale_power: float = flag(1.0, at_least=0, requires=_MUP)


@dataclass(frozen=True, kw_only=True)
class ModelOptions(
    AdapterOptions,
    RetroOptions,
    ExpertOptions,
    MultiTokenOptions,
    HybridOptions,
    SelfAttentionOptions,
    WidthOptions,
    DenseOptions,
):
    """Network."""

    @property
    def has_rotary_embeddings(self) -> bool:
        """Whether attention has rotary embeddings; latent attention always does."""
        return self.position_embedding_type in ("rope", "yarn") or self.multi_latent_attention

    @property
    def has_states(self) -> bool:
        """Whether the model has layers that carry a recurrent state from token to token."""
        return self.has_mamba or self.experimental_attention_variant is not None


@dataclass(frozen=True, kw_only=True)
class ModelConfig(ModelOptions):
    """Network options after `resolve`, when every size is known."""

    num_layers: int = field()
    hidden_size: int = field()
    ffn_hidden_size: int = field()
    num_attention_heads: int = field()
    kv_channels: int = field()
    rope_type: str = "rope"
    max_position_embeddings: int = field()

    @property
    def width_ratio(self) -> float:
        """The width relative to muP's base width; 1 without muP."""
        return self.hidden_size / (self.mup_base_hidden_size or self.hidden_size)

    @property
    def attention_scale(self) -> float | None:
        """Factor applied to the attention scores; `None` means 1 / sqrt(kv_channels)."""
        if not self.use_mup:
            return self.softmax_scale
        return (self.mup_base_head_dim or 1.0) ** 0.5 / self.kv_channels**self.mup_attn_scale_power

    @property
    def logit_factor(self) -> float | None:
        """Factor applied to the logits, including muP's; `None` means 1."""
        if not self.use_mup:
            return self.logit_scale
        factor = self.mup_output_mult if self.mup_output_mult != 1 else 1 / self.width_ratio
        return factor * (self.logit_scale or 1.0)

    @property
    def longest_context(self) -> int:
        """Number of tokens in the longest sequence that the network processes."""
        factor = self.rotary_scaling_factor if self.rope_type == "dynamic" else 1.0
        return int(self.max_position_embeddings * factor)

    @property
    def decoder_layers(self) -> int:
        """Number of layers in T5's decoder; 0 for other networks."""
        return self.decoder_num_layers or 0

    @property
    def neighbor_length(self) -> int:
        """Number of tokens in a neighbor of a Retro chunk."""
        return self.chunk_length * self.retro_num_retrieved_chunks

    def neighbor_tokens(self, tokens: int) -> int:
        """Return the number of tokens in the neighbors of a sequence's chunks; 0 without Retro."""
        if self.architecture != "retro":
            return 0
        return tokens * self.retro_num_neighbors * self.retro_num_retrieved_chunks

    @property
    def kv_heads(self) -> int:
        """Number of key-value heads: the query groups, or all heads without grouping."""
        return self.num_query_groups if self.group_query_attention else self.num_attention_heads


# Fields in which runs of the same network may differ: initialization, padding, kernels.
_EXCLUDED_FIELDS = {
    "make_vocab_size_divisible_by",
    "onnx_safe",
    "bias_gelu_fusion",
    "attention_dropout",
    "hidden_dropout",
    "init_method_std",
    "init_method_xavier_uniform",
    "perform_initialization",
    "use_flash_attn",
    "masked_softmax_fusion",
    "batch_invariant_mode",
    "apply_rope_fusion",
    "bias_dropout_fusion",
    "no_persist_layer_norm",
    # How a mixture is trained.
    "moe_router_bias_update_rate",
    "moe_router_load_balancing_type",
    "moe_aux_loss_coeff",
    "moe_z_loss_coeff",
    "moe_input_jitter_eps",
    "noisy_gate_policy",
    "moe_top2_2nd_expert_sampling",
    "moe_use_rts",
    "moe_expert_capacity_factor",
    "moe_eval_capacity_factor",
    "moe_min_capacity",
    "moe_token_dropping",
    "moe_pad_expert_input_to_capacity",
    "moe_per_layer_logging",
    "moe_token_drop_policy",
    "mtp_loss_scaling_factor",
    # Which weights are trained, and how frozen ones are stored.
    "freeze",
    "lora_dropout",
    "load_adapter",
    "frozen_weights_dtype",
    # Settings of a retriever that may differ from those that the Retro model was trained with.
    "retro_add_retriever",
    "retro_freeze_gpt",
    "retro_encoder_hidden_dropout",
    "retro_encoder_attention_dropout",
    "retro_num_neighbors",
    "retro_num_retrieved_chunks",
}
# Fields that give the weights their shape and meaning: other values mean a different network.
NETWORK_FIELDS = tuple(
    entry.name for entry in fields(ModelOptions) if entry.name not in _EXCLUDED_FIELDS
)


# Fields that set the frequencies of rotary embeddings. Finetuning may change them, for example for
# a longer context. --rotary-percent is not among them: channels that were never rotated carry no
# positional information.
ROTARY_FREQUENCIES = (
    "rotary_base",
    "window_rotary_base",
    "rotary_seq_len_interpolation_factor",
    "use_rope_scaling",
    "rope_scaling_factor",
    "rope_high_freq_factor",
    *YARN_FIELDS,
    *LONGROPE_FIELDS,
)
# Fields of attention heads.
_HEAD_FIELDS = (
    "num_attention_heads",
    "kv_channels",
    "group_query_attention",
    "num_query_groups",
    "softmax_scale",
    "softmax_type",
)
_MLP_FIELDS = (  # fields of MLPs and experts
    *("ffn_hidden_size", "openai_gelu", "squared_relu", "relu", "swiglu", "geglu", "quick_geglu"),
    *("glu_linear_offset", "activation_func_clamp_value"),
)
# Position types without weights, for sequences of any length.
UNLEARNED_POSITIONS = ("rope", "alibi", "none")


def contradictions_of_yarn(model: ModelOptions) -> Iterator[str]:
    """Yield an error for each setting that contradicts --position-embedding-type yarn."""
    flag = "--position-embedding-type yarn"
    if model.rope_type not in (None, "yarn"):
        yield f"{flag} with --rope-type {model.rope_type}: they contradict each other: drop one"
    if model.rotary_percent != 1:
        yield (
            f"{flag} with --rotary-percent {model.rotary_percent:g}: Megatron Core's YaRN rotates "
            "whole heads: drop --rotary-percent, or use --position-embedding-type rope --rope-type "
            "yarn"
        )


def is_irrelevant(model: ModelOptions, name: str) -> bool:
    """Return whether a field has no effect in this network, such as a rotary base without RoPE."""
    positions = model.position_embedding_type
    if name.startswith("relative_attention_"):
        return positions != "relative"
    if name.startswith("retro_"):
        return model.architecture != "retro"
    if name.startswith("mup_"):
        return not model.use_mup
    of_rope = ("rotary_percent", "rotary_base", "rotary_seq_len_interpolation_factor")
    has_effect = {
        **dict.fromkeys(YARN_FIELDS, model.rope_type == "yarn"),
        **dict.fromkeys(LONGROPE_FIELDS, model.rope_type == "longrope"),
        "rotary_scaling_factor": model.rope_type in ("yarn", "dynamic"),
        **dict.fromkeys(LATENT_FIELDS, model.multi_latent_attention),
        **dict.fromkeys(DELTA_FIELDS, model.experimental_attention_variant is not None),
        **dict.fromkeys((*of_rope, "no_rope_freq", "rope_type"), model.has_rotary_embeddings),
        "attention_temperature_floor": model.attention_temperature_scale is not None,
        "window_rotary_base": positions == "rope" and model.window_size is not None,
        "scale_alibi": positions == "alibi",
        "shared_parallel_norm": model.parallel_residual,
        "layernorm_bias": model.normalization == "LayerNorm",
        "add_bias_attention": model.add_bias_linear,
        **dict.fromkeys(("rope_scaling_factor", "rope_high_freq_factor"), model.use_rope_scaling),
        # Relative positions cover any distance, and so do recurrent states.
        "max_position_embeddings": positions == "learned_absolute"
        or (positions != "relative" and model.has_attention),
        "qk_layernorm_scope": model.qk_layernorm,
        "moe_router_pre_softmax": model.moe_router_score_function == "softmax",
        "untie_embeddings_and_output_weights": not model.reward_head,
        **dict.fromkeys(_HEAD_FIELDS, model.has_attention),
        **dict.fromkeys(MAMBA_FIELDS, model.has_mamba),
        **dict.fromkeys(_MLP_FIELDS, model.has_mlps),
        "add_bias_linear": model.has_attention or model.has_mlps,
    }
    return not has_effect.get(name, True)


def flash_head_problem(size: int, *, largest: int = _LARGEST_FLASH_HEAD) -> str:
    """Return why flash attention does not support heads of this size, or "".

    Args:
        size: The number of channels per head.
        largest: The largest head size of the kernels. Default: the limit of PyTorch's kernels.
    """
    if size % _FLASH_HEAD_STEP or size > largest:
        return f"head size {size} is not a multiple of {_FLASH_HEAD_STEP} up to {largest}"
    return ""


def with_article(architecture: str) -> str:
    """Return an architecture's name with its indefinite article: "a gpt", "an ict"."""
    return f"{'an' if architecture[0] in 'aeiou' else 'a'} {architecture}"
