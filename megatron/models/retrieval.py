"""Retro's cross-attention: chunks attend to retrieved neighbors, and neighbors to their chunk.

A sequence of s tokens is cut into l chunks of m tokens, each with k neighbors of r tokens (Borgeaud
et al., 2022). Linear layers process whole sequences, token by token. Only the attention core treats
chunks as samples. Each context rank holds two slices of every sequence, cut at the borders of
chunks.

Shapes: s, l count this context rank's tokens and chunks; b micro-batch, h hidden, n heads, d head
size, t tensor-parallel size.

In inference with a cache, a pass processes the new tokens of any number of texts. A chunk is
encoded in the pass that processes its last token, and the next m tokens read its keys and values
from the cache.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.models.attention import AttentionCore, CrossAttention, KeyValueCache
from megatron.models.costs import Flops, MicroBatch
from megatron.models.norm import Stream
from megatron.models.plan import RetrievalAttentionPlan
from megatron.parallel.build import BuildContext
from megatron.parallel.collectives import gather_rows_to
from megatron.parallel.context.split import local_positions
from megatron.parallel.layout import Axis


class Encoder(Protocol):
    """The layers that encode neighbors (a `LayerStack`)."""

    def run(self, stream: Stream, *inputs: Any) -> Stream:
        """Run the layers, passing `inputs` to each of them after the stream."""
        ...


class RetrievalCache(KeyValueCache, Protocol):
    """Retro's cache: keys and values of earlier tokens, and of the neighbors of chunks.

    C chunks end among the s new tokens of a pass.
    """

    @property
    def neighbors(self) -> Tensor:
        """The tokens of the C chunks' neighbors, int64 [1, C, k, r]."""
        ...

    def whole_chunks(self, x: Tensor) -> Tensor:
        """Store the first Retro layer's cross-attention inputs; return those of complete chunks.

        Args:
            x: The inputs of the new tokens, [s, 1, h].

        Returns:
            The inputs of all tokens of the C chunks, [C m, 1, h].
        """
        ...

    def attend_to_neighbors(
        self, query: Tensor, key_value: Tensor | None, core: AttentionCore
    ) -> Tensor:
        """Store the neighbors' keys and values, then attend from each token to its neighbors.

        Args:
            query: The queries of the new tokens, [s, 1, n/t, d].
            key_value: The keys and values of the C chunks' neighbors, [r k, C, n/t, 2, d]; `None`
                if there are no such chunks.
            core: The layer's attention.

        Returns:
            The attention output, [s, 1, n d / t], arbitrary for the first m - 1 tokens of a text.
        """
        ...


class Neighbors:
    """The neighbors of a micro-batch's chunks, which the first Retro layer encodes.

    Attributes:
        states: At first the neighbors' embeddings, later the encoder's output: [r, k b l, h], or
            [r/t, k b l, h] with sequence parallelism.
        cache: The cache in inference, otherwise `None`. With a cache, l is the number of chunks
            that end among the new tokens, and b is 1.
    """

    def __init__(self, states: Tensor, cache: RetrievalCache | None = None) -> None:
        """Store the embeddings, or the output of an encoder in an earlier part of the model."""
        self.states = self._embeddings = states
        self.cache = cache

    def encode(self, retriever: Encoder, x: Tensor) -> None:
        """Set `states` to the encoder's output. Recomputation calls this a second time.

        Args:
            retriever: The encoder.
            x: The input of the first chunked cross-attention, [s, b, h]; [s/t, b, h] with sequence
                parallelism.
        """
        embeddings = Stream(self._embeddings)
        self.states = retriever.run(embeddings, None, None, None, x).join()


class NeighborCrossAttention(CrossAttention):
    """Attention from the tokens of a neighbor to the chunk for which it was retrieved.

    The arguments are those of `CrossAttention`.
    """

    def __init__(self, plan: RetrievalAttentionPlan, context: BuildContext) -> None:
        """Allocate the projections."""
        super().__init__(plan, context)
        self.retrieval = plan.retrieval

    @staticmethod
    def flops(plan: Any, length: int, encoder_length: int) -> Flops:
        """Count one neighbor's FLOPs. All neighbors of a chunk share keys and values."""
        chunk, neighbors = plan.retrieval.chunk, plan.retrieval.neighbors
        products = 12 * (length * neighbors + chunk) * plan.hidden * plan.query // neighbors
        return Flops(products, 12 * length * chunk * plan.query)

    @staticmethod
    def activation_bytes(plan: Any, batch: MicroBatch) -> int:
        """Count the bytes kept for one neighbor. All neighbors of a chunk share keys and values."""
        whole = replace(batch, encoder_length=plan.retrieval.chunk)
        shared = batch.width * whole.encoder_tokens * 2 * plan.query // batch.tensor
        kept = CrossAttention.activation_bytes(plan, whole)
        return kept - shared + shared // plan.retrieval.neighbors

    def forward(self, x: Tensor, encoder: Tensor) -> Tensor:  # type: ignore[override]
        """Attend from neighbors to their chunks.

        Args:
            x: [r, k b l, h]; [r/t, k b l, h] with sequence parallelism.
            encoder: The hidden states of the sequences, [s, b, h]; [s/t, b, h] with sequence
                parallelism.

        Returns:
            The output in the shape of x; the caller adds `bias_to_add`.
        """
        keys = self.key_value(encoder.to(x.dtype))  # [s, b, 2 n/t d]
        keys = keys.unflatten(0, (-1, self.retrieval.chunk))  # [l, m, b, ...]
        keys = keys.permute(1, 2, 0, 3).flatten(1, 2)  # [m, b l, ...]
        key, value = keys.unflatten(2, (-1, 2, self.head_size)).unbind(3)  # [m, b l, n/t, d]
        query = self.query(x)  # [r, k b l, n/t d]
        # The neighbors of a chunk form one sequence of queries, since their order does not matter.
        rows = query.reshape(-1, key.shape[1], *key.shape[2:])  # [r k, b l, n/t, d]
        return self.output(self.core(rows, key, value, None).reshape(query.shape))


class ChunkedCrossAttention(CrossAttention):
    """Attention from the tokens of a sequence to the neighbors of a chunk.

    Neighbors are retrieved for a whole chunk, so reading them could leak the chunk's later tokens
    to its earlier ones. They are therefore read only by the chunk's last token and by all but the
    last token of the next chunk. The first m - 1 tokens of a sequence read no neighbors and get 0.

    The arguments are those of `CrossAttention`.
    """

    bias_to_add = None  # forward adds the bias, except to the first tokens

    def __init__(self, plan: RetrievalAttentionPlan, context: BuildContext) -> None:
        """Allocate the projections."""
        super().__init__(replace(plan, defers_bias=True), context.within_rank())
        self.chunk, self.keys = plan.retrieval.chunk, plan.retrieval.keys
        self.context_axis, self.sequence = context.layout.context, context.layout.sequence

    @staticmethod
    def flops(plan: Any, length: int, encoder_length: int) -> Flops:
        """Count the FLOPs. Keys and values are computed for the tokens of all neighbors."""
        keys = plan.retrieval.keys
        retrieved = length // plan.retrieval.chunk * keys
        products = 12 * (length + retrieved) * plan.hidden * plan.query
        return Flops(products, 12 * length * keys * plan.query)

    @staticmethod
    def activation_bytes(plan: Any, batch: MicroBatch) -> int:
        """Count the bytes of queries, outputs, neighbors' keys and values, and any kept scores."""
        retrieved = batch.length // plan.retrieval.chunk * plan.retrieval.keys
        per_token = 2 * plan.query // batch.tensor
        scores = replace(batch, encoder_length=plan.retrieval.keys)
        kept = CrossAttention.activation_bytes(plan, scores)
        tokens = batch.sequences * retrieved // batch.context - scores.encoder_tokens
        return kept + batch.width * tokens * per_token

    def forward(  # type: ignore[override]
        self, x: Tensor, encoder: Neighbors, retriever: Encoder | None = None
    ) -> Tensor:
        """Attend from tokens to neighbors.

        Args:
            x: [s, b, h]; [s/t, b, h] with sequence parallelism.
            encoder: The neighbors to attend to.
            retriever: In the first layer that reads neighbors, the layers that encode them and set
                `encoder.states`; otherwise `None`.

        Returns:
            The output in the shape of x.
        """
        if encoder.cache is not None:
            return self._forward_cached(x, encoder, encoder.cache, retriever)
        if retriever is not None:
            encoder.encode(retriever, x)
        batch, axis = x.shape[1], self.context_axis
        states = encoder.states.to(x.dtype)
        query = self.query(x).unflatten(2, (-1, self.head_size))  # [s, b, n/t, d]
        positions = local_positions(query.shape[0] * axis.size, axis, x.device)  # [s]
        # [r k, b l, h]: the keys of a chunk are all tokens of its neighbors.
        states = states.reshape(-1, batch * (len(positions) // self.chunk), states.shape[2])
        if axis.size > 1:
            states = _with_previous_chunks(states, batch, axis)  # [r k, b (l + 2), h]
        key_value = self.key_value(states).unflatten(2, (-1, 2, self.head_size))
        key, value = key_value.unbind(3)  # [r k, b l, n/t, d]
        context = self.core(self._by_chunk(query), key, value, None)  # [m, b l, n/t d]
        has_neighbors = (positions >= self.chunk - 1)[:, None, None]
        context = self._by_token(context, batch)  # [s, b, n/t d]
        output = self.output(context if axis.size == 1 else context.where(has_neighbors, 0))
        if self.output.bias is None:
            return output
        local_mask = has_neighbors.chunk(self.sequence.size)[self.sequence.rank]
        return output + self.output.bias * local_mask

    def _forward_cached(
        self, x: Tensor, encoder: Neighbors, cache: RetrievalCache, retriever: Encoder | None
    ) -> Tensor:
        """Attend from new tokens [s, 1, h] to neighbors in the cache, and return [s, 1, h]."""
        if retriever is not None:
            chunk_inputs = cache.whole_chunks(x)
            if len(chunk_inputs):
                encoder.encode(retriever, chunk_inputs)
        key_value = None
        if encoder.states.shape[1]:
            states = encoder.states.to(x.dtype).reshape(self.keys, -1, x.shape[2])  # [r k, C, h]
            key_value = self.key_value(states).unflatten(2, (-1, 2, self.head_size))
        query = self.query(x).unflatten(2, (-1, self.head_size))  # [s, 1, n/t, d]
        context = cache.attend_to_neighbors(query, key_value, self.core)
        has_neighbors = (cache.positions >= self.chunk - 1)[:, None, None]
        output = self.output(context.where(has_neighbors, 0))
        return output if self.output.bias is None else output + self.output.bias * has_neighbors

    def _by_chunk(self, query: Tensor) -> Tensor:
        """Group [s, b, n/t, d] by the chunk whose neighbors a token reads: [m, b l, n/t, d].

        The first group begins at token m - 1 of the sequence. A slice of a context rank has one
        more group, because its first tokens read the neighbors of the chunk before it.
        """
        slices, before = self._slices
        rows = query.unflatten(0, (slices, -1))  # [slices, s / slices, b, n/t, d]
        rows = F.pad(rows, (0, 0, 0, 0, 0, 0, before, self.chunk - 1))
        rows = rows.unflatten(1, (-1, self.chunk))  # [slices, groups, m, b, n/t, d]
        return rows.permute(2, 3, 0, 1, 4, 5).flatten(1, 3)

    def _by_token(self, context: Tensor, batch: int) -> Tensor:
        """Undo `_by_chunk`: [m, b l, n/t d] -> [s, b, n/t d], zero before the first group."""
        slices, before = self._slices
        rows = context.unflatten(1, (batch, slices, -1))  # [m, b, slices, groups, n/t d]
        rows = rows.permute(2, 3, 0, 1, 4).flatten(1, 2)  # [slices, groups m, b, n/t d]
        return F.pad(rows, (0, 0, 0, 0, -before, 1 - self.chunk)).flatten(0, 1)

    @property
    def _slices(self) -> tuple[int, int]:
        """Number of slices of a sequence on this rank, and number of tokens to pad before each.

        If the second number is negative, that many tokens are cut off instead.
        """
        return (1, 1 - self.chunk) if self.context_axis.size == 1 else (2, 1)


def _with_previous_chunks(states: Tensor, batch: int, axis: Axis) -> Tensor:
    """Prepend the neighbors of the chunk before each of this rank's two slices of a sequence.

    The very first slice has no chunk before it and gets another chunk's neighbors.

    Args:
        states: The neighbors of this rank's chunks, [r k, b l, h].
        batch: Number of sequences in the micro-batch, b.
        axis: The context ranks; rank i of C holds slices i and 2C - 1 - i.

    Returns:
        The neighbors of these chunks and of the two chunks before them, [r k, b (l + 2), h].
    """
    slices = states.unflatten(1, (batch, 2, -1))  # [r k, b, 2, l/2, h]
    last = slices[:, :, :, -1].permute(2, 0, 1, 3)  # [2, r k, b, h]
    all_last = gather_rows_to(last.contiguous(), axis)  # [2 C, r k, b, h], in the order of ranks
    early = 2 * max(axis.rank - 1, 0)
    # The late slice follows the next rank's late slice or, on the last rank, its own early one.
    late = 2 * axis.rank + (3 if axis.rank + 1 < axis.size else 0)
    previous = all_last[[early, late]]
    previous = previous.permute(1, 2, 0, 3)[:, :, :, None]  # [r k, b, 2, 1, h]
    return torch.cat((previous, slices), 3).flatten(1, 3)
