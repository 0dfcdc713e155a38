"""Two methods of attention between the shards of a sequence: a ring, and all-to-all (Ulysses).

Ring attention (Liu et al., 2023): keys and values move from rank to rank, while queries stay. In C
steps, the keys and values of every rank pass through this rank. While a block is computed, the next
keys and values are in transit. The results of blocks are merged with their log-sum-exp. Blocks that
are entirely masked are never computed. In the backward pass, keys and values go around the ring
again, and their gradients follow one step behind. Dropout draws a mask for each block, and the
forward pass saves only the values needed to redraw it.

Documents (`Segments`) are not sent: every rank knows the ends of all documents, and therefore which
pairs of queries and keys in a block belong to the same document. Only these pairs are computed. If
two ranks are further apart than the longest document, no kernel is launched for their block. All
keys and values still travel, because they pass through every rank to reach the next one.

With a window, blocks are pairs of chunks, and pairs further apart than the window are skipped.

DeepSpeed-Ulysses (Jacobs et al., 2023): outside attention, a rank has some tokens and all heads.
An all-to-all changes this to all tokens, in their global order, and some heads. Ordinary attention
then runs over whole sequences, and another all-to-all restores the layout.

Shapes: s sequence, l = s/C local tokens, C context-parallel size, b micro-batch, n query heads, g
key-value heads, d head size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.kernels.attention import (
    AttentionFunction,
    AttentionOptions,
    include_sinks,
    sink_gradient,
)
from megatron.kernels.segments import Segments, number_segments
from megatron.parallel.context.block import (
    BlockAttention,
    BlockDocuments,
    BlockOptions,
    QueryRows,
    RngState,
    ScoreRules,
    merge,
    plain_block,
)
from megatron.parallel.context.split import (
    gather_sequences,
    scatter_sequences,
    split_for_all,
    split_segments,
)
from megatron.parallel.journal import Transfer
from megatron.parallel.layout import Axis

_PLAIN = plain_block("windows and biases")


@dataclass(frozen=True)
class RingStep:
    """A block of the ring: some of this rank's queries, and some keys of one rank.

    Attributes:
        source: The rank on the context axis whose keys and values are used.
        queries: The indices of the queries among this rank's tokens.
        keys: The indices of the keys among the tokens of `source`.
        causal: Whether the block has a causal mask; otherwise every query attends to every key.
        is_empty: Whether the block need not be computed, because no query can have a key in the
            same document and within the window.
    """

    source: int
    queries: slice
    keys: slice
    causal: bool
    is_empty: bool = False


def ring_plan(
    axis: Axis,
    length: int,
    *,
    causal: bool,
    longest: int | None = None,
    window: int | None = None,
) -> list[RingStep]:
    """Return the blocks that make up the attention of this rank's queries, in order.

    Every rank holds an early and a late chunk of the sequence (see `split`). A lower rank's early
    chunk comes before all tokens of this rank, and its late chunk after them; both chunks of a
    higher rank are between this rank's chunks. With a causal mask, every step after the first
    therefore computes half a block, without a mask.

    There are at least n - 1 other chunks between the chunks of two ranks at distance n. Blocks
    further apart than the longest document are empty.

    With a window, which requires a causal mask, a step has a block for each pair of chunks that the
    mask does not exclude, the pairs on the diagonal first.

    Args:
        axis: The context axis.
        length: The number of tokens of a sequence on this rank, in both chunks together.
        causal: Whether tokens attend only to earlier tokens.
        longest: The maximum number of tokens of a document; `None` means no limit.
        window: The maximum number of earlier tokens to which a query attends; `None` for no limit.
    """
    if window is not None:
        assert causal, "windows are for causal attention"
        return _pairs_of_chunks(axis, length // 2, window, longest)
    everything, early, late = slice(0, length), slice(0, length // 2), slice(length // 2, length)
    steps = []
    for step in range(axis.size):
        source = (axis.rank - step) % axis.size
        queries, keys = everything, everything
        if causal and source < axis.rank:
            keys = early
        elif causal and source > axis.rank:
            queries = late
        between = (abs(source - axis.rank) - 1) * (length // 2)
        is_empty = longest is not None and longest < between + 2
        steps.append(RingStep(source, queries, keys, causal and step == 0, is_empty))
    return steps


def _pairs_of_chunks(axis: Axis, chunk: int, window: int, longest: int | None) -> list[RingStep]:
    """Return this rank's blocks, each a pair of chunks of `chunk` tokens."""
    halves = slice(0, chunk), slice(chunk, 2 * chunk)
    blocks = []
    for step in range(axis.size):
        source = (axis.rank - step) % axis.size
        query_chunks, key_chunks = (
            (rank, 2 * axis.size - 1 - rank) for rank in (axis.rank, source)
        )
        pairs = [
            (query_chunks[i] - key_chunks[j], halves[i], halves[j])
            for i in range(2)
            for j in range(2)
            if query_chunks[i] >= key_chunks[j]
        ]
        for chunks, queries, keys in sorted(pairs, key=lambda pair: pair[0]):
            nearest = (chunks - 1) * chunk + 1  # the distance from the first query to the last key
            is_empty = chunks > 0 and (
                window < nearest or (longest is not None and longest <= nearest)
            )
            blocks.append(RingStep(source, queries, keys, chunks == 0, is_empty))
    return blocks


def documents_of(
    segments: Segments, plan: list[RingStep], axis: Axis, length: int
) -> list[BlockDocuments]:
    """Return the documents of each block.

    Args:
        segments: The documents of whole sequences.
        plan: The blocks of this rank.
        axis: The context axis.
        length: The number of tokens of a sequence on this rank.
    """
    early, late = split_segments(segments, axis.size)
    counts = torch.stack((early + late, early, late)).cumsum(-1, dtype=torch.int32)
    ends = F.pad(counts, (1, 0))  # [3, C, documents + 1]: both chunks, the early one, the late one

    def ends_of(tokens: slice) -> Tensor:
        if tokens.stop < length:
            return ends[1]
        return ends[2] if tokens.start > 0 else ends[0]

    samples, longest = segments.shape[0], segments.longest or segments.shape[1]
    documents = []
    for step in plan:
        query_ends, key_ends = ends_of(step.queries)[axis.rank], ends_of(step.keys)[step.source]
        has_keys = None
        # In the block of a rank's own keys, every query has its own key.
        if (step.source, step.queries) != (axis.rank, step.keys):
            queries = step.queries.stop - step.queries.start
            segment = number_segments(query_ends, (samples, queries))
            has_keys = (key_ends.diff() > 0)[segment]
        documents.append(BlockDocuments(query_ends, key_ends, longest, has_keys))
    return documents


def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: AttentionOptions,
    *,
    axis: Axis,
    block: BlockAttention,
) -> Tensor:
    """Compute ring attention of this rank's queries. Collective over the axis.

    Args:
        query: The queries [l, b, n, d] of this rank's shard of the sequence (`split_sequence`).
        key: The keys [l, b, g, d].
        value: The values [l, b, g, d].
        options: The attention options, without `softcap`. A mask must be the `Segments` of whole
            sequences. Scores are in fp32, so scaling by layer is not needed. Dropout draws from the
            device's default generator, which must have a different seed on every rank of the axis.
        axis: The context axis.
        block: The implementation of attention within a block. Layers with windows or biases use
            plain PyTorch instead.

    Returns:
        The result [l, b, n * d], in the dtype of `query`.
    """
    segments = options.mask
    assert not isinstance(segments, Tensor), "a rule refuses padding masks"
    assert options.softcap is None, "a rule refuses a ring with capped scores"
    query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
    length = query.shape[2]
    window = options.window if options.is_limited(axis.size * length) else None
    documents: Sequence[BlockDocuments | None]
    if segments is None:
        steps = ring_plan(axis, length, causal=options.causal, window=window)
        documents = [None] * len(steps)
    else:
        longest = segments.longest
        steps = ring_plan(axis, length, causal=segments.causal, longest=longest, window=window)
        documents = segments.shared(
            ("ring", axis.ranks, axis.rank, window is None),
            lambda: documents_of(segments, steps, axis, length),
        )
    rules: list[ScoreRules | None] = [None] * len(steps)
    settings = (options.scale, window, options.slopes)
    if any(setting is not None for setting in settings):
        all_positions = torch.arange(axis.size * length, device=query.device)
        positions = split_for_all(all_positions, axis.size, dim=0)
        rules = [
            ScoreRules(
                *settings, positions[axis.rank][step.queries], positions[step.source][step.keys]
            )
            for step in steps
        ]
    if window is not None or options.slopes is not None:
        block = _PLAIN
    block_options = [
        BlockOptions(step.causal, options.dropout, block_documents, block_rules)
        for step, block_documents, block_rules in zip(steps, documents, rules, strict=True)
    ]
    ring = _Ring(axis, block, steps, block_options)
    out: Tensor = _RingAttention.apply(query, key, value, options.sinks, ring)  # [b, n, l, d]
    return out.permute(2, 0, 1, 3).flatten(2)


@dataclass(frozen=True)
class _Transfer:
    """A tensor in transit to the next rank, and another from the previous rank."""

    messages: list[Transfer]
    sent: Tensor  # kept until it has been sent
    received: Tensor

    @classmethod
    def start(cls, x: Tensor, axis: Axis) -> _Transfer:
        received = torch.empty_like(x)
        following = axis.ranks[(axis.rank + 1) % axis.size]
        previous = axis.ranks[axis.rank - 1]
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, x, following, axis.group),
                dist.P2POp(dist.irecv, received, previous, axis.group),
            ]
        )
        # NCCL returns one work object for both, so waiting for the received tensor waits for both.
        ends = (("send", following), ("receive", previous))[-len(works) :]
        messages = [
            axis.journal.message(kind, peer, work)
            for (kind, peer), work in zip(ends, works, strict=True)
        ]
        return cls(messages, x, received)

    def wait(self) -> Tensor:
        for message in self.messages:
            message.wait()
        return self.received


@dataclass(frozen=True)
class _Ring:
    """A ring of context ranks, and this rank's blocks with their options."""

    axis: Axis
    block: BlockAttention
    steps: list[RingStep]
    options: list[BlockOptions]

    def by_source(self) -> list[list[tuple[int, RingStep]]]:
        """Return the blocks with their indices, grouped by the rank whose keys they use."""
        sources = groupby(enumerate(self.steps), key=lambda one: one[1].source)
        return [list(blocks) for _, blocks in sources]


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, ring: _Ring
    ) -> Tensor:
        """Return the result [b, n, l, d], and save the values needed to redraw dropout masks."""
        axis, length = ring.axis, query.shape[2]
        pair = torch.stack((key, value))  # [2, b, g, l, d]: one message carries both
        out, logsumexp = query.new_empty(0), query.new_empty(0)  # fp32 or wider
        ctx.ring, ctx.rng_states = ring, []
        groups = ring.by_source()
        for hop, group in enumerate(groups, 1):
            transfer = _Transfer.start(pair, axis) if hop < len(groups) else None
            for index, step in group:
                rng_state: RngState = ()
                if not step.is_empty:
                    some_keys, some_values = pair[:, :, :, step.keys]
                    part, part_sum, rng_state = ring.block.forward(
                        query[:, :, step.queries], some_keys, some_values, ring.options[index]
                    )
                    if index == 0 and part.shape[2] == length:
                        out, logsumexp = part.to(part_sum.dtype), part_sum
                    else:
                        # The block covers half of the queries, so start from an empty result.
                        if index == 0:
                            out = torch.zeros_like(query, dtype=part_sum.dtype)
                            logsumexp = out.new_full(query.shape[:3], -math.inf)
                        rows = (out[:, :, step.queries], logsumexp[:, :, step.queries])
                        merge(*rows, part, part_sum)
                ctx.rng_states.append(rng_state)
            if transfer is not None:
                pair = transfer.wait()
        if sinks is not None:
            share, logsumexp = include_sinks(logsumexp, sinks)
            out = out * share.unsqueeze(-1)
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, sinks, out, logsumexp)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of query, key, value and sinks.

        A block's gradients are added to the gradients that earlier ranks computed for the same keys
        and values, and the sums follow the keys and values. After the last step the sums are one
        rank away from the owner of the keys and values.
        """
        ring: _Ring = ctx.ring
        query, key, value, sinks, out, logsumexp = ctx.saved_tensors
        pair = torch.stack((key, value))
        grad_query = torch.zeros_like(query, dtype=logsumexp.dtype)
        grad_pair = torch.zeros_like(pair, dtype=logsumexp.dtype)
        grad_transfer = None
        groups = ring.by_source()
        for hop, group in enumerate(groups, 1):
            transfer = _Transfer.start(pair, ring.axis) if hop < len(groups) else None
            of_pairs: list[tuple[slice, Sequence[Tensor]]] = []
            for index, step in group:
                if step.is_empty:
                    continue
                rows = QueryRows(*(x[:, :, step.queries] for x in (grad, query, out, logsumexp)))
                some_keys, some_values = pair[:, :, :, step.keys]
                of_query, *of_pair = ring.block.backward(
                    rows, some_keys, some_values, ring.options[index], ctx.rng_states[index]
                )
                grad_query[:, :, step.queries] += of_query
                of_pairs.append((step.keys, of_pair))
            if grad_transfer is not None:
                grad_pair = grad_transfer.wait()
            for keys, parts in of_pairs:
                for index_in_pair, part in enumerate(parts):
                    grad_pair[index_in_pair, :, :, keys] += part
            grad_transfer = _Transfer.start(grad_pair, ring.axis)
            if transfer is not None:
                pair = transfer.wait()
        assert grad_transfer is not None
        grad_key, grad_value = grad_transfer.wait().to(key.dtype)
        of_sinks = None
        if sinks is not None:
            of_sinks = sink_gradient((grad * out).to(logsumexp.dtype).sum(-1), logsumexp, sinks)
        return grad_query.to(query.dtype), grad_key, grad_value, of_sinks, None


def ulysses_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: AttentionOptions,
    *,
    axis: Axis,
    attend: AttentionFunction,
) -> Tensor:
    """Compute Ulysses attention of this rank's queries. Collective over the axis.

    Args:
        query: The queries [s/C, b, n, d] of this rank's shard of the sequence (`split_sequence`). C
            must divide n and g.
        key: The keys [s/C, b, g, d].
        value: The values [s/C, b, g, d].
        options: The attention options. A mask must be the `Segments` of whole sequences.
        axis: The context axis.
        attend: The attention function to call with query [s, b, n/C, d], key and value
            [s, b, g/C, d].

    Returns:
        The result [s/C, b, n * d].
    """
    assert not isinstance(options.mask, Tensor), "a rule refuses padding masks"
    by_rank = [x.unflatten(2, (axis.size, -1)) for x in (query, key, value)]
    heads = [x.shape[3] for x in by_rank]
    packed = torch.cat(by_rank, dim=3)  # [s/C, b, C, (n + 2g)/C, d]: one message to each rank
    whole = gather_sequences(packed, axis)  # [s, b, (n + 2g)/C, d]
    query, key, value = whole.split(heads, dim=2)
    if options.sinks is not None:
        options = options._replace(sinks=options.sinks.chunk(axis.size)[axis.rank])
    if options.slopes is not None:
        options = options._replace(slopes=options.slopes.chunk(axis.size)[axis.rank])
    out = attend(query, key, value, options)  # [s, b, n/C * d]
    return scatter_sequences(out, axis).flatten(2)
