"""Networks as data: a record for each layer, for the embedding and for each head.

`plans.model_plan` makes a `ModelPlan` from the resolved configuration. Models are built from it;
parameters, FLOPs, memory and pipeline balance are counted from it. Every record is immutable,
printable and hashable, and consecutive layers may have records of different kinds. The tables
`block.MIXERS`, `block.MLPS` and `arithmetic.HEADS` name the class that implements each `kind` of
record.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron.config.stages import ModelPart
from megatron.kernels.rope import Yarn
from megatron.parallel.parameter import Init


@dataclass(frozen=True)
class HeadSpec:
    """The purpose of a model's heads, and how many sequences a sample has.

    Attributes:
        outputs: Number of scores that a task's head gives for each sequence. `None` means a
            language-model head, which scores every vocabulary entry for each token.
        sequences: Sequences per sample. A question paired with one of its answers is a sequence.
        compares: Whether the losses compare documents, and are no likelihoods of tokens.
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
# A bi-encoder's: no scores, but a vector for each of two sequences, a query and a context.
RETRIEVAL_HEAD = HeadSpec(outputs=0, sequences=2)


@dataclass(frozen=True)
class InitPlan:
    """The distribution of initial weights.

    Attributes:
        std: Standard deviation of the normal distribution.
        layers: Number of layers that add their outputs to the residual stream.
        xavier: Whether to use Xavier's uniform distribution instead.
    """

    std: float
    layers: int
    xavier: bool = False

    def weight(self, fan_in: int, fan_out: int, *, into_residual: bool = False) -> Init:
        """Return the initial distribution of a matrix.

        Args:
            fan_in: Inputs of the whole matrix.
            fan_out: Outputs of the whole matrix.
            into_residual: Whether the output is added to the residual stream. 2 x layers such
                outputs add up, so the standard deviation is divided by the square root of that
                number (GPT-2).
        """
        if self.xavier:
            return Init("uniform", math.sqrt(6 / (fan_in + fan_out)))
        return Init("normal", self.std / math.sqrt(2 * self.layers) if into_residual else self.std)


@dataclass(frozen=True)
class NormPlan:
    """A normalization.

    Attributes:
        kind: "LayerNorm" or "RMSNorm".
        epsilon: Number added to the variance.
        offset: Whether the stored weight is the distance from one (LayerNorm-1p).
    """

    kind: str
    epsilon: float
    offset: bool = False


@dataclass(frozen=True)
class RotaryPlan:
    """Rotary positions.

    Attributes:
        positions: Length of the longest sequence.
        channels: Number of channels of each head that rotate.
        base: Base of the rotary frequencies.
        interpolation: Number by which positions are divided; `None` keeps them.
        scaling: Factor by which the lowest frequencies are divided (Llama 3.1); `None` keeps them.
        yarn: The same by YaRN; `None` keeps them.
    """

    positions: int
    channels: int
    base: float
    interpolation: int | None = None
    scaling: float | None = None
    yarn: Yarn | None = None


@dataclass(frozen=True, kw_only=True)
class SublayerPlan:
    """A mixer or an MLP, which adds one update to the residual stream.

    Attributes:
        kind: A key of `block.MIXERS` or `block.MLPS`.
        hidden: Width of the residual stream.
        init: Distribution of the initial weights.
        bias: Whether linear layers have biases.
        defers_bias: Whether the last bias is left to the dropout kernel of the residual sum.
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
        head_size: Channels of a query, a key and a value.
        dropout: Dropout probability of the attention weights.
        scale: Factor applied to the scores; `None` means 1 / sqrt(head_size).
        qkv_bias: Whether queries, keys and values have biases even if other layers have none.
        qk_norm: Normalization of queries and keys before the scores; `None` for none.
        norms_heads: Whether `qk_norm` normalizes each head by itself, not all heads at once.
        rotary: Rotary positions of queries and keys; `None` for none.
        window: Number of earlier tokens that a token attends to; `None` for all.
    """

    kind: str = "attention"
    heads: int
    kv_heads: int
    head_size: int
    dropout: float = 0.0
    scale: float | None = None
    qkv_bias: bool = False
    qk_norm: NormPlan | None = None
    norms_heads: bool = True
    rotary: RotaryPlan | None = None
    window: int | None = None

    @property
    def query(self) -> int:
        """Width of all query heads side by side."""
        return self.heads * self.head_size

    @property
    def qkv(self) -> int:
        """Width of all queries, keys and values side by side."""
        return (self.heads + 2 * self.kv_heads) * self.head_size

    def pairs(self, length: int) -> int:
        """Count the pairs of tokens of a sequence that are no further apart than the window."""
        if self.window is None or self.window >= length:
            return length * length
        return length * length - (length - self.window) ** 2  # on the side of earlier tokens

    @property
    def norm_sizes(self) -> tuple[int, int]:
        """Channels that `qk_norm` normalizes together, of queries and of keys."""
        if self.norms_heads:
            return self.head_size, self.head_size
        return self.query, self.kv_heads * self.head_size


@dataclass(frozen=True, kw_only=True)
class LatentAttentionPlan(AttentionPlan):
    """Self-attention whose keys and values are computed from a short latent vector of each token.

    Every head has its own key and value, so `kv_heads` is `heads`. The core sees heads of
    `head_size` channels, filled up with zeros where a query and key, or a value, has fewer.
    `qk_norm` normalizes the latent vectors.

    Attributes:
        query_rank: Size of the latent vector of queries; `None` if they are computed directly.
        rank: Size of the latent vector of keys and values.
        still: Channels of a query or key that never rotate.
        turning: Further channels with rotary positions; all heads share those of the key.
        value_size: Channels of a value.
        query_scale: Factor applied to queries. The core divides scores by sqrt(head_size); with
            this factor they are what the true size of a key and YaRN ask for.
    """

    kind: str = "latent_attention"
    query_rank: int | None
    rank: int
    still: int
    turning: int
    value_size: int
    query_scale: float

    @property
    def key_size(self) -> int:
        """Channels of a query or key."""
        return self.still + self.turning


@dataclass(frozen=True)
class RetrievalPlan:
    """The chunks of a Retro's sequences, and the neighbors that are retrieved for each of them.

    Attributes:
        chunk: Tokens of a chunk, m.
        neighbors: Neighbors of a chunk, k.
        retrieved: Tokens of a neighbor, r.
    """

    chunk: int
    neighbors: int
    retrieved: int

    @property
    def keys(self) -> int:
        """Tokens of all neighbors of a chunk."""
        return self.neighbors * self.retrieved


@dataclass(frozen=True, kw_only=True)
class RetrievalAttentionPlan(AttentionPlan):
    """Attention of chunks to their neighbors, or of neighbors to their chunk.

    Attributes:
        retrieval: The sizes of chunks and neighbors.
    """

    retrieval: RetrievalPlan


@dataclass(frozen=True, kw_only=True)
class MLPPlan(SublayerPlan):
    """A dense position-wise MLP.

    Attributes:
        inner: Width between its two matrices.
        activation: Name of an activation in `kernels.activation`.
        gated: Whether the first matrix has two parts, gate and up.
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
class GatingPlan:
    """DeepSpeed's way to choose experts and to drop tokens, instead of Megatron Core's.

    Attributes:
        samples: Whether Gumbel noise decides in training: on a token's only expert (RSample), or on
            the second of two.
        selects_randomly: Whether a full expert that is a token's only one keeps random tokens,
            rather than the first.
    """

    samples: bool = False
    selects_randomly: bool = False


@dataclass(frozen=True, kw_only=True)
class RouterPlan:
    """The choice of experts for each token.

    Attributes:
        hidden: Width of the residual stream.
        init: Distribution of the initial weights.
        experts: Number of experts to choose from.
        chosen: Number of experts for each token.
        score: "softmax", "sigmoid" or "sqrtsoftplus" (the square root of softplus), the function
            that turns logits into scores.
        scores_all: Whether softmax runs over all experts, rather than only over the chosen ones.
        groups: Number of groups of experts; 1 if there are none.
        groups_chosen: Number of groups that a token's experts may come from.
        group_score: Best scores of a group that count; `None` for `chosen` / `groups_chosen`.
        scale: Factor applied to the scores of the chosen experts.
        bias_rate: Step of the biases of experts' scores in an iteration; `None` if there are none.
        balancing: Load-balancing losses ("aux_loss", "seq_aux_loss", "global_aux_loss")
            with their coefficients.
        sinkhorn: Whether tokens choose in training by scores that are balanced over experts.
        z_loss: Coefficient of the z-loss; `None` if there is none.
        jitter: Largest relative noise of the input in training; 0 for none.
        capacity: Multiple of an even share of the tokens beyond which an expert drops them; `None`
            keeps all.
        eval_capacity: The same in evaluation; `None` means `capacity`.
        min_capacity: Number of tokens that an expert keeps in any case.
        drops_last: Whether the last tokens are dropped, rather than those with the lowest scores.
        gating: DeepSpeed's gating, with softmax over all experts; `None` means Megatron Core's.
    """

    hidden: int
    init: InitPlan
    experts: int
    chosen: int
    score: str = "softmax"
    scores_all: bool = False
    groups: int = 1
    groups_chosen: int = 1
    group_score: int | None = None
    scale: float = 1.0
    bias_rate: float | None = None
    balancing: tuple[tuple[str, float], ...] = ()
    sinkhorn: bool = False
    z_loss: float | None = None
    jitter: float = 0.0
    capacity: float | None = None
    eval_capacity: float | None = None
    min_capacity: int = 0
    drops_last: bool = False
    gating: GatingPlan | None = None


@dataclass(frozen=True, kw_only=True)
class MixturePlan(SublayerPlan):
    """A mixture of experts: each token passes through a few of many MLPs.

    Attributes:
        router: The choice of experts for each token.
        expert: The record of one expert.
        shared: The record of the experts that every token passes through; `None` for none.
        gates_shared: Whether a learned gate multiplies the output of `shared`.
        weighs_shared: Whether each token weighs `shared` against its experts with two learned
            coefficients that add up to 1 (DeepSpeed's residual experts), instead of adding both.
    """

    kind: str = "mixture"
    router: RouterPlan
    expert: MLPPlan
    shared: MLPPlan | None = None
    gates_shared: bool = False
    weighs_shared: bool = False


@dataclass(frozen=True, kw_only=True)
class LayerPlan:
    """A transformer layer: mixer, cross-attention and MLP, each with a normalization before it.

    Attributes:
        mixer: Record whose kind is in `block.MIXERS`.
        mlp: Record whose kind is in `block.MLPS`.
        norm: Normalization before each sublayer.
        cross_attention: A decoder's attention to its encoder, between mixer and MLP; `None` for
            layers without one.
        retriever: The encoder of a Retro's neighbors, which reads the input of this layer's
            `cross_attention`; `None` except in one layer.
        residual_after_norm: Whether the residual is the normalized input, as in the original BERT.
        dropout: Dropout probability of each update of the residual stream.
    """

    mixer: MixerPlan
    mlp: SublayerPlan
    norm: NormPlan
    cross_attention: AttentionPlan | None = None
    retriever: RetrieverPlan | None = None
    residual_after_norm: bool = False
    dropout: float = 0.0

    @property
    def sublayers(self) -> tuple[SublayerPlan, ...]:
        """The sublayers that add to the residual stream, in order."""
        crossing = () if self.cross_attention is None else (self.cross_attention,)
        return (self.mixer, *crossing, self.mlp)

    @property
    def encoding(self) -> tuple[LayerPlan, ...]:
        """The layers of its retriever, if it has one."""
        return () if self.retriever is None else self.retriever.layers


@dataclass(frozen=True, kw_only=True)
class RetrieverPlan:
    """The encoder of a Retro's neighbors, whose first layer attends to the neighbors' chunk.

    Attributes:
        layers: Its layers.
        retrieval: The sizes of chunks and neighbors.
        numbered_after: Number of the model's other layers.
    """

    layers: tuple[LayerPlan, ...]
    retrieval: RetrievalPlan
    numbered_after: int


@dataclass(frozen=True, kw_only=True)
class EmbeddingPlan:
    """The embedding before the first layer.

    Attributes:
        vocabulary: Rows of the word embedding table, padding included.
        hidden: Width of a vector.
        init: Distribution of the initial tables.
        positions: Rows of the table of learned positions; 0 if there is none.
        token_types: Rows of the table of token types; 0 if there is none.
        calls: Number of lookups per pass: an encoder and a decoder make one each.
        dropout: Dropout probability of the sum.
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
    """T5's relative positions: every attention score gets a bias that depends on the distance.

    Attributes:
        heads: Number of query heads.
        buckets: Number of distance buckets, each with a bias for every head.
        longest: Distance from which all distances share one bucket.
        positions: Length of the longest sequence.
        init: Distribution of the initial table.
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
        kind: A key of `arithmetic.HEADS`.
        hidden: Width of the residual stream.
        init: Distribution of the initial weights.
    """

    kind: str
    hidden: int
    init: InitPlan


@dataclass(frozen=True, kw_only=True)
class OutputPlan(HeadPlan):
    """The output layer, which gives a score for every vocabulary entry.

    Attributes:
        vocabulary: Number of entries, padding included.
        tied: Whether its matrix is the word embedding table.
        bias: Whether each entry has a bias.
        scale: Factor applied to its input; `None` leaves the input as it is.
    """

    kind: str = "output"
    vocabulary: int
    tied: bool
    bias: bool = False
    scale: float | None = None


@dataclass(frozen=True, kw_only=True)
class MaskedTokenPlan(HeadPlan):
    """The layer between BERT's last transformer layer and its output layer.

    Attributes:
        norm: Normalization after the activation.
        tanh: Whether GeLU takes its tanh form instead of the exact one.
    """

    kind: str = "masked_token"
    norm: NormPlan
    tanh: bool = False


@dataclass(frozen=True, kw_only=True)
class ClassifierPlan(HeadPlan):
    """A linear layer over one vector of each sequence, or of each token ("score").

    Attributes:
        outputs: Number of scores.
        bias: Whether each score has a bias.
        in_fp32: Whether to multiply in fp32: rounded to 16 bits, scores from 0 to 5 would be 1/64
            apart.
    """

    outputs: int
    bias: bool = True
    in_fp32: bool = False


@dataclass(frozen=True, kw_only=True)
class ModelPlan:
    """The plan of a whole network, whichever part of it a process holds.

    Attributes:
        embedding: The embedding before the first layer.
        layers: All layers, an encoder's before its decoder's.
        final_norm: Normalization after the last layer (and after an encoder's last).
        heads: Modules after the final normalization.
        positions: Length of the longest sequence.
        head_spec: Purpose of the heads.
        encoder_layers: Number of `layers` that belong to an encoder with a decoder after it; 0 if
            there is a single stack.
        position_bias: Relative positions of each stack's self-attention; `None` for none.
        towers: Number of copies of all of this with weights of their own: 2 for a bi-encoder whose
            queries and contexts have a tower each.
        teacher: The plan of the network from which this one learns, and which computes beside it;
            `None` if there is none.
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
    def rotary(self) -> RotaryPlan | None:
        """The rotary positions, which all layers that have them share; `None` if none does."""
        every = {getattr(layer.mixer, "rotary", None) for layer in self.layers} - {None}
        assert len(every) <= 1, "layers rotate at different speeds"
        return next(iter(every), None)

    @property
    def attention(self) -> AttentionPlan:
        """The self-attention record of all layers, for code that needs them to be equal."""
        found, *others = {layer.mixer for layer in self.layers}
        assert not others, "layers attend in different ways"
        assert isinstance(found, AttentionPlan), "the layers' mixer is not attention"
        return found

    @property
    def head_size(self) -> int:
        """Channels of a query, key or value of self-attention, the same in all layers."""
        mixers = (layer.mixer for layer in self.layers)
        (size,) = {mixer.head_size for mixer in mixers if isinstance(mixer, AttentionPlan)}
        return size

    def head(self, kind: str) -> HeadPlan | None:
        """Return the head of a kind, or `None` if there is none."""
        return next((head for head in self.heads if head.kind == kind), None)

    def stacks(self, part: ModelPart) -> list[range]:
        """Return the layers of each stack that a part of the model holds, as global indices."""
        first, last = part.layers.start, part.layers.stop
        edges = [0, self.encoder_layers, len(self.layers)]
        runs = [range(max(first, a), min(last, b)) for a, b in zip(edges, edges[1:], strict=False)]
        return [run for run in runs if run]

    def lengths(self, layer: int, encoder: int, decoder: int | None) -> tuple[int, int]:
        """Return the sequence length of a layer, and that of the encoder output it attends to.

        Args:
            layer: Index of the layer in the model, from 0.
            encoder: Tokens of a sequence, or of an encoder's sequence.
            decoder: Tokens of a decoder's sequence, if there is one.
        """
        if decoder is None or layer < self.encoder_layers:
            return encoder, 0
        return decoder, encoder
