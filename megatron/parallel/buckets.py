"""The bucket plan: the layout of gradients and weights in flat buffers, and the sending order.

A plan is pure data, computed from the names, shapes and traits of parameters without any tensor or
process. It can be printed, compared and tested on its own. `gradients` and `weights` execute it.

The backward pass reaches the last layers first, so parameters are in reverse order and a buffer
fills from front to back. A bucket holds adjacent parameters and is communicated as one message. If
processes share the update, each owns an equal shard of every bucket.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise
from typing import Literal

import torch
from torch import Tensor, nn

ALIGNMENT_BYTES = 256  # alignment of every tensor's start, for vector loads and cache lines
MAX_PADDING = 0.1  # maximum fraction of padding in a bucket whose shards hold whole tensors
BUCKET_BYTES = 64 * 2**20  # large enough that a collective runs at full bandwidth

WireFormat = Literal["fp32", "16 bit", "8 bit"]


@dataclass(frozen=True)
class Span:
    """Elements [start, end) of a flat buffer."""

    start: int
    end: int

    @property
    def size(self) -> int:
        """The number of elements."""
        return self.end - self.start

    def intersect(self, other: Span) -> Span | None:
        """Return the elements in both spans, or `None` if there are none."""
        start, end = max(self.start, other.start), min(self.end, other.end)
        return Span(start, end) if start < end else None

    def of(self, flat: Tensor) -> Tensor:
        """Return these elements of a 1-D tensor, sharing its memory."""
        return flat[self.start : self.end]

    def relative_to(self, outer: Span) -> Span:
        """Return the same elements counted from the start of `outer`."""
        return Span(self.start - outer.start, self.end - outer.start)

    def shard(self, rank: int, shards: int) -> Span:
        """Return shard number `rank` of `shards` equal shards."""
        size = self.size // shards
        assert size * shards == self.size, f"{self} does not divide into {shards} equal parts"
        return Span(self.start + rank * size, self.start + (rank + 1) * size)


def row_shards(rows: int, elements: int, shards: int) -> list[Span]:
    """Return the elements in each shard of a tensor that is sharded by rows (ZeRO stage 3).

    All shards have the same number of rows, except that the last shards may have fewer or none.

    Args:
        rows: The number of rows of the tensor (the size of its first dimension).
        elements: The number of elements of the tensor.
        shards: The number of shards.
    """
    height = -(-rows // shards)
    ends = [min(shard * height, rows) * (elements // rows) for shard in range(shards + 1)]
    return [Span(start, end) for start, end in pairwise(ends)]


def runs(
    members: Iterable[tuple[nn.Parameter, Span]], select: Callable[[nn.Parameter], bool]
) -> Iterator[Span]:
    """Yield the smallest number of spans that cover all selected parameters and no others.

    Args:
        members: Parameters with their slots, in the order of the slots.
        select: A function that returns whether to include a given parameter.
    """
    for is_selected, group in groupby(members, key=lambda member: select(member[0])):
        slots = [slot for _, slot in group]
        if is_selected:
            yield Span(slots[0].start, slots[-1].end)


@dataclass(frozen=True)
class ParameterTraits:
    """The properties of a parameter that a plan depends on.

    Attributes:
        name: A name that is unique among the parameters of this process.
        shape: The shape of this tensor rank's shard.
        dtype: The data type of the weight.
        replica_axis: The axis of the processes that hold the same weight, over which its gradient
            is averaged: "data", or "expert_data" for the weights of an expert.
        waves: In stage 2, the pipeline operations that add to the gradient.
        gathered_in_8_bits: Whether updated weights are cast to FP8 before they are gathered.
        is_partial: Whether each tensor rank processes only a part of the sequence or some of the
            heads, so the gradient must be summed over the tensor axis before it is averaged.
        is_tied: Whether a copy on another pipeline stage adds to the gradient after the backward
            pass. Below stage 2 the parameter's bucket and all later buckets wait for this sum. In
            stage 2 the parameter has its own bucket, so that both stages shard it at the same rows,
            and the shards are summed.
        comes_first: In stage 2, whether the backward pass reaches this tied parameter first. This
            is the word embedding table if the output layer shares it, although it is the model's
            first parameter.
        may_be_idle: Whether an iteration may compute no gradient for this parameter (an idle
            expert, an unused adapter). Such parameters have their own buckets, which are sent last
            so that no other bucket waits for them.
        needs_whole: Whether the update needs the whole tensor on one process, not a shard of it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    replica_axis: str = "data"
    waves: tuple[Hashable, ...] = (None,)
    gathered_in_8_bits: bool = False
    is_partial: bool = False
    is_tied: bool = False
    comes_first: bool = False
    may_be_idle: bool = False
    needs_whole: bool = False

    @property
    def elements(self) -> int:
        """The number of elements on this process."""
        return torch.Size(self.shape).numel()


@dataclass(frozen=True)
class PlannedParameter:
    """A parameter and its slot in a flat buffer.

    Attributes:
        traits: The traits of the parameter.
        slot: The parameter's elements in the flat buffer.
    """

    traits: ParameterTraits
    slot: Span


@dataclass(frozen=True)
class Bucket:
    """Adjacent parameters that are communicated as one message.

    Attributes:
        span: All elements of the bucket, including padding.
        members: The bucket's parameters, in the order of their slots.
        waves: In stage 2, the pipeline operations that compute the bucket's gradients. Each
            operation adds to every gradient in the bucket.
    """

    span: Span
    members: tuple[PlannedParameter, ...]
    waves: tuple[Hashable, ...] = (None,)


@dataclass(frozen=True)
class FlatPlan:
    """A flat buffer and its buckets.

    Attributes:
        axis: The name of the axis whose processes hold the same parameters.
        replicas: The number of processes on this axis.
        dtype: The data type of the weights.
        gradient_dtype: The data type of the gradients, in the buffer and on the wire.
        wire: The format in which updated weights are sent.
        buckets: The buckets, which follow one another without gaps.
    """

    axis: str
    replicas: int
    dtype: torch.dtype
    gradient_dtype: torch.dtype
    wire: WireFormat
    buckets: tuple[Bucket, ...]

    @property
    def elements(self) -> int:
        """The number of elements, including padding."""
        return self.buckets[-1].span.end

    @property
    def members(self) -> Iterator[PlannedParameter]:
        """All parameters in the order of their slots."""
        return (member for bucket in self.buckets for member in bucket.members)


@dataclass(frozen=True)
class BucketPlan:
    """The flat buffers, their buckets, and the order in which all processes send them.

    Attributes:
        zero_stage: The ZeRO stage, 0 to 2; 0 if no other process holds the same weights.
        flats: The flat buffers.
        order: The buckets in sending order, each as the index of its buffer and its own index
            within this buffer.
    """

    zero_stage: int
    flats: tuple[FlatPlan, ...]
    order: tuple[tuple[int, int], ...]

    def __str__(self) -> str:
        """Return the plan as text: one line per buffer, then one per bucket in sending order."""
        lines = [f"ZeRO stage {self.zero_stage}"]
        for i, flat in enumerate(self.flats):
            lines.append(
                f"buffer {i}: {flat.elements:,} elements over {flat.replicas} {flat.axis} ranks, "
                f"weights {str(flat.dtype).removeprefix('torch.')} gathered in {flat.wire}, "
                f"gradients {str(flat.gradient_dtype).removeprefix('torch.')}"
            )
        for position, (i, j) in enumerate(self.order):
            bucket = self.flats[i].buckets[j]
            names = ", ".join(member.traits.name for member in bucket.members)
            span = f"[{bucket.span.start:,}, {bucket.span.end:,})"
            lines.append(f"send {position}: buffer {i} bucket {j} {span} {names}")
        return "\n".join(lines)


def plan_buckets(
    parameters: Sequence[ParameterTraits],
    *,
    replicas: Mapping[str, int],
    zero_stage: int,
    gradients_in_fp32: bool,
    bucket_bytes: int = BUCKET_BYTES,
) -> BucketPlan:
    """Plan the buffers and buckets of a process's parameters.

    Parameters share a buffer if they have the same dtypes, replica axis, wire format,
    `may_be_idle` and `needs_whole`.

    Args:
        parameters: The parameters in the model's order.
        replicas: The number of processes along each replica axis.
        zero_stage: The ZeRO stage, 0 to 2. With a single replica, stage 0 is used.
        gradients_in_fp32: Whether to keep the gradients of 16-bit parameters in fp32.
        bucket_bytes: The minimum size of a bucket's gradients, in bytes. The last bucket of a
            buffer may be smaller, as may buckets that must end early (see `lay_out`).
    """
    stage = zero_stage if any(size > 1 for size in replicas.values()) else 0
    ordered = list(parameters)[::-1]
    if stage == 2:
        waves = list(dict.fromkeys(p.waves for p in ordered))
        ordered.sort(key=lambda p: (waves.index(p.waves), not p.comes_first))

    def is_cast(p: ParameterTraits) -> bool:  # a single process does not gather
        return p.gathered_in_8_bits and replicas[p.replica_axis] > 1

    by_kind: dict[tuple[Hashable, ...], list[ParameterTraits]] = {}
    for p in ordered:
        kind = (p.dtype, is_cast(p), p.replica_axis, p.may_be_idle, p.needs_whole)
        by_kind.setdefault(kind, []).append(p)
    has_cast = any(is_cast(p) for p in ordered)
    flats = []
    for members in by_kind.values():
        first = members[0]
        gradient_dtype = torch.float32 if gradients_in_fp32 else first.dtype
        limit = bucket_bytes // gradient_dtype.itemsize
        forced: set[int] = set()
        if stage == 2:
            groups = [(p.waves, p.name if p.is_tied else None) for p in members]
            forced = {i for i, (a, b) in enumerate(pairwise(groups)) if a != b}
            if has_cast and not is_cast(first):
                # Otherwise the first small vector would keep the memory for the word embeddings'
                # gradients allocated during the whole backward pass.
                forced |= {i for i, p in enumerate(members[1:]) if p.elements >= limit}
        wire: WireFormat = "fp32" if first.dtype.itemsize == 4 else "16 bit"
        smallest = gradient_dtype.itemsize  # bytes per element
        if is_cast(first):
            wire, smallest = "8 bit", 1
        shards = replicas[first.replica_axis]  # at every ZeRO stage, to keep the order of sums
        buckets = [
            Bucket(
                span,
                tuple(PlannedParameter(members[i], slot) for i, slot in slots),
                members[slots[0][0]].waves if stage == 2 else (None,),
            )
            for span, slots in lay_out(
                [p.elements for p in members],
                alignment=ALIGNMENT_BYTES // smallest,
                limit=limit,
                shards=shards,
                ends=forced,
                keeps_whole=first.needs_whole,
            )
        ]
        flats.append(
            FlatPlan(first.replica_axis, shards, first.dtype, gradient_dtype, wire, tuple(buckets))
        )
    # Buckets are sent as the backward pass completes them, regardless of their buffer.
    reach_order = {p.name: (p.may_be_idle, i) for i, p in enumerate(ordered)}
    bucket_ids = [(i, j) for i, flat in enumerate(flats) for j in range(len(flat.buckets))]

    def completion(bucket_id: tuple[int, int]) -> tuple[bool, int]:
        bucket = flats[bucket_id[0]].buckets[bucket_id[1]]
        return max(reach_order[member.traits.name] for member in bucket.members)

    return BucketPlan(stage, tuple(flats), tuple(sorted(bucket_ids, key=completion)))


def lay_out(
    sizes: Sequence[int],
    *,
    alignment: int,
    limit: int,
    shards: int = 1,
    ends: Collection[int] = (),
    keeps_whole: bool = False,
) -> list[tuple[Span, list[tuple[int, Span]]]]:
    """Assign tensors to buckets of at least `limit` elements.

    Every slot starts at a multiple of `alignment`. Buckets follow one another without gaps. Only
    the last bucket and buckets with a forced end may be smaller than the limit. Each bucket is
    padded to divide into equal shards, which also start at multiples of the alignment.

    Args:
        sizes: The sizes of the tensors, in elements, in the order of the buffer.
        alignment: The alignment of slots and shards, in elements.
        limit: The minimum size of a bucket, in elements.
        shards: The number of shards of each bucket.
        ends: The indices of tensors that must end a bucket.
        keeps_whole: Whether each tensor must be within a single shard. If so, tensors are
            distributed over the shards by size, the largest first. A bucket grows until at most
            `MAX_PADDING` of it is padding. If the last bucket has more padding, it is merged
            with the bucket before it, unless that bucket has a forced end.

    Returns:
        For each bucket, its span and the index and slot of each tensor, in the order of the slots.
    """
    unit = alignment * shards
    aligned = [-(-size // alignment) * alignment for size in sizes]
    groups: list[list[int]] = [[]]
    for i in range(len(sizes)):
        groups[-1].append(i)
        is_full = sum(aligned[j] for j in groups[-1]) >= limit
        if keeps_whole and is_full:
            is_full = has_little_padding([aligned[j] for j in groups[-1]], shards)
        if i < len(sizes) - 1 and (i in ends or is_full):
            groups.append([])
    if keeps_whole and len(groups) > 1 and groups[-2][-1] not in ends:
        *before, last = groups  # the last tensors may leave shards empty
        if not has_little_padding([aligned[j] for j in last], shards):
            groups = [*before[:-1], before[-1] + last]
    buckets = []
    start = 0
    for group in groups:
        if keeps_whole:
            assigned, width = distribute([aligned[j] for j in group], shards)
            starts = {
                j: start + shard * width + offset
                for j, (shard, offset) in zip(group, assigned, strict=True)
            }
            end = start + shards * width
        else:
            *offsets, filled_end = accumulate((aligned[j] for j in group), initial=start)
            starts = dict(zip(group, offsets, strict=True))
            end = start + -(-(filled_end - start) // unit) * unit
        slots = [(j, Span(starts[j], starts[j] + sizes[j])) for j in group]
        buckets.append((Span(start, end), sorted(slots, key=lambda pair: pair[1].start)))
        start = end
    return buckets


def distribute(sizes: Sequence[int], shards: int) -> tuple[list[tuple[int, int]], int]:
    """Distribute tensors over shards, largest first, each to the shard with the fewest elements.

    Args:
        sizes: The sizes of the tensors, in elements.
        shards: The number of shards.

    Returns:
        Each tensor's shard and its offset in that shard, and the size of the fullest shard.
    """
    filled = [(0, shard) for shard in range(shards)]
    assigned = [(0, 0)] * len(sizes)
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        offset, shard = heapq.heappop(filled)
        assigned[i] = shard, offset
        heapq.heappush(filled, (offset + sizes[i], shard))
    return assigned, max(end for end, _ in filled)


def has_little_padding(sizes: Sequence[int], shards: int) -> bool:
    """Return whether at most `MAX_PADDING` of the bucket that `distribute` fills is padding."""
    max_elements = sum(sizes) / (1 - MAX_PADDING)
    if max(sizes) * shards > max_elements:
        return False
    _, fullest = distribute(sizes, shards)
    return fullest * shards <= max_elements
