"""Networks described as data: a plan for each layer, for the embedding and for each head.

`plans.model_plan` makes a `ModelPlan` from the resolved configuration. Models are built from it;
parameters, FLOPs, memory and pipeline balance are counted from it. Every plan is immutable,
printable and hashable, and consecutive layers may have plans of different kinds. The tables
`block.MIXERS`, `block.MLPS` and `arithmetic.HEADS` name the class that implements each `kind`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.config.stages import ModelPart
from megatron.kernels.rope import DynamicNtk, LongRope, Scaling, Yarn
from megatron.parallel.parameter import Init


@dataclass(frozen=True)
class HeadSpec:
    """The purpose of a model's heads, and the number of sequences in a sample.

    Attributes:
        outputs: Number of scores that a task head computes for each sequence. `None` means a
            language-model head, which scores every vocabulary entry for each token.
        sequences: Number of sequences per sample. In a multiple-choice task, each question-answer
            pair is a sequence.
        compares: Whether the losses compare documents instead of measuring token likelihoods.
    """

    outputs: int | None = None
    sequences: int = 1
    compares: bool = False

    @property
    def is_language_model(self) -> bool:
        """Whether each token has a score for every vocabulary entry."""
        return self.outputs is None

    @property
    def has_perplexity(self) -> bool:
        """Whether losses are mean negative log likelihoods of tokens."""
        return self.is_language_model and not self.compares


LANGUAGE_MODEL_HEAD = HeadSpec()
# A bi-encoder computes no scores; it computes one vector per query and one per context.
RETRIEVAL_HEAD = HeadSpec(outputs=0, sequences=2)


@dataclass(frozen=True)
class InitPlan:
    """The distribution of initial weights.

    Attributes:
        std: Standard deviation of the normal distribution.
        layers: Number of layers that add their outputs to the residual stream.
        xavier: Whether to use Xavier's uniform distribution instead of the normal one.
        outputs: Number of outputs that each of these layers adds.
        rate: Factor applied to the learning rate of the weights (muP).
    """

    std: float
    layers: int
    xavier: bool = False
    outputs: int = 2
    rate: float = 1.0

    def weight(self, fan_in: int, fan_out: int, *, into_residual: bool = False) -> Init:
        """Return the initial distribution of a matrix.

        Args:
            fan_in: Number of inputs of the whole matrix.
            fan_out: Number of outputs of the whole matrix.
            into_residual: Whether the output is added to the residual stream. If so, the standard
                deviation of the normal distribution is divided by the square root of the number of
                such outputs (GPT-2).
        """
        if self.xavier:
            return Init("uniform", math.sqrt(6 / (fan_in + fan_out)))
        added = self.outputs * self.layers if into_residual else 1
        return Init("normal", self.std / math.sqrt(added), rate=self.rate)


@dataclass(frozen=True)
class NormPlan:
    """The plan of a LayerNorm or an RMSNorm.

    Attributes:
        kind: "LayerNorm" or "RMSNorm".
        epsilon: Number added to the variance.
        offset: Whether the stored weight is an offset from one (LayerNorm-1p).
        bias: Whether the normalization has a bias. An RMSNorm never has one.
        weight: Whether the normalization has a weight.
    """

    kind: str
    epsilon: float
    offset: bool = False
    bias: bool = False
    weight: bool = True


@dataclass(frozen=True)
class RotaryPlan:
    """The plan of a layer's rotary position embedding.

    Attributes:
        positions: Length of the longest sequence, in tokens.
        channels: Number of channels per head that rotate.
        base: Base of the rotary frequencies.
        interpolation: Number by which positions are divided; `None` leaves them unchanged.
        planes: Number of channel pairs that rotate, counted from the highest frequency; `None` for
            all.
        scaling: Llama 3.1's changes to the frequencies; `None` for none.
        yarn: YaRN's changes to the frequencies; `None` for none.
        long_rope: LongRoPE's changes to the frequencies; `None` for none.
        dynamic: Dynamic NTK's changes to the base; `None` for none.
    """

    positions: int
    channels: int
    base: float
    interpolation: float | None = None
    planes: int | None = None
    scaling: Scaling | None = None
    yarn: Yarn | None = None
    long_rope: LongRope | None = None
    dynamic: DynamicNtk | None = None


@dataclass(frozen=True)
class TemperaturePlan:
    """A factor applied to queries that grows with position, as in Llama 4 (Nakanishi, 2025).

    Attributes:
        scale: Coefficient of the logarithmic term that is added to 1.
        floor: Number of tokens between two increases of the factor.
    """

    scale: float
    floor: int

    def factor(self, positions: Tensor) -> Tensor:
        """Return the factor for queries at each of `positions`, fp32 in the same shape."""
        return 1 + self.scale * torch.log1p((positions + 1) // self.floor)


@dataclass(frozen=True, kw_only=True)
class SublayerPlan:
    """A mixer or an MLP, which adds one update to the residual stream.

    Attributes:
        kind: A key of `block.MIXERS` or `block.MLPS`.
        hidden: Width of the residual stream.
        init: Distribution of the initial weights.
        bias: Whether linear layers have biases.
        defers_bias: Whether the last bias is added by the dropout kernel of the residual sum.
    """

    kind: str
    hidden: int
    init: InitPlan
    bias: bool = True
    defers_bias: bool = False


@dataclass(frozen=True, kw_only=True)
class MixerPlan(SublayerPlan):
    """A sublayer that moves information between tokens.

    Attributes:
        causal: Whether, without a mask, tokens attend only to themselves and earlier tokens.
    """

    causal: bool = True


@dataclass(frozen=True, kw_only=True)
class AttentionPlan(MixerPlan):
    """Self-attention with any number of key-value heads, or attention to an encoder's output.

    Attributes:
        heads: Number of query heads.
        kv_heads: Number of key-value heads.
        head_size: Number of channels in each query, key and value.
        dropout: Dropout probability of the attention weights.
        scale: Factor applied to the scores; `None` means 1 / sqrt(head_size).
        output_gate: Whether a gate that is computed with the query multiplies each head's result.
        qkv_bias: Whether queries, keys and values have biases even if other layers have none.
        qk_norm: Normalization of queries and keys before the scores; `None` for none.
        norm_scope: The channels that `qk_norm` normalizes together: each head with the same weights
            ("head") or with its own ("each-head"), or all heads of a projection ("projection").
        rotary: Rotary embeddings of queries and keys; `None` for none.
        window: Number of earlier tokens that a token attends to; `None` for all.
        chunk: Number of tokens in a chunk. Tokens attend only within their chunk; `None` for no
            chunks.
        temperature: Position-dependent factor applied to queries; `None` for none.
        softcap: Soft cap on the magnitude of scores; `None` for none.
        softmax: "vanilla", or a softmax with one more logit per head, which has no value vector:
            zero for "off-by-one", learned for "learnable".
        alibi: Factor applied to the slopes by which scores decrease with distance (ALiBi); `None`
            for none.
    """

    kind: str = "attention"
    heads: int
    kv_heads: int
    head_size: int
    dropout: float = 0.0
    scale: float | None = None
    output_gate: bool = False
    qkv_bias: bool = False
    qk_norm: NormPlan | None = None
    norm_scope: str = "head"
    rotary: RotaryPlan | None = None
    window: int | None = None
    chunk: int | None = None
    temperature: TemperaturePlan | None = None
    softcap: float | None = None
    softmax: str = "vanilla"
    alibi: float | None = None

    @property
    def query(self) -> int:
        """Total width of all query heads."""
        return self.heads * self.head_size

    @property
    def qkv(self) -> int:
        """Total width of all queries, gates, keys and values."""
        return ((1 + self.output_gate) * self.heads + 2 * self.kv_heads) * self.head_size

    def cached(self, tensor: int) -> tuple[int, int, int]:
        """Return the sizes of a token's cache entry in one layer on one process.

        These are the numbers of tensors, of vectors per tensor, and of channels per vector.

        Args:
            tensor: The tensor-parallel size.
        """
        return 2, max(1, self.kv_heads // tensor), self.head_size  # keys and values

    def pairs(self, length: int) -> int:
        """Count the query-key pairs within the chunks or the window, before causal masking.

        Args:
            length: Number of tokens in the sequence.
        """
        if self.chunk is not None:
            chunks, remainder = divmod(length, self.chunk)
            return chunks * self.chunk**2 + remainder**2
        if self.window is None or self.window >= length:
            return length * length
        return length * length - (length - self.window) ** 2  # only earlier tokens are limited

    @property
    def norm_sizes(self) -> tuple[int, int]:
        """Numbers of query channels and key channels for which `qk_norm` has weights."""
        if self.norm_scope == "head":
            return self.head_size, self.head_size
        return self.query, self.kv_heads * self.head_size


@dataclass(frozen=True, kw_only=True)
class LatentAttentionPlan(AttentionPlan):
    """Self-attention whose keys and values are computed from a short latent vector of each token.

    Every head has its own key and value, so `kv_heads` is `heads`. The attention core works on
    heads of `head_size` channels. Queries, keys and values with fewer channels are padded with
    zeros. `qk_norm` normalizes the latent vectors.

    Attributes:
        query_rank: Size of the latent vector of queries; `None` if they are computed directly.
        rank: Size of the latent vector of keys and values.
        nope_size: Number of channels in a query or key that never rotate.
        rope_size: Number of additional channels that rotate. All heads share the rotary key.
        value_size: Number of channels in a value.
        query_scale: Factor applied to queries. The core divides scores by sqrt(head_size), and this
            factor corrects them for the true size of a key and for YaRN.
    """

    kind: str = "latent_attention"
    query_rank: int | None
    rank: int
    nope_size: int
    rope_size: int
    value_size: int
    query_scale: float

    @property
    def key_size(self) -> int:
        """Number of channels of a query or key."""
        return self.nope_size + self.rope_size

    def cached(self, tensor: int) -> tuple[int, int, int]:
        """Return the sizes for one cached vector: the latent vector joined with the rotary key.

        Args:
            tensor: The tensor-parallel size. It has no effect, because every rank caches the
                whole vector.
        """
        return 1, 1, self.rank + self.rope_size


@dataclass(frozen=True)
class RetrievalPlan:
    """The sizes of Retro's chunks and of the neighbors retrieved for each chunk.

    Attributes:
        chunk: Number of tokens per chunk, m.
        neighbors: Number of neighbors per chunk, k.
        retrieved: Number of tokens per neighbor, r.
    """

    chunk: int
    neighbors: int
    retrieved: int

    @property
    def keys(self) -> int:
        """Number of tokens in all neighbors of a chunk."""
        return self.neighbors * self.retrieved


@dataclass(frozen=True, kw_only=True)
class RetrievalAttentionPlan(AttentionPlan):
    """Attention from chunks to their neighbors, or from neighbors to their chunk.

    Attributes:
        retrieval: The sizes of chunks and neighbors.
    """

    retrieval: RetrievalPlan


@dataclass(frozen=True, kw_only=True)
class MLPPlan(SublayerPlan):
    """A dense position-wise MLP.

    Attributes:
        inner: Width of the hidden layer between the two matrices.
        activation: Name of an activation in `kernels.activation`.
        gated: Whether the first matrix has two parts, gate and up.
        clamp: Largest value of the gate, and largest magnitude of the up part; `None` for no limit.
        offset: Number added to the up part.
        gate_factor: Factor applied to the gate.
        factor: Factor applied to the output.
    """

    kind: str = "dense"
    inner: int
    activation: str
    gated: bool = False
    clamp: float | None = None
    offset: float = 0.0
    gate_factor: float = 1.0
    factor: float = 1.0

    @property
    def up(self) -> int:
        """Number of outputs of the first matrix."""
        return self.inner * (2 if self.gated else 1)


@dataclass(frozen=True, kw_only=True)
class LayerPlan:
    """A layer: mixer, cross-attention and MLP, each with its normalizations.

    Attributes:
        mixer: Plan whose kind is in `block.MIXERS`; `None` in some layers of hybrid models.
        mlp: Plan whose kind is in `block.MLPS`; `None` in some layers of hybrid models.
        norm: The plan that all normalizations of sublayers share.
        norm_placement: Whether normalizations come "before" the sublayers, "after" them (on the
            output that is added to the residual stream), or "both".
        cross_attention: A decoder's attention to its encoder, between mixer and MLP; `None` for
            layers without one.
        retriever: The encoder of Retro's neighbors, which attends to the input of this layer's
            `cross_attention`. It is `None` in all layers but one.
        parallel: Whether mixer and MLP read the same input, and both outputs are added to it.
        shares_norm: Whether one normalization serves both sublayers of a parallel layer.
        residual_after_norm: Whether the residual is the normalized input, as in the original BERT.
        dropout: Dropout probability of each update of the residual stream.
    """

    mixer: MixerPlan | None
    mlp: SublayerPlan | None
    norm: NormPlan
    norm_placement: str = "before"
    cross_attention: AttentionPlan | None = None
    retriever: RetrieverPlan | None = None
    parallel: bool = False
    shares_norm: bool = False
    residual_after_norm: bool = False
    dropout: float = 0.0

    @property
    def norms_input(self) -> bool:
        """Whether the input of each sublayer is normalized."""
        return self.norm_placement != "after"

    @property
    def norms_output(self) -> bool:
        """Whether the output of each sublayer is normalized."""
        return self.norm_placement != "before"

    @property
    def sublayers(self) -> tuple[SublayerPlan, ...]:
        """The sublayers that add to the residual stream, in order."""
        parts = (self.mixer, self.cross_attention, self.mlp)
        return tuple(part for part in parts if part is not None)

    @property
    def hidden(self) -> int:
        """Width of the residual stream."""
        return self.sublayers[0].hidden

    @property
    def rotary(self) -> RotaryPlan | None:
        """The mixer's rotary embeddings; `None` if it has none."""
        return getattr(self.mixer, "rotary", None)

    @property
    def encoding(self) -> tuple[LayerPlan, ...]:
        """The layers of the retriever; empty if there is none."""
        return () if self.retriever is None else self.retriever.layers


def rotaries(layers: Sequence[LayerPlan]) -> tuple[RotaryPlan, ...]:
    """Return the distinct rotary plans of `layers`, in order of first use."""
    plans = dict.fromkeys(layer.rotary for layer in layers)
    return tuple(rotary for rotary in plans if rotary is not None)


@dataclass(frozen=True, kw_only=True)
class RetrieverPlan:
    """The encoder of Retro's neighbors, whose first layer attends to the neighbors' chunk.

    Attributes:
        layers: The encoder's layers.
        retrieval: The sizes of chunks and neighbors.
        layer_offset: Number of the model's layers outside the encoder. The encoder's layers are
            numbered after these.
    """

    layers: tuple[LayerPlan, ...]
    retrieval: RetrievalPlan
    layer_offset: int


@dataclass(frozen=True, kw_only=True)
class EmbeddingPlan:
    """The embedding before the first layer.

    Attributes:
        vocabulary: Number of rows in the word embedding table, padding included.
        hidden: Width of a vector.
        init: Distribution of the initial tables.
        positions: Number of rows in the table of learned positions; 0 if there is none.
        token_types: Number of rows in the table of token types; 0 if there is none.
        calls: Number of lookups per pass: an encoder and a decoder make one each, and so do Retro's
            sequences and their neighbors.
        ahead: Number of additional lookups in the last part of the model (`multi_token`).
        dropout: Dropout probability of the summed embeddings.
        scale: Factor applied to word embeddings; `None` leaves them unchanged.
        norm: Normalization of word embeddings; `None` for none.
    """

    vocabulary: int
    hidden: int
    init: InitPlan
    positions: int = 0
    token_types: int = 0
    calls: int = 1
    ahead: int = 0
    dropout: float = 0.0
    scale: float | None = None
    norm: NormPlan | None = None


@dataclass(frozen=True, kw_only=True)
class PositionBiasPlan:
    """T5's relative position bias, which depends on distance and is added to attention scores.

    Attributes:
        heads: Number of query heads.
        buckets: Number of distance buckets, each with a bias for every head.
        max_distance: Distance in tokens at and beyond which all distances share one bucket.
        positions: Length of the longest sequence, in tokens.
        init: Distribution of the initial table.
    """

    heads: int
    buckets: int
    max_distance: int
    positions: int
    init: InitPlan


@dataclass(frozen=True, kw_only=True)
class HeadPlan:
    """A module after the last layer.

    Attributes:
        kind: A key of `arithmetic.HEADS`.
        hidden: Width of the residual stream.
        init: Distribution of the initial weights.
    """

    kind: str
    hidden: int
    init: InitPlan


@dataclass(frozen=True, kw_only=True)
class OutputPlan(HeadPlan):
    """The output layer, which computes a score for every vocabulary entry.

    Attributes:
        vocabulary: Number of entries, padding included.
        tied: Whether the layer's matrix is the word embedding table.
        bias: Whether each entry has a bias.
        scale: Factor applied to the layer's input; `None` for no factor.
        softcap: Soft cap on the magnitude of scores; `None` for none.
    """

    kind: str = "output"
    vocabulary: int
    tied: bool
    bias: bool = False
    scale: float | None = None
    softcap: float | None = None


@dataclass(frozen=True, kw_only=True)
class MaskedTokenPlan(HeadPlan):
    """The layer between BERT's last transformer layer and its output layer.

    Attributes:
        norm: Normalization after the activation.
        tanh: Whether GELU uses the tanh approximation instead of the exact form.
    """

    kind: str = "masked_token"
    norm: NormPlan
    tanh: bool = False


@dataclass(frozen=True, kw_only=True)
class ClassifierPlan(HeadPlan):
    """A linear layer over one vector per sequence or, for the kind "score", per token.

    Attributes:
        outputs: Number of scores.
        bias: For the kind "score", whether each score has a bias. Other kinds always have biases.
        in_fp32: Whether to compute scores in fp32. In bf16, scores from 2 to 4 would be rounded to
            multiples of 1/64.
    """

    outputs: int
    bias: bool = True
    in_fp32: bool = False


@dataclass(frozen=True, kw_only=True)
class MultiTokenPlan(HeadPlan):
    """The layers that predict additional tokens, one for each depth.

    Attributes:
        layers: The transformer layer of each depth.
        norm: The plan of the normalizations of a depth's two inputs and its result.
        output: The model's output layer, which every depth also uses.
        layer_offset: Number of the model's other layers. The depths' layers are numbered after
            these.
    """

    kind: str = "multi_token"
    layers: tuple[LayerPlan, ...]
    norm: NormPlan
    output: OutputPlan
    layer_offset: int

    @property
    def depths(self) -> int:
        """Number of additional tokens that the model predicts."""
        return len(self.layers)


@dataclass(frozen=True, kw_only=True)
class ModelPlan:
    """The plan of a whole network, independent of the part that a process holds.

    Attributes:
        embedding: The embedding before the first layer.
        layers: All layers, an encoder's before its decoder's.
        final_norm: Normalization after the last layer (and after an encoder's last).
        heads: Modules after the final normalization.
        positions: Length of the longest sequence, in tokens.
        head_spec: Purpose of the heads.
        encoder_layers: Number of `layers` that form an encoder before a decoder; 0 for no encoder.
        position_bias: T5's relative position bias in each stack's self-attention; `None` for none.
        towers: Number of copies of this network, each with its own weights: 2 for a bi-encoder.
        teacher: The plan of the teacher in distillation; `None` for none.
    """

    embedding: EmbeddingPlan
    layers: tuple[LayerPlan, ...]
    final_norm: NormPlan
    heads: tuple[HeadPlan, ...]
    positions: int
    head_spec: HeadSpec = LANGUAGE_MODEL_HEAD
    encoder_layers: int = 0
    position_bias: PositionBiasPlan | None = None
    towers: int = 1
    teacher: ModelPlan | None = None

    @property
    def hidden(self) -> int:
        """Width of the residual stream."""
        return self.embedding.hidden

    @property
    def output(self) -> OutputPlan | None:
        """The language-model head, if there is one."""
        return next((head for head in self.heads if isinstance(head, OutputPlan)), None)

    @property
    def ties_words(self) -> bool:
        """Whether the output layer uses the word embedding table."""
        return self.output is not None and self.output.tied

    @property
    def attention(self) -> AttentionPlan:
        """The self-attention plan that all layers share.

        Raises:
            ValueError: The layers' mixers differ.
        """
        (mixer,) = {layer.mixer for layer in self.layers}
        assert isinstance(mixer, AttentionPlan), "the layers' mixer is not attention"
        return mixer

    @property
    def trained_context(self) -> int | None:
        """Length beyond which sequences use LongRoPE's long divisors; `None` without LongRoPE."""
        lengths = [r.long_rope.original for r in rotaries(self.layers) if r.long_rope is not None]
        return max(lengths, default=None)

    @property
    def dynamic_context(self) -> int | None:
        """Length beyond which dynamic NTK changes the rotation; `None` without dynamic NTK."""
        lengths = [r.dynamic.original for r in rotaries(self.layers) if r.dynamic is not None]
        return max(lengths, default=None)

    @property
    def head_size(self) -> int:
        """Number of channels per self-attention head in every layer; 0 without attention."""
        mixers = (layer.mixer for layer in self.layers)
        sizes = {mixer.head_size for mixer in mixers if isinstance(mixer, AttentionPlan)}
        assert len(sizes) < 2, "heads have several sizes"
        return max(sizes, default=0)

    def head(self, kind: str) -> HeadPlan | None:
        """Return the head of this kind, or `None` if there is none."""
        return next((head for head in self.heads if head.kind == kind), None)

    def stacks(self, part: ModelPart) -> list[range]:
        """Return the layers of each stack in a part of the model, as global indices."""
        first, last = part.layers.start, part.layers.stop
        edges = [0, self.encoder_layers, len(self.layers)]
        runs = [range(max(first, a), min(last, b)) for a, b in zip(edges, edges[1:], strict=False)]
        return [run for run in runs if run]

    def lengths(self, layer: int, encoder: int, decoder: int | None) -> tuple[int, int]:
        """Return the lengths of a layer's sequence and of the encoder output it attends to.

        Args:
            layer: Index of the layer in the model, from 0.
            encoder: Number of tokens in a sequence, or in an encoder's sequence.
            decoder: Number of tokens in a decoder's sequence, if there is one.
        """
        if decoder is None or layer < self.encoder_layers:
            return encoder, 0
        return decoder, encoder


def multi_token_plan(plan: ModelPlan) -> MultiTokenPlan | None:
    """Return the plan of multi-token prediction, or `None` if the model has none."""
    head = plan.head("multi_token")
    return head if isinstance(head, MultiTokenPlan) else None
