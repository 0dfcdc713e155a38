"""The plan of a flat buffer: slots, buckets and shards."""

import pytest

from megatron.parallel.buckets import Span, plan_buckets


def test_slots_are_aligned_and_do_not_overlap():
    (bucket,) = plan_buckets([3, 8, 1], alignment=4, limit=100)
    assert bucket.slots == (Span(0, 3), Span(4, 12), Span(12, 13))
    assert bucket.span == Span(0, 16)


@pytest.mark.parametrize("limit", [1, 4, 5, 9, 100])
@pytest.mark.parametrize("shards", [1, 2, 3])
def test_buckets_cover_every_slot_once_and_reach_the_limit(limit, shards):
    sizes = [3, 8, 1, 4, 2]
    buckets = plan_buckets(sizes, alignment=4, limit=limit, shards=shards)
    assert buckets[0].span.start == 0
    assert all(a.span.end == b.span.start for a, b in zip(buckets, buckets[1:], strict=False))
    assert all(bucket.span.size >= limit for bucket in buckets[:-1])
    slots = [slot for bucket in buckets for slot in bucket.slots]
    assert [slot.size for slot in slots] == sizes
    assert all(a.end <= b.start for a, b in zip(slots, slots[1:], strict=False))
    for bucket in buckets:
        parts = [bucket.span.shard(rank, shards) for rank in range(shards)]
        assert [part.size for part in parts] == [bucket.span.size // shards] * shards
        assert all(part.start % 4 == 0 for part in parts)
        inside = [slot.intersect(bucket.span) for slot in bucket.slots]
        assert inside == list(bucket.slots)


def test_spans_meet_where_both_are():
    assert Span(2, 7).intersect(Span(5, 9)) == Span(5, 7)
    assert Span(2, 5).intersect(Span(5, 9)) is None
    assert list(range(10, 20))[Span(12, 15).within(Span(10, 20))] == [12, 13, 14]
    assert Span(12, 15).relative_to(Span(10, 20)) == Span(2, 5)
