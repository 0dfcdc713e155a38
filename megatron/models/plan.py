"""Networks as data: one record per layer, and records of what stands before and after the layers.

A family's module (`gpt`, `bert`, `t5`) makes a `ModelPlan` from the resolved configuration. Models
are built from it; parameters, FLOPs, memory and pipeline balance are counted from it. Every
record is immutable, printable and hashable, and consecutive layers may have records of different
kinds. The names of classes that carry out a record's `kind` are in `block.MIXERS`, `block.MLPS` and
`arithmetic.HEADS`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from megatron.config.model import ModelConfig
from megatron.config.stages import ModelPart
from megatron.parallel.parameter import Init


@dataclass(frozen=True)
class HeadSpec:
    """The purpose of a model's heads, and how many sequences a sample has.

    Attributes:
        outputs: scores that a task's head gives for each sequence; `None` stands for a
            language-model head, which scores every vocabulary entry for each token.
        sequences: sequences of a sample: a question with each of its answers is one.
    """

    outputs: int | None = None
    sequences: int = 1

    @property
    def is_language_model(self) -> bool:
        """Whether each token has a score for every vocabulary entry."""
        return self.outputs is None


LANGUAGE_MODEL_HEAD = HeadSpec()


class Work(NamedTuple):
    """Floating-point operations of forward and backward, for one sample.

    Attributes:
        products: those of matrix products with weights.
        scores: those of attention scores, and of the sums that they weigh.
    """

    products: int
    scores: int = 0


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """One process's part of a micro-batch, in the numbers that its memory depends on.

    Attributes:
        sequences: in the micro-batch.
        length: tokens of a sequence that the layer runs over.
        encoder_length: tokens of the encoder's sequence that a decoder's layer reads.
        tensor: tensor-parallel ranks.
        sequence: ranks that share a sequence outside split layers: 1 without sequence parallelism.
        context: context-parallel ranks.
        width: bytes of an activation.
        keeps_scores: attention keeps every score for backward.
        losses: micro-batches whose loss waits for its backward.
        chunked_loss: the loss never holds all logits.
    """

    sequences: int
    length: int
    encoder_length: int = 0
    tensor: int = 1
    sequence: int = 1
    context: int = 1
    width: int = 4
    keeps_scores: bool = False
    losses: int = 1
    chunked_loss: bool = False

    @property
    def tokens(self) -> int:
        """Tokens on this process."""
        return self.sequences * self.length // self.context

    @property
    def encoder_tokens(self) -> int:
        """Tokens of the encoder on this process."""
        return self.sequences * self.encoder_length // self.context


@dataclass(frozen=True)
class InitPlan:
    """The distribution of initial weights.

    Attributes:
        std: standard deviation of a normal distribution.
        xavier: use Xavier's uniform distribution instead.
        layers: how many layers add their outputs to the residual stream.
    """

    std: float
    layers: int
    xavier: bool = False

    def weight(self, fan_in: int, fan_out: int, *, into_residual: bool = False) -> Init:
        """Return the initial distribution of a matrix.

        Args:
            fan_in: inputs of the whole matrix.
            fan_out: outputs of the whole matrix.
            into_residual: its output is added to the residual stream. 2 x layers such outputs add
                up, so their standard deviation is divided by the root of that (GPT-2).
        """
        if self.xavier:
            return Init("uniform", math.sqrt(6 / (fan_in + fan_out)))
        return Init("normal", self.std / math.sqrt(2 * self.layers) if into_residual else self.std)


@dataclass(frozen=True)
class NormPlan:
    """A normalization.

    Attributes:
        kind: a name of `norm.NORMS`.
        epsilon: added to the variance.
        offset: the stored weight is the distance from one (LayerNorm-1p).
    """

    kind: str
    epsilon: float
    offset: bool = False


@dataclass(frozen=True)
class RotaryPlan:
    """Rotary positions.

    Attributes:
        positions: longest sequence.
        channels: of each head that rotate.
        base: of the frequencies.
        interpolation: positions are divided by it.
        scaling: how much the lowest frequencies slow down (Llama 3.1); `None` leaves them.
    """

    positions: int
    channels: int
    base: float
    interpolation: int | None = None
    scaling: float | None = None


@dataclass(frozen=True, kw_only=True)
class SublayerPlan:
    """A mixer or an MLP: what adds one update to the residual stream.

    Attributes:
        kind: a name of `block.MIXERS` or `block.MLPS`.
        hidden: width of the residual stream.
        init: distribution of the initial weights.
        bias: linear layers have biases.
        defers_bias: the last bias is left to the residual sum, whose dropout kernel adds it.
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
        causal: without a mask, tokens see those before them only.
    """

    causal: bool = True


@dataclass(frozen=True, kw_only=True)
class AttentionPlan(MixerPlan):
    """Self-attention with any number of key-value heads, or attention to an encoder's output.

    Attributes:
        heads: query heads.
        kv_heads: key-value heads.
        head_size: channels of a query, a key and a value.
        dropout: on attention weights.
        scale: factor of the scores; `None` stands for 1 / sqrt(head_size).
        qkv_bias: queries, keys and values have biases, even if other layers have none.
        head_norm: of each head's query and key, before they meet.
        rotary: how queries and keys rotate.
    """

    kind: str = "attention"
    heads: int
    kv_heads: int
    head_size: int
    dropout: float = 0.0
    scale: float | None = None
    qkv_bias: bool = False
    head_norm: NormPlan | None = None
    rotary: RotaryPlan | None = None

    @property
    def query(self) -> int:
        """Width of all query heads side by side."""
        return self.heads * self.head_size

    @property
    def qkv(self) -> int:
        """Width of all queries, keys and values side by side."""
        return (self.heads + 2 * self.kv_heads) * self.head_size


@dataclass(frozen=True, kw_only=True)
class MLPPlan(SublayerPlan):
    """A dense position-wise MLP.

    Attributes:
        inner: width between its two matrices.
        activation: a name of `kernels.activation`.
        gated: the first matrix has two parts, gate and up.
    """

    kind: str = "dense"
    inner: int
    activation: str
    gated: bool = False

    @property
    def up(self) -> int:
        """Outputs of the first matrix."""
        return self.inner * (2 if self.gated else 1)


@dataclass(frozen=True, kw_only=True)
class LayerPlan:
    """A transformer layer: mixer, attention to an encoder, MLP, each behind a normalization.

    Attributes:
        mixer: record of a kind in `block.MIXERS`.
        mlp: record of a kind in `block.MLPS`.
        norm: in front of each of them.
        cross_attention: of a decoder to its encoder, between the two.
        residual_after_norm: the residual is the normalized input, as in the original BERT.
        dropout: on each update of the residual stream.
    """

    mixer: MixerPlan
    mlp: SublayerPlan
    norm: NormPlan
    cross_attention: AttentionPlan | None = None
    residual_after_norm: bool = False
    dropout: float = 0.0

    @property
    def sublayers(self) -> tuple[SublayerPlan, ...]:
        """What adds to the residual stream, in order."""
        crossing = () if self.cross_attention is None else (self.cross_attention,)
        return (self.mixer, *crossing, self.mlp)


@dataclass(frozen=True, kw_only=True)
class EmbeddingPlan:
    """The embedding in front of the first layer.

    Attributes:
        vocabulary: rows of the word table, padding included.
        hidden: width of a vector.
        init: distribution of the initial tables.
        positions: rows of a table of learned positions; 0 if there is none.
        token_types: rows of a table of token types; 0 if there is none.
        calls: per pass; an encoder and a decoder make one each.
        dropout: on the sum.
    """

    vocabulary: int
    hidden: int
    init: InitPlan
    positions: int = 0
    token_types: int = 0
    calls: int = 1
    dropout: float = 0.0


@dataclass(frozen=True, kw_only=True)
class PositionBiasPlan:
    """T5's relative positions: a bias of every attention score, by distance.

    Attributes:
        heads: query heads.
        buckets: of distances, each with a bias for each head.
        longest: from here on all distances share one bucket.
        positions: longest sequence.
        init: distribution of the initial table.
    """

    heads: int
    buckets: int
    longest: int
    positions: int
    init: InitPlan


@dataclass(frozen=True, kw_only=True)
class HeadPlan:
    """A module after the last layer.

    Attributes:
        kind: a name of `arithmetic.HEADS`.
        hidden: width of the residual stream.
        init: distribution of the initial weights.
    """

    kind: str
    hidden: int
    init: InitPlan


@dataclass(frozen=True, kw_only=True)
class OutputPlan(HeadPlan):
    """A score for every vocabulary entry.

    Attributes:
        vocabulary: entries, padding included.
        tied: its matrix is the word table.
        bias: each entry has one.
        scale: factor of what it reads; `None` leaves it.
    """

    kind: str = "output"
    vocabulary: int
    tied: bool
    bias: bool = False
    scale: float | None = None


@dataclass(frozen=True, kw_only=True)
class MaskedTokenPlan(HeadPlan):
    """The layer between BERT's last one and the scores of the vocabulary.

    Attributes:
        norm: after the activation.
        tanh: GeLU in its tanh form instead of the exact one.
    """

    kind: str = "masked_token"
    norm: NormPlan
    tanh: bool = False


@dataclass(frozen=True, kw_only=True)
class ClassifierPlan(HeadPlan):
    """A linear layer over one vector of each sequence.

    Attributes:
        outputs: scores.
        in_fp32: multiply in fp32: rounded to 16 bits, scores from 0 to 5 would be 1/64 apart.
    """

    outputs: int
    in_fp32: bool = False


@dataclass(frozen=True, kw_only=True)
class ModelPlan:
    """A whole network, whatever part of it a process holds.

    Attributes:
        embedding: in front of the first layer.
        layers: the encoder's first, then its decoder's.
        final_norm: after the last layer (and after an encoder's last).
        heads: modules after that.
        head_spec: their purpose.
        positions: longest sequence.
        encoder_layers: how many of `layers` are the encoder beneath a decoder; 0 if there is a
            single stack.
        position_bias: of each stack's self-attention.
    """

    embedding: EmbeddingPlan
    layers: tuple[LayerPlan, ...]
    final_norm: NormPlan
    heads: tuple[HeadPlan, ...]
    positions: int
    head_spec: HeadSpec = LANGUAGE_MODEL_HEAD
    encoder_layers: int = 0
    position_bias: PositionBiasPlan | None = None

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
        """Whether the output uses the word table."""
        return self.output is not None and self.output.tied

    @property
    def rotary(self) -> RotaryPlan | None:
        """The rotary positions of the layers that have some, which are the same in all of them."""
        every = {getattr(layer.mixer, "rotary", None) for layer in self.layers} - {None}
        assert len(every) <= 1, "layers rotate at different speeds"
        return next(iter(every), None)

    @property
    def attention(self) -> AttentionPlan:
        """The self-attention that all layers share, for code that needs them alike."""
        (found,) = {layer.mixer for layer in self.layers}
        assert isinstance(found, AttentionPlan), "layers mix tokens in another way"
        return found

    def head(self, kind: str) -> HeadPlan | None:
        """Return the head of a kind, or `None` if there is none."""
        return next((head for head in self.heads if head.kind == kind), None)

    def stacks(self, part: ModelPart) -> list[range]:
        """Return the layers of each stack that a part holds, by their number in the model."""
        first, last = part.layers.start, part.layers.stop
        edges = [0, self.encoder_layers, len(self.layers)]
        runs = [range(max(first, a), min(last, b)) for a, b in zip(edges, edges[1:], strict=False)]
        return [run for run in runs if run]

    def lengths(self, layer: int, encoder: int, decoder: int | None) -> tuple[int, int]:
        """Return the tokens that a layer runs over, and those of an encoder that it reads.

        Args:
            layer: its number, from 0.
            encoder: tokens of a sequence, or of the encoder's.
            decoder: tokens of a decoder's sequence, if there is one.
        """
        if decoder is None or layer < self.encoder_layers:
            return encoder, 0
        return decoder, encoder


def layer_plan(model: ModelConfig, *, causal: bool, crosses: bool = False) -> LayerPlan:
    """Return the record of a layer as the flags describe it; flags make all layers alike.

    Args:
        model: network flags, resolved.
        causal: without a mask, tokens see those before them only.
        crosses: it is a decoder's, which attends to an encoder's output too.
    """
    heads, head_size = model.num_attention_heads, model.kv_channels
    init, norm = init_plan(model), norm_plan(model)
    rotary = None
    if model.position_embedding_type == "rope":
        rotary = RotaryPlan(
            positions=model.max_position_embeddings,
            channels=int(head_size * model.rotary_percent),
            base=model.rotary_base,
            interpolation=model.rotary_seq_len_interpolation_factor,
            scaling=model.rope_scaling_factor if model.use_rope_scaling else None,
        )
    attention = AttentionPlan(
        hidden=model.hidden_size,
        init=init,
        bias=model.add_bias_linear,
        defers_bias=model.hidden_dropout > 0,
        causal=causal,
        heads=heads,
        kv_heads=model.kv_heads,
        head_size=head_size,
        dropout=model.attention_dropout,
        scale=model.softmax_scale,
        qkv_bias=model.add_qkv_bias,
        head_norm=norm if model.qk_layernorm else None,
        rotary=rotary,
    )
    crossing = replace(
        attention,
        kind="cross_attention",
        causal=False,
        kv_heads=heads,
        qkv_bias=False,
        head_norm=None,
        rotary=None,
    )
    mlp = MLPPlan(
        hidden=attention.hidden,
        init=init,
        bias=model.add_bias_linear,
        defers_bias=attention.defers_bias,
        inner=model.ffn_hidden_size,
        activation=model.activation,
        gated=model.is_gated,
    )
    return LayerPlan(
        mixer=attention,
        mlp=mlp,
        norm=norm,
        cross_attention=crossing if crosses else None,
        residual_after_norm=model.apply_residual_connection_post_layernorm,
        dropout=model.hidden_dropout,
    )


def init_plan(model: ModelConfig) -> InitPlan:
    """Return the distribution of initial weights."""
    return InitPlan(model.init_method_std, model.num_layers, model.init_method_xavier_uniform)


def norm_plan(model: ModelConfig) -> NormPlan:
    """Return the record that all normalizations share."""
    return NormPlan(model.normalization, model.norm_epsilon, model.apply_layernorm_1p)


def embedding_plan(
    model: ModelConfig, vocabulary: int, *, token_types: int = 0, calls: int = 1
) -> EmbeddingPlan:
    """Return the record of the embedding.

    Args:
        model: network flags, resolved.
        vocabulary: entries, padding included.
        token_types: of a sample.
        calls: in one pass.
    """
    learned = model.position_embedding_type == "learned_absolute"
    return EmbeddingPlan(
        vocabulary=vocabulary,
        hidden=model.hidden_size,
        init=init_plan(model),
        positions=model.max_position_embeddings if learned else 0,
        token_types=token_types,
        calls=calls,
        dropout=model.hidden_dropout,
    )


def output_plan(model: ModelConfig, vocabulary: int, *, bias: bool = False) -> OutputPlan:
    """Return the record of the language-model head.

    Args:
        model: network flags, resolved.
        vocabulary: entries, padding included.
        bias: each entry has one.
    """
    hidden = model.hidden_size
    return OutputPlan(
        hidden=hidden,
        init=init_plan(model),
        vocabulary=vocabulary,
        tied=not model.untie_embeddings_and_output_weights,
        bias=bias,
        scale=hidden**-0.5 if model.scale_decoder_outputs else None,
    )
