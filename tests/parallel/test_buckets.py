"""The plan of flat buffers: slots, buckets, shards, and the order of sending."""

from dataclasses import replace

import pytest
import torch

from megatron.parallel.buckets import (
    ParameterTraits,
    Span,
    distribute,
    has_little_padding,
    lay_out,
    plan_buckets,
    row_shards,
)


def test_slots_are_aligned_and_do_not_overlap():
    ((span, slots),) = lay_out([3, 8, 1], alignment=4, limit=100)
    assert slots == [(0, Span(0, 3)), (1, Span(4, 12)), (2, Span(12, 13))]
    assert span == Span(0, 16)


def test_a_bucket_of_exactly_the_limit_is_full():
    for limit, ends in ((4, [4, 8, 16, 20]), (8, [8, 16, 20]), (9, [16, 20])):
        buckets = lay_out([4, 3, 8, 4], alignment=4, limit=limit)
        assert [span.end for span, _ in buckets] == ends


@pytest.mark.parametrize("limit", [1, 4, 5, 9, 100])
@pytest.mark.parametrize("shards", [1, 2, 3])
@pytest.mark.parametrize("keeps_whole", [False, True])
def test_buckets_cover_every_slot_once_and_reach_the_limit(limit, shards, keeps_whole):
    sizes = [3, 8, 1, 4, 2]
    buckets = lay_out(sizes, alignment=4, limit=limit, shards=shards, keeps_whole=keeps_whole)
    spans = [span for span, _ in buckets]
    assert spans[0].start == 0
    assert all(a.end == b.start for a, b in zip(spans, spans[1:], strict=False))
    assert all(span.size >= limit for span in spans[:-1])
    slots = [slot for _, inside in buckets for _, slot in inside]
    indices = [i for _, inside in buckets for i, _ in inside]
    assert sorted(indices) == list(range(len(sizes)))
    assert [slot.size for slot in slots] == [sizes[i] for i in indices]
    assert all(a.end <= b.start for a, b in zip(slots, slots[1:], strict=False))
    if not keeps_whole:
        assert indices == sorted(indices)
    for span, inside in buckets:
        parts = [span.shard(rank, shards) for rank in range(shards)]
        assert [part.size for part in parts] == [span.size // shards] * shards
        assert all(part.start % 4 == 0 for part in parts)
        for _, slot in inside:
            assert slot.intersect(span) == slot
            if keeps_whole:
                assert sum(slot.intersect(part) is not None for part in parts) == 1


def test_whole_tensors_are_dealt_out_evenly():
    ((span, slots),) = lay_out([8] * 6, alignment=4, limit=100, shards=3, keeps_whole=True)
    assert span.size == 48  # no padding
    assert [slot.start // 16 for _, slot in slots] == [0, 0, 1, 1, 2, 2]


def test_the_largest_tensors_are_dealt_first_each_to_the_emptiest_shard():
    assert distribute([3, 8, 1, 4, 2], 2) == ([(1, 4), (0, 0), (0, 8), (1, 0), (1, 7)], 9)
    assert [has_little_padding(sizes, 2) for sizes in ([10, 8], [11, 8], [5, 5, 5, 4])] == [
        *(True, False, True),
    ]  # 10% is little


def test_a_last_bucket_with_much_padding_joins_the_one_before_unless_that_must_end():
    sizes, options = [8, 8, 8, 8, 4], {"alignment": 4, "limit": 16, "shards": 2}

    def members(**more):
        return [[i for i, _ in slots] for _, slots in lay_out(sizes, **options, **more)]

    assert members() == [[0, 1], [2, 3], [4]]
    assert members(keeps_whole=True) == [[0, 1], [2, 4, 3]]
    assert members(keeps_whole=True, ends={3}) == [[0, 1], [2, 3], [4]]
    assert members(ends={0, 4}) == [[0], [1, 2], [3, 4]]


def test_buckets_have_64_mebibytes_by_default():
    parameters = [_traits(name, 2**24, torch.float32) for name in "abc"]
    plan = plan_buckets(parameters, replicas={"data": 2}, zero_stage=1, gradients_in_fp32=True)
    assert _sent(plan) == [["c"], ["b"], ["a"]]
    less = [replace(one, shape=(2**24 - 64,)) for one in parameters]
    plan = plan_buckets(less, replicas={"data": 2}, zero_stage=1, gradients_in_fp32=True)
    assert _sent(plan) == [["c", "b"], ["a"]]


def test_shards_of_rows():
    assert row_shards(5, 15, 3) == [Span(0, 6), Span(6, 12), Span(12, 15)]
    assert row_shards(2, 8, 4) == [Span(0, 4), Span(4, 8), Span(8, 8), Span(8, 8)]


def test_spans_meet_where_both_are():
    assert Span(2, 7).intersect(Span(5, 9)) == Span(5, 7)
    assert Span(2, 5).intersect(Span(5, 9)) is None
    assert Span(2, 5).of(torch.arange(10, 20)).tolist() == [12, 13, 14]
    assert Span(12, 15).relative_to(Span(10, 20)) == Span(2, 5)


def _traits(name, elements=64, dtype=torch.bfloat16, **more):
    return ParameterTraits(name, (elements,), dtype, **more)


def _plan(parameters, *, replicas=None, stage=1, bucket_bytes=1, in_fp32=True):
    return plan_buckets(
        parameters,
        replicas=replicas or {"data": 2},
        zero_stage=stage,
        gradients_in_fp32=in_fp32,
        bucket_bytes=bucket_bytes,
    )


def _sent(plan):
    """Return the names in each bucket, in the order of sending."""
    return [
        [member.traits.name for member in plan.flats[i].buckets[j].members] for i, j in plan.order
    ]


def _owner(plan, name):
    """Return the ranks, along its replica axis, that update some part of a parameter."""
    ((flat, bucket, slot),) = (
        (flat, bucket, member.slot)
        for flat in plan.flats
        for bucket in flat.buckets
        for member in bucket.members
        if member.traits.name == name
    )
    ranks = range(flat.replicas)
    if plan.zero_stage == 0:
        return tuple(ranks)
    return tuple(rank for rank in ranks if slot.intersect(bucket.span.shard(rank, len(ranks))))


def test_the_last_parameters_are_sent_first():
    plan = _plan([_traits("first"), _traits("middle"), _traits("last")])
    assert _sent(plan) == [["last"], ["middle"], ["first"]]
    assert plan.order[0] == (0, 0)
    assert plan.flats[0].buckets[0].members[0].slot == Span(0, 64)


def test_experts_have_a_replica_axis_of_their_own():
    """Their weights have fewer replicas: other shards, other processes to average over."""
    parameters = [
        _traits("attention.0"),
        _traits("experts.0", replica_axis="expert_data"),
        _traits("attention.1"),
        _traits("experts.1", replica_axis="expert_data"),
    ]
    plan = _plan(parameters, replicas={"data": 8, "expert_data": 2})
    dense, experts = (
        next(flat for flat in plan.flats if flat.axis == axis) for axis in ("data", "expert_data")
    )
    assert (dense.replicas, experts.replicas) == (8, 2)
    assert dense.elements == 2 * 512  # each of 8 shards starts at a multiple of 256 bytes
    assert experts.elements == 2 * 128
    assert _sent(plan) == [["experts.1"], ["attention.1"], ["experts.0"], ["attention.0"]]
    assert _owner(plan, "experts.1") == (0,)
    alone = _plan(parameters, replicas={"data": 2, "expert_data": 1})
    assert alone.zero_stage == 1
    assert alone.flats[0].replicas == 1  # the experts have no other copy
    assert _plan(parameters, replicas={"data": 1, "expert_data": 1}).zero_stage == 0


def test_dtypes_and_wire_formats_have_buffers_of_their_own():
    parameters = [
        _traits("bias", dtype=torch.float32),
        _traits("norm"),
        _traits("weight", gathered_in_8_bits=True),
    ]
    plan = _plan(parameters)
    kinds = {
        flat.buckets[0].members[0].traits.name: (flat.wire, flat.dtype, flat.gradient_dtype)
        for flat in plan.flats
    }
    assert kinds == {
        "weight": ("8 bit", torch.bfloat16, torch.float32),
        "norm": ("16 bit", torch.bfloat16, torch.float32),
        "bias": ("fp32", torch.float32, torch.float32),
    }
    in_16_bits = _plan(parameters, in_fp32=False)
    assert [flat.gradient_dtype for flat in in_16_bits.flats] == [
        torch.bfloat16,
        torch.bfloat16,
        torch.float32,
    ]
    alone = _plan(parameters, replicas={"data": 1})  # nothing is gathered
    assert [flat.wire for flat in alone.flats] == ["16 bit", "fp32"]


def test_what_may_be_idle_is_sent_last():
    parameters = [_traits("first"), _traits("adapter", may_be_idle=True), _traits("last")]
    assert _sent(_plan(parameters)) == [["last"], ["first"], ["adapter"]]


def test_stage_2_ends_buckets_at_waves_and_tied_parameters():
    chunk = {name: (("backward", i),) for i, name in enumerate("ab")}
    parameters = [
        _traits("words", is_tied=True, waves=chunk["a"]),
        _traits("a.0", waves=chunk["a"]),
        _traits("a.1", waves=chunk["a"]),
        _traits("b.0", waves=chunk["b"]),
    ]
    plan = _plan(parameters, stage=2, bucket_bytes=2**20)
    assert _sent(plan) == [["b.0"], ["a.1", "a.0"], ["words"]]
    (flat,) = plan.flats
    assert [bucket.waves for bucket in flat.buckets] == [chunk["b"], chunk["a"], chunk["a"]]
    parameters[0] = replace(parameters[0], comes_first=True)
    scored = _plan(parameters, stage=2, bucket_bytes=2**20)
    assert _sent(scored) == [["b.0"], ["words"], ["a.1", "a.0"]]
    assert _sent(_plan(parameters, stage=1, bucket_bytes=2**20)) == [["b.0", "a.1", "a.0", "words"]]


def test_a_bucket_is_sent_when_its_last_gradient_is_there():
    parameters = [_traits("first"), _traits("middle", dtype=torch.float32), _traits("last")]
    assert _sent(_plan(parameters, bucket_bytes=2**20)) == [["middle"], ["last", "first"]]


@pytest.mark.parametrize(("is_cast", "limit", "words"), [
    (True, 1024, [["norm"], ["words"]]),
    (True, 1025, [["norm", "words"]]),
    (False, 1024, [["norm", "words"]]),
])  # fmt: skip
def test_stage_2_allocates_no_large_gradient_for_a_small_vector(is_cast, limit, words):
    """The vectors have a buffer without large tensors if the matrices are gathered in 8 bits."""
    parameters = [
        _traits("words", 1024),
        _traits("norm"),
        _traits("weight", gathered_in_8_bits=is_cast, is_tied=not is_cast),
    ]
    plan = _plan(parameters, stage=2, bucket_bytes=4 * limit)
    assert _sent(plan) == [["weight"], *words]


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_whole_tensors_have_one_owner(stage):
    sizes = {"a": 1000, "b": 300, "c": 300, "d": 64}
    parameters = [_traits(name, size, needs_whole=True) for name, size in sizes.items()]
    plan = _plan([*parameters, _traits("bias")], replicas={"data": 3}, stage=stage)
    owners = [_owner(plan, name) for name in sizes]
    if stage == 0:
        assert owners == [(0, 1, 2)] * 4
    else:
        assert all(len(owner) == 1 for owner in owners)
        assert len(set(owners)) == 3
    assert sum(len(flat.buckets) for flat in plan.flats) == 2


def test_a_plan_can_be_printed():
    parameters = [_traits("norm"), _traits("weight", 640, gathered_in_8_bits=True)]
    assert str(_plan(parameters)).splitlines() == [
        "ZeRO stage 1",
        "buffer 0: 1,024 elements over 2 data ranks, weights bfloat16 gathered in 8 bit, "
        "gradients float32",
        "buffer 1: 128 elements over 2 data ranks, weights bfloat16 gathered in 16 bit, "
        "gradients float32",
        "send 0: buffer 0 bucket 0 [0, 1,024) weight",
        "send 1: buffer 1 bucket 0 [0, 128) norm",
    ]


def test_plans_of_the_same_parameters_are_equal():
    parameters = [_traits("a"), _traits("b", dtype=torch.float32)]
    assert _plan(parameters) == _plan(parameters)
    assert _plan(parameters) != _plan(parameters[:1])


@pytest.mark.parametrize("shards", [2, 4, 8, 16])
def test_the_matrices_of_equal_layers_are_dealt_evenly(shards):
    """This holds even if a layer has fewer matrices than shards, of different sizes."""
    layer = [6144 * 2048, 2048 * 2048, 11264 * 2048, 2048 * 5632]
    sizes = layer * 24
    buckets = lay_out(sizes, alignment=64, limit=2**24, shards=shards, keeps_whole=True)
    loads = [0] * shards
    for span, slots in buckets:
        width = span.size // shards
        for i, slot in slots:
            shard = (slot.start - span.start) // width
            assert (slot.end - 1 - span.start) // width == shard
            loads[shard] += sizes[i]
    assert max(loads) <= 1.1 * sum(sizes) / shards
    assert sum(span.size for span, _ in buckets) <= 1.1 * sum(sizes)
    assert len(buckets) >= 3  # so that communication overlaps with the backward pass
