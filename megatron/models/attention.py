"""Self-attention, a decoder's cross-attention to its encoder, and the core that both share."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron.kernels.attention import AttentionOptions
from megatron.kernels.paged_attention import LatentHeads
from megatron.kernels.rope import Rotation
from megatron.kernels.segments import Mask, Segments
from megatron.models.costs import Flops, MicroBatch, WeightSplit
from megatron.models.norm import (
    Norm,
    Stream,
    new_query_norm,
    normalize_projections,
    outer_amaxes,
    output_projection,
)
from megatron.models.plan import AttentionPlan
from megatron.parallel.build import BuildContext
from megatron.parallel.collectives import gather_to
from megatron.parallel.context.split import local_positions, split_sequence
from megatron.parallel.layers import Linear, Projections
from megatron.parallel.parameter import Init
from megatron.parallel.random import split_region

# A function that takes tokens [s, b, ...] and the states [b, ...] of the sequences that they
# continue, and returns results [s, b, ...] and new states. `None` instead of states begins new
# sequences.
Recurrence = Callable[[Tensor, tuple[Tensor, ...] | None], tuple[Tensor, tuple[Tensor, ...]]]


class KeyValueCache(Protocol):
    """The keys, values and states of earlier tokens, passed to a model together with new tokens.

    A pass with such a cache, in inference, has a single sample of s tokens. The tokens may belong
    to any number of sequences, each at its own position in its own sequence.
    """

    @property
    def positions(self) -> Tensor:
        """Position of each token in its sequence, int64 [s]."""
        ...

    @property
    def lengths(self) -> Tensor:
        """Sequence length from which each token's rotation is computed (`RotaryTable`), int64 [s].

        With dynamic NTK, this is the length that the sequence had when the token was new. Otherwise
        it is the current length of the sequence.
        """
        ...

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        """Store the new keys and values, then attend from each token to itself and earlier tokens.

        Args:
            query: The queries of the new tokens, [s, 1, n/t, d].
            key: Their keys, [s, 1, g/t (at least 1), d].
            value: Their values, in the shape of `key`.
            options: The layer number, and how scores become attention weights.

        Returns:
            The attention output, [s, 1, n d / t].
        """
        ...

    def attend_latent(
        self, query: Tensor, latent: Tensor, heads: LatentHeads, options: AttentionOptions
    ) -> Tensor:
        """Store the new latent vectors, then attend as `attend` does.

        Args:
            query: The queries of the new tokens, [s, 1, n/t, d].
            latent: The vectors from which keys and values are computed, [s, 1, rank + rope].
            heads: The layer that computes keys and values from these vectors.
            options: The layer number, the scale of the scores, and how scores become weights.

        Returns:
            The attention output, [s, 1, n d / t].
        """
        ...

    def recur(self, layer_number: int, x: Tensor, recurrence: Recurrence) -> Tensor:
        """Continue each token's sequence from its states in a layer, and keep the new states.

        Args:
            layer_number: Index of the layer in the model, from 1.
            x: Input of the recurrence, [s, 1, c].
            recurrence: The recurrence. The layer's `RecurrentPlan` describes its states.

        Returns:
            The results of the recurrence, [s, 1, ...].
        """
        ...


class AttentionCore(nn.Module):
    """Attention of this rank's heads, with dropout. It has no weights.

    Args:
        plan: The plan of the attention layer that contains the core.
        context: Layout, device, kernels and number formats.
        site: Name that gives this core its own dropout mask if the layer has two cores.
    """

    def __init__(self, plan: AttentionPlan, context: BuildContext, *, site: str) -> None:
        """Store the attention function, and compute ALiBi's slopes if the plan has them."""
        super().__init__()
        self.axis, self.context_ranks = context.layout.tensor, context.layout.context.size
        self.attend = context.kernels.attention.function
        self.plan = plan
        self.layer_number = context.layer
        self.recompute = "core_attn" in context.recomputed
        self.site = site
        self.offloading = context.offloading("core_attn")
        self.slopes = None
        if plan.alibi is not None:
            slopes = torch.tensor(alibi_slopes(plan.heads), device=context.device) * plan.alibi
            self.slopes = slopes.chunk(self.axis.size)[self.axis.rank]

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Mask | None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attend from each query to the keys.

        Args:
            query: The queries, [s, b, n/t, d].
            key: The keys, [keys, b, g/t (at least 1), d].
            value: The values, in the shape of `key`.
            mask: Which keys a query may attend to (`AttentionOptions`).
            sinks: The logits of this rank's attention sinks, [n/t]; `None` without sinks.

        Returns:
            The attention output, [s, b, (n/t) d].
        """
        if self.plan.chunk is not None:
            mask = self._in_chunks(query, mask, self.plan.chunk)
        inputs = (query, key, value, mask, sinks)
        if self.recompute and torch.is_grad_enabled():
            out: Tensor = checkpoint(self._attend, *inputs, use_reentrant=False)
            return out
        with self.offloading():
            return self._attend(*inputs)

    def options(self, mask: Mask | None, sinks: Tensor | None = None) -> AttentionOptions:
        """Return the core's attention options with this mask and these sinks."""
        plan, dropout = self.plan, self.plan.dropout if self.training else 0.0
        return AttentionOptions(
            mask,
            plan.causal,
            dropout,
            self.layer_number,
            plan.scale,
            plan.window,
            plan.softcap,
            sinks,
            self.slopes,
            plan.chunk,
        )

    def _in_chunks(self, query: Tensor, mask: Mask | None, chunk: int) -> Mask | None:
        """Return a mask that restricts attention to chunks, or `mask` if one chunk is enough."""
        length, samples = len(query) * self.context_ranks, query.shape[1]
        if length <= chunk:
            return mask
        if mask is None:
            ends = torch.arange(samples + 1, dtype=torch.int32, device=query.device) * length
            mask = Segments(ends, (samples, length))
        assert isinstance(mask, Segments), "GPT's mask is causal, within documents if there are any"
        return mask.within(chunk)

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Mask | None,
        sinks: Tensor | None,
    ) -> Tensor:
        options = self.options(mask, sinks)
        if options.dropout == 0:
            out = self.attend(query, key, value, options)
        else:
            with split_region(self.axis, query.device, self.layer_number, self.site):
                out = self.attend(query, key, value, options)
        # Kernels that pack samples into one row return a transposed view of [b, s, n d], which
        # cuBLAS multiplies 20 times slower (measured on an H200, b = 2).
        return out.contiguous()


class SelfAttention(nn.Module):
    """Self-attention: the query, key and value projections, the core, and the output projection.

    With an output gate, the query projection also computes a gate for each query head. The result
    of a head is multiplied by the sigmoid of its gate. Rows of the QKV weight are ordered by group:
    the group's query heads, then the gates of these heads if there are any, then its key and its
    value. A tensor rank holds whole groups, so its rows are contiguous. If there are fewer groups
    than ranks, each rank still holds an equal share of the rows. It then gathers the product from
    all ranks and takes its own query heads, with their gates, and their group's key and value.

    Args:
        plan: The plan of this layer.
        context: Layout, device, kernels and number formats.
    """

    def __init__(self, plan: AttentionPlan, context: BuildContext) -> None:
        """Allocate the projections and the normalizations of queries and keys."""
        super().__init__()
        self.plan = plan
        self.axis, self.context_axis = context.layout.tensor, context.layout.context
        self.rotate = context.kernels.rotate
        self.split_rotate = context.kernels.split_rotate
        names, key_value = ("query", "key", "value"), (plan.kv_heads * plan.head_size,) * 2
        projections = adapted_as = Projections(names, (plan.query, *key_value), plan.kv_heads)
        if plan.output_gate:
            adapted_as = Projections(names, (2 * plan.query, *key_value), plan.kv_heads)
            names_with_gate = ("query", "gate", "key", "value")
            widths = (plan.query, plan.query, *key_value)
            projections = Projections(names_with_gate, widths, plan.kv_heads)
        self.qkv = _projection(
            plan, projections, context, bias=plan.bias or plan.qkv_bias, adapted_as=adapted_as
        )
        self.core = AttentionCore(plan, context, site="attention")
        self.output = output_projection(plan, plan.query, context)
        self.fused_amaxes = outer_amaxes(self.qkv, self.output)
        self.query_norm = self.key_norm = None
        if plan.qk_norm is not None:
            query_size, key_size = plan.norm_sizes
            self.query_norm = new_query_norm(plan.qk_norm, query_size, context)
            self.key_norm = new_query_norm(plan.qk_norm, key_size, context)
        self.sinks = new_sinks(plan, context)
        self.offloading_input = context.offloading("qkv_linear")
        self.offloading_output = context.offloading("attn_proj")

    @staticmethod
    def matrices(plan: AttentionPlan, split: WeightSplit) -> list[tuple[int, int]]:
        """Return (outputs, inputs) of each weight matrix on one process."""
        tensor = split.tensor
        return [(plan.qkv // tensor, plan.hidden), (plan.hidden, plan.query // tensor)]

    @staticmethod
    def vectors(plan: AttentionPlan, split: WeightSplit) -> int:
        """Count the parameters of biases, normalizations and sinks on one process."""
        count = plan.qkv // split.tensor if plan.bias or plan.qkv_bias else 0
        count += plan.hidden if plan.bias else 0
        count += count_sinks(plan, split)
        if plan.qk_norm is not None:
            count += sum(Norm.parameter_count(plan.qk_norm, size) for size in plan.norm_sizes)
        return count

    @staticmethod
    def flops(plan: AttentionPlan, length: int, encoder_length: int) -> Flops:
        """Count the FLOPs. A causal mask halves the scores; a window reduces them further."""
        products = 6 * length * plan.hidden * (plan.qkv + plan.query)
        return Flops(products, (6 if plan.causal else 12) * plan.pairs(length) * plan.query)

    @staticmethod
    def activation_bytes(plan: AttentionPlan, batch: MicroBatch) -> int:
        """Count the bytes of queries, keys, values and outputs, and of the scores if they are kept.

        With an output gate, its sigmoid and the product with the output are also kept.
        """
        elements = ((3 if plan.output_gate else 1) * plan.query + plan.qkv) // batch.tensor
        saved = batch.width * batch.tokens * elements
        return saved + score_bytes(plan, batch, batch.length)

    def forward(
        self,
        x: Tensor,
        mask: Mask | None,
        rotation: Rotation | None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        """Attend from each token to the tokens of its sequence, or to the cache.

        Args:
            x: [s, b, h]; [s/t, b, h] with sequence parallelism.
            mask: Which keys a query may attend to (`AttentionOptions`).
            rotation: Rotation of queries and keys, if the model has rotary embeddings.
            cache: Keys and values of earlier tokens, in inference.

        Returns:
            The output in the shape of x; the caller adds `bias_to_add`.
        """
        plan, gate = self.plan, None
        rotation = None if plan.rotary is None else rotation
        rotates_later = plan.output_gate or plan.qk_norm is not None
        with self.offloading_input():
            qkv = self.qkv(x)
        query, key, value = self._split_heads(qkv, None if rotates_later else rotation)
        if plan.output_gate:
            pairs = query.unflatten(2, (key.shape[2], 2, -1))  # [s, b, g/t, 2, n/g, d]
            query, gate = pairs[:, :, :, 0].flatten(2, 3), pairs[:, :, :, 1].flatten(2)
        if self.query_norm is not None and self.key_norm is not None:
            if plan.norm_scope == "head":
                _, query = self.query_norm(Stream(query))
                _, key = self.key_norm(Stream(key))
            else:
                norms = self.query_norm, self.key_norm
                by_head = plan.norm_scope == "each-head"
                query, key = normalize_projections((query, key), norms, self.axis, by_head=by_head)
        if rotates_later and rotation is not None:
            query, key = self.rotate(query, rotation), self.rotate(key, rotation)
        if plan.temperature is not None:
            factor = plan.temperature.factor(self._positions(query, mask, cache))
            query = (query * factor[..., None, None]).to(query.dtype)
        if cache is not None:
            context = cache.attend(query, key, value, self.core.options(None, self.sinks))
        else:
            context = self.core(query, key, value, mask, self.sinks)
        if gate is not None:
            context = context * gate.sigmoid()
        with self.offloading_output():
            return self.output(context)

    @property
    def bias_to_add(self) -> Tensor | None:
        """Bias [h] to be added in the residual sum; `None` if there is none."""
        return self.output.bias_to_add

    def _positions(self, query: Tensor, mask: Mask | None, cache: KeyValueCache | None) -> Tensor:
        """Return the position of each query in its document, int64 [s, b or 1]."""
        if cache is not None:
            return cache.positions.unsqueeze(1)
        if isinstance(mask, Segments):
            return split_sequence(mask.token_positions.t(), self.context_axis, dim=0)
        length = len(query) * self.context_axis.size
        return local_positions(length, self.context_axis, query.device).unsqueeze(1)

    def _split_heads(self, qkv: Tensor, rotation: Rotation | None) -> tuple[Tensor, Tensor, Tensor]:
        """Split the QKV projection into this rank's heads, and rotate queries and keys.

        Args:
            qkv: [s, b, (n + 2g) d / t]; [s, b, (2n + 2g) d / t] with an output gate.
            rotation: Rotation of queries and keys; `None` for none.

        Returns:
            Queries [s, b, n/t, d], keys and values [s, b, g/t (at least 1), d]. With an output
            gate, each group's queries are followed by their gates, [s, b, 2 n/t, d].
        """
        ranks, groups, query_parts = self.axis.size, self.plan.kv_heads, 1 + self.plan.output_gate
        if groups >= ranks:
            return self.split_rotate(
                qkv,
                groups // ranks,
                self.plan.head_size,
                rotation,
                self.qkv.products.fused_amaxes.backward,
                contiguous=self.query_norm is not None,
            )
        per_group = query_parts * self.plan.heads // groups + 2
        by_group = gather_to(qkv, self.axis).unflatten(2, (groups, per_group, -1))
        ranks_per_group = ranks // groups
        group = by_group[:, :, self.axis.rank // ranks_per_group]  # [s, b, n/g (or twice) + 2, d]
        queries = group[:, :, :-2].unflatten(2, (query_parts, -1))
        query = queries.chunk(ranks_per_group, dim=3)[self.axis.rank % ranks_per_group]
        query = query.flatten(2, 3)
        key, value = group[:, :, -2:-1], group[:, :, -1:]
        if rotation is None:
            return query, key, value
        return self.rotate(query, rotation), self.rotate(key, rotation), value


class EncoderOutput(NamedTuple):
    """The encoder output that a decoder attends to; e is the number of encoder tokens.

    Attributes:
        states: Normalized hidden states [e, b, h]; [e/t, b, h] with sequence parallelism.
        mask: bool [b, 1, 1, e], True for a token and False for padding.
    """

    states: Tensor
    mask: Tensor


class CrossAttention(nn.Module):
    """Attention with queries from the decoder's tokens, and keys and values from the encoder's.

    Rows of the key-value weight are ordered by head: the head's key, then its value. A tensor rank
    holds whole heads.

    Args:
        plan: The plan of this layer, in which every head has its own key and value.
        context: Layout, device, kernels and number formats.
    """

    def __init__(self, plan: AttentionPlan, context: BuildContext) -> None:
        """Allocate the projections."""
        super().__init__()
        self.head_size = plan.head_size
        query = Projections(("query",), (plan.query,), plan.heads)
        self.query = _projection(plan, query, context, bias=plan.bias)
        key_value = Projections(("key", "value"), (plan.query, plan.query), plan.heads)
        self.key_value = _projection(plan, key_value, context, bias=plan.bias)
        self.core = AttentionCore(plan, context, site="cross attention")
        self.output = output_projection(plan, plan.query, context)
        self.fused_amaxes = outer_amaxes(self.query, self.output)

    @staticmethod
    def matrices(plan: AttentionPlan, split: WeightSplit) -> list[tuple[int, int]]:
        """Return (outputs, inputs) of each weight matrix on one process."""
        hidden, query = plan.hidden, plan.query // split.tensor
        return [(query, hidden), (2 * query, hidden), (hidden, query)]

    @staticmethod
    def vectors(plan: AttentionPlan, split: WeightSplit) -> int:
        """Count the parameters of the biases on one process."""
        return 3 * plan.query // split.tensor + plan.hidden if plan.bias else 0

    @staticmethod
    def flops(plan: AttentionPlan, length: int, encoder_length: int) -> Flops:
        """Count the FLOPs. Keys and values are computed for the encoder's tokens."""
        products = 12 * (length + encoder_length) * plan.hidden * plan.query
        return Flops(products, 12 * length * encoder_length * plan.query)

    @staticmethod
    def activation_bytes(plan: AttentionPlan, batch: MicroBatch) -> int:
        """Count the bytes of queries, outputs, encoder keys and values, and of any kept scores."""
        per_token = 2 * plan.query // batch.tensor
        saved = batch.width * (batch.tokens + batch.encoder_tokens) * per_token
        return saved + score_bytes(plan, batch, batch.encoder_length)

    def forward(self, x: Tensor, encoder: EncoderOutput) -> Tensor:
        """Attend from the decoder's tokens to the encoder's.

        Args:
            x: [s, b, h]; [s/t, b, h] with sequence parallelism.
            encoder: The encoder output and its padding mask.

        Returns:
            The output in the shape of x; the caller adds `bias_to_add`.
        """
        query = self.query(x).unflatten(2, (-1, self.head_size))  # [s, b, n/t, d]
        states = encoder.states.to(x.dtype)  # fp32 with an fp32 residual stream
        key_value = self.key_value(states).unflatten(2, (-1, 2, self.head_size))
        key, value = key_value.unbind(3)  # [e, b, n/t, d]
        return self.output(self.core(query, key, value, encoder.mask))

    @property
    def bias_to_add(self) -> Tensor | None:
        """Bias [h] to be added in the residual sum; `None` if there is none."""
        return self.output.bias_to_add


def _projection(
    plan: AttentionPlan,
    projections: Projections,
    context: BuildContext,
    *,
    bias: bool,
    adapted_as: Projections | None = None,
) -> Linear:
    """Build the linear layer that maps hidden states to this rank's heads."""
    width = sum(projections.widths)
    return Linear(
        plan.hidden,
        width,
        context,
        split="column",
        init=plan.init.weight(plan.hidden, width),
        bias=bias,
        projections=projections,
        adapted_as=adapted_as,
    )


def alibi_slopes(heads: int) -> list[float]:
    """Return the slope of each head's bias, as chosen by Press et al. (2021).

    If the number of heads is a power of two, p, the slopes are 2^(-8 i / p), with i from 1. The
    heads beyond the largest power of two take every other slope of the next power of two.
    """
    power = 1 << (heads.bit_length() - 1)
    first = [2 ** (-8 * i / power) for i in range(1, power + 1)]
    return first + [2 ** (-4 * i / power) for i in range(1, 2 * (heads - power), 2)]


def new_sinks(plan: AttentionPlan, context: BuildContext) -> Tensor | None:
    """Return the logits of this rank's sinks [n/t], learned or zero, or `None` without sinks."""
    if plan.softmax == "learnable":
        return context.new_parameter((plan.heads,), init=Init("normal", plan.init.std), split_dim=0)
    if plan.softmax == "off-by-one":
        return torch.zeros(plan.heads // context.layout.tensor.size, device=context.device)
    return None


def count_sinks(plan: AttentionPlan, split: WeightSplit) -> int:
    """Count the learned sinks on one process."""
    return plan.heads // split.tensor if plan.softmax == "learnable" else 0


def score_bytes(plan: AttentionPlan, batch: MicroBatch, keys: int) -> int:
    """Count the bytes of the scores, the attention weights and the dropout mask, if kept.

    Kernels that add a bias to the scores keep that bias, which all samples share.

    Args:
        plan: The plan of the attention layer.
        batch: The micro-batch.
        keys: Number of keys per sequence.
    """
    if not batch.keeps_scores:
        if plan.alibi is None or "core_attn" in batch.recomputed:
            return 0
        heads = plan.heads // (batch.tensor * batch.context)
        return batch.width * heads * batch.length * keys
    scores = batch.tokens * keys * plan.heads // batch.tensor
    return scores * (2 * batch.width + (1 if plan.dropout > 0 else 0))
