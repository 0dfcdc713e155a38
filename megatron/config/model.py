"""The network: sizes, shapes of its blocks, dropout and initialization."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron.config.fields import MAX_LAYERS, MOST_IDS, MOST_WIDTH, Need, flag, setting

ARCHITECTURES = ("gpt", "bert", "t5")
_FLASH_HEAD_STEP, _LARGEST_FLASH_HEAD = 8, 256


# What some flags change nothing without.
_GROUPED = Need(lambda run: run.model.group_query_attention, "without --group-query-attention")
_ROTARY = Need(
    lambda run: run.model.position_embedding_type == "rope",
    "without --position-embedding-type rope",
)
_SCALED = Need(lambda run: run.model.use_rope_scaling, "without --use-rope-scaling")
_UNBIASED = Need(
    lambda run: not run.model.add_bias_linear,
    "without --disable-bias-linear: all linear layers have biases",
)
_PLAIN_SCORES = Need(
    lambda run: not run.model.use_flash_attn, "with --use-flash-attn: its kernels hold no scores"
)


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Network."""

    architecture: str = setting(
        "gpt", "Network architecture, set by the script that trains it.", choices=ARCHITECTURES
    )
    num_layers: int | None = flag(
        None,
        "Transformer layers.",
        unit="layers",
        names=("--num-layers", "--encoder-num-layers"),
        is_common=True,
        required="required",
        at_least=1,
        at_most=MAX_LAYERS,
    )
    decoder_num_layers: int | None = flag(
        None,
        "Layers of the T5 decoder. Default: --num-layers.",
        unit="layers",
        at_least=1,
        at_most=MAX_LAYERS,
    )
    hidden_size: int | None = flag(
        None,
        "Width of the residual stream.",
        is_common=True,
        required="required",
        at_least=1,
        at_most=MOST_WIDTH,
    )
    ffn_hidden_size: int | None = flag(
        None,
        "Inner width of the MLP. Default: 4 x --hidden-size; with --swiglu or --geglu, 8/3 x "
        "--hidden-size rounded down to a multiple of 64.",
        at_least=1,
        at_most=MOST_WIDTH,
    )
    num_attention_heads: int | None = flag(
        None,
        "Query heads.",
        unit="heads",
        is_common=True,
        required="required",
        at_least=1,
        at_most=2**16,
    )
    kv_channels: int | None = flag(
        None,
        "Size of an attention head. Default: --hidden-size / --num-attention-heads.",
        at_least=1,
        at_most=2**16,
    )
    group_query_attention: bool = flag(False, "Share keys and values among groups of query heads.")
    num_query_groups: int = flag(
        1,
        "Key-value heads with --group-query-attention.",
        unit="groups",
        at_least=1,
        at_most=2**16,
        needs=_GROUPED,
    )
    max_position_embeddings: int | None = flag(
        None,
        "Longest sequence the position embedding covers. Default: --seq-length.",
        unit="tokens",
        at_least=1,
        at_most=MOST_IDS,
    )
    position_embedding_type: str = flag(
        "learned_absolute",
        "How the network encodes positions. relative adds biases to the attention scores (T5 "
        "only).",
        choices=("learned_absolute", "rope", "relative", "none"),
    )
    relative_attention_num_buckets: int = flag(
        32,
        "Distance buckets of --position-embedding-type relative. Each has one bias per head.",
        unit="buckets",
        at_most=MOST_WIDTH,
    )
    relative_attention_max_distance: int = flag(
        128,
        "Distance from which all relative positions share one bucket.",
        unit="tokens",
        at_least=1,
    )
    rotary_percent: float = flag(
        1.0,
        "Fraction of each head that is rotated with --position-embedding-type rope.",
        unit="0 to 1",
        above=0,
        at_most=1,
        needs=_ROTARY,
    )
    rotary_base: float = flag(10000.0, "Base of the rotary frequencies.", above=0, needs=_ROTARY)
    rotary_seq_len_interpolation_factor: int | None = flag(
        None,
        "Divide positions by this factor before rotating. Default: 1.",
        at_least=1,
        needs=_ROTARY,
    )
    use_rope_scaling: bool = flag(
        False, "Slow the rotary frequencies down as Llama 3.1 does (original context length 8192)."
    )
    rope_scaling_factor: float = flag(
        8.0,
        "Factor by which --use-rope-scaling slows the lowest frequencies down.",
        above=0,
        needs=_SCALED,
    )
    make_vocab_size_divisible_by: int = flag(
        128,
        "Pad the vocabulary to a multiple of this times the tensor-parallel size.",
        unit="entries",
        at_least=1,
        at_most=MOST_IDS,
    )
    normalization: str = flag(
        "LayerNorm", "Normalization before each block.", choices=("LayerNorm", "RMSNorm")
    )
    norm_epsilon: float = flag(
        1e-5,
        "Constant added to the variance in normalization layers.",
        names=("--norm-epsilon", "--layernorm-epsilon"),
        above=0,
    )
    apply_layernorm_1p: bool = flag(False, "Store LayerNorm weights as offsets from one.")
    apply_residual_connection_post_layernorm: bool = flag(
        False, "Take the residual after the normalization (original BERT order)."
    )
    openai_gelu: bool = flag(False, "Use OpenAI's tanh form of GeLU.")
    squared_relu: bool = flag(False, "Use squared ReLU instead of GeLU.")
    relu: bool = flag(False, "Use ReLU instead of GeLU (original T5).")
    swiglu: bool = flag(False, "Use gated SiLU (SwiGLU) instead of GeLU.")
    geglu: bool = flag(False, "Use gated GeLU in its tanh form (T5 1.1) instead of GeLU.")
    onnx_safe: bool | None = flag(None, "Use the exact (erf) GeLU, the form that ONNX exports.")
    bias_gelu_fusion: bool = flag(
        True,
        "Compute tanh GeLU and its bias in one kernel. Off: exact (erf) GeLU with PyTorch's "
        "operations.",
        off="--no-bias-gelu-fusion",
    )
    untie_embeddings_and_output_weights: bool = flag(
        False, "Give the output layer its own weights instead of the word embeddings."
    )
    scale_decoder_outputs: bool = flag(
        False,
        "Divide the input of the T5 output layer by the square root of --hidden-size (original "
        "T5).",
    )
    add_output_bias: bool = flag(
        True,
        "Add a bias for every vocabulary entry in the T5 output layer.",
        off="--disable-output-bias",
    )
    softmax_scale: float | None = flag(
        None,
        "Factor of the attention scores of a T5 (Google's models: 1.0). Default: 1 / square root "
        "of --kv-channels.",
        above=0,
    )
    add_bias_linear: bool = flag(
        True, "Add biases to the linear layers.", off="--disable-bias-linear"
    )
    add_qkv_bias: bool = flag(
        False,
        "Add biases to queries, keys and values, even with --disable-bias-linear.",
        needs=_UNBIASED,
    )
    qk_layernorm: bool = flag(
        False,
        "Normalize each head's query and key with --normalization before the attention scores.",
    )
    bert_binary_head: bool = flag(
        True,
        "Train BERT to predict whether two segments are in order. Off: train on masked tokens "
        "only, without token types and pooler.",
        off="--bert-no-binary-head",
    )
    attention_dropout: float = flag(
        0.1, "Dropout on attention probabilities.", unit="0 to 1", at_least=0, below=1
    )
    hidden_dropout: float = flag(
        0.1, "Dropout on block outputs and embeddings.", unit="0 to 1", at_least=0, below=1
    )
    init_method_std: float = flag(0.02, "Standard deviation of the initial weights.", at_least=0)
    init_method_xavier_uniform: bool = flag(
        False, "Draw the initial weights from the Xavier uniform distribution."
    )
    perform_initialization: bool = flag(
        True,
        "Draw initial weights. Turn it off to save time when --load overwrites them.",
        off="--no-initialization",
    )
    use_flash_attn: bool = flag(
        False,
        "Require attention kernels that never store all scores (GPU, fp16 or bf16): "
        "FlashAttention 4 if flash-attn-4 is installed and faster (--micro-batch-size 1, no "
        "dropout, no mask), otherwise the first suitable kernel of cuDNN or PyTorch.",
    )
    masked_softmax_fusion: bool = flag(
        True,
        "Allow a fused attention kernel. Off: compute scores, mask and softmax separately.",
        off="--no-masked-softmax-fusion",
        needs=_PLAIN_SCORES,
    )
    apply_rope_fusion: bool = flag(
        True,
        "Split queries, keys and values and rotate them in one kernel. Off: use PyTorch's "
        "operations.",
        off="--no-rope-fusion",
    )
    bias_dropout_fusion: bool = flag(
        True,
        "Apply bias, hidden dropout and residual in one kernel with its own random masks. Off: "
        "use PyTorch's operations.",
        off="--no-bias-dropout-fusion",
    )
    no_persist_layer_norm: bool = flag(
        False,
        "Accepted for compatibility; no effect.",
        notice="there is a single LayerNorm kernel, for rows of every length",
    )

    @property
    def activation(self) -> str:
        """Name of the MLP's non-linearity, a function of `kernels.activation`.

        In Megatron's order of precedence. Its fused bias-GeLU, the default, is the tanh form;
        without fusion, and so without biases, it takes the exact form.
        """
        for name, is_on in (
            ("swiglu", self.swiglu),
            ("geglu", self.geglu),
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
        """The MLP has a gate: its first matrix has two parts."""
        return self.swiglu or self.geglu


@dataclass(frozen=True, kw_only=True)
class ModelConfig(ModelOptions):
    """The network as resolved: every size is known."""

    num_layers: int = field()
    hidden_size: int = field()
    ffn_hidden_size: int = field()
    num_attention_heads: int = field()
    kv_channels: int = field()
    max_position_embeddings: int = field()

    @property
    def decoder_layers(self) -> int:
        """Layers of a T5's decoder; 0 in any other network."""
        return self.decoder_num_layers or 0

    @property
    def all_layers(self) -> int:
        """Transformer layers, those of a decoder beside an encoder included."""
        return self.num_layers + self.decoder_layers

    @property
    def kv_heads(self) -> int:
        """Key-value heads: the query groups, or all heads without grouping."""
        return self.num_query_groups if self.group_query_attention else self.num_attention_heads


# What gives the weights their shape and meaning: with other values it is another network.
NETWORK_FIELDS = (
    "architecture",
    "num_layers",
    "decoder_num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "kv_channels",
    "group_query_attention",
    "num_query_groups",
    "max_position_embeddings",
    "position_embedding_type",
    "relative_attention_num_buckets",
    "relative_attention_max_distance",
    "rotary_percent",
    "rotary_base",
    "rotary_seq_len_interpolation_factor",
    "use_rope_scaling",
    "rope_scaling_factor",
    "normalization",
    "norm_epsilon",
    "apply_layernorm_1p",
    "apply_residual_connection_post_layernorm",
    "openai_gelu",
    "squared_relu",
    "relu",
    "swiglu",
    "geglu",
    "untie_embeddings_and_output_weights",
    "scale_decoder_outputs",
    "add_output_bias",
    "softmax_scale",
    "add_bias_linear",
    "add_qkv_bias",
    "qk_layernorm",
    "bert_binary_head",
)


# How fast rotary positions turn: weights learn another speed, as for a longer context, in a
# finetuning. Not --rotary-percent: channels that never turned hold no positions.
ROTARY_SPEED = (
    "rotary_base",
    "rotary_seq_len_interpolation_factor",
    "use_rope_scaling",
    "rope_scaling_factor",
)
WITHOUT_TABLE = ("rope", "none")  # kinds of positions that any sequence has, without weights


def is_irrelevant(model: ModelOptions, name: str) -> bool:
    """Return whether a field has no effect with the network's kind of positions."""
    positions = model.position_embedding_type
    if name in ("rotary_percent", "rotary_base", "rotary_seq_len_interpolation_factor"):
        return positions != "rope"
    if name.startswith("relative_attention_"):
        return positions != "relative"
    if name == "max_position_embeddings":
        return positions == "relative"  # of any distance
    return name == "rope_scaling_factor" and not model.use_rope_scaling


def flash_head_misfit(size: int, *, largest: int = _LARGEST_FLASH_HEAD) -> str:
    """Return why flash attention does not support heads of this size, or "".

    Args:
        size: Channels of a head.
        largest: The largest head size of the kernels. Default: that of PyTorch's kernels.
    """
    if size % _FLASH_HEAD_STEP or size > largest:
        return f"head size {size} is not a multiple of {_FLASH_HEAD_STEP} up to {largest}"
    return ""
