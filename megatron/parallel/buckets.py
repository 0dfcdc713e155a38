"""Where tensors lie in a flat buffer, and how it is cut into buckets and shards: pure plans.

Backward reaches the last layers first, so parameters lie in reverse order: the buffer fills
front to back. A bucket holds neighbouring parameters and is communicated as one message. Where
processes share the work of the update, each owns an equal part of every bucket.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

ALIGNMENT_BYTES = 256  # of every tensor's start: whole vector loads and cache lines
BUCKET_BYTES = 64 * 2**20  # large enough that a collective runs at full bandwidth


@dataclass(frozen=True)
class Span:
    """Elements [start, end) of a flat buffer."""

    start: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.start

    def intersect(self, other: Span) -> Span | None:
        """The elements in both; None where there is none."""
        start, end = max(self.start, other.start), min(self.end, other.end)
        return Span(start, end) if start < end else None

    def within(self, outer: Span) -> slice:
        """What picks this span out of a tensor that holds `outer`."""
        return slice(self.start - outer.start, self.end - outer.start)

    def relative_to(self, outer: Span) -> Span:
        """The same elements counted from the start of `outer`."""
        return Span(self.start - outer.start, self.end - outer.start)

    def shard(self, rank: int, shards: int) -> Span:
        """Part `rank` of `shards` equal ones."""
        size = self.size // shards
        assert size * shards == self.size, f"{self} does not divide into {shards}"
        return Span(self.start + rank * size, self.start + (rank + 1) * size)


@dataclass(frozen=True)
class Bucket:
    """Neighbouring tensors: the span they fill together, and the slot of each in the buffer."""

    span: Span
    slots: tuple[Span, ...]


def plan_buckets(
    sizes: Sequence[int],
    *,
    alignment: int,
    limit: int,
    shards: int = 1,
    ends: Collection[int] = (),
) -> list[Bucket]:
    """Places for tensors of `sizes` elements, in order, in buckets of at least `limit` elements.

    Every slot starts at a multiple of `alignment`. Buckets follow one another without gaps; only
    the last may be smaller than the limit, and those that must end with a tensor in `ends` (its
    place among the sizes). Each is padded at its end, so that it divides into `shards` equal parts
    that start at multiples of the alignment too.
    """
    unit = alignment * shards
    buckets: list[Bucket] = []
    slots: list[Span] = []
    start = end = 0
    for i, size in enumerate(sizes):
        slots.append(Span(end, end + size))
        end += -(-size // alignment) * alignment
        if i == len(sizes) - 1 or i in ends or end - start >= limit:
            end = start + -(-(end - start) // unit) * unit
            buckets.append(Bucket(Span(start, end), tuple(slots)))
            slots, start = [], end
    return buckets
