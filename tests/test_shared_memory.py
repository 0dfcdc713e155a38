"""Processes that share memory get the same as with gloo, whatever order they wait in."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.parallel.collectives import (
    all_gather_single,
    reduce_scatter_single,
    start_all_reduce,
)
from megatron.parallel.layout import Layout
from tests import shared_memory
from tests.distributed import can_share_memory, run_distributed, run_sharing_memory


@pytest.fixture(autouse=True)
def _where_it_works() -> None:
    if not can_share_memory():
        pytest.skip("needs forks, and Linux")


def _numbers(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(-100, 100, shape, generator=generator).to(dtype)  # their sums are exact


def _collectives(layout: Layout) -> list[Any]:
    """Run every operation over groups of four and of two, with results that gloo gives exactly."""
    rank, found = layout.world.rank, []
    for axis in (layout.world, layout.tensor, layout.pipeline):
        group, size = axis.group, axis.size
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            x = _numbers(rank, 4, 3, dtype=dtype)
            for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN):
                reduced = x.clone()
                dist.all_reduce(reduced, op=op, group=group)
                part = x.new_empty(4 // size, 3)
                reduce_scatter_single(part, x, op=op, group=group)
                found += [reduced, part]
            whole, swapped, sent = x.new_empty(4 * size, 3), torch.empty_like(x), x.clone()
            all_gather_single(whole, x, group=group)
            dist.all_to_all_single(swapped, x, group=group)
            dist.broadcast(sent, src=axis.ranks[-1], group=group)
            found += [whole, swapped, sent]
        given = [1 if place == 0 else 3 for place in range(size)]
        to = [1] * size if axis.is_first else [3] * size
        uneven = torch.empty(sum(to))
        dist.all_to_all_single(uneven, _numbers(rank, sum(given)).float(), to, given, group=group)
        empty = torch.empty(0)
        dist.all_reduce(empty, group=group)
        objects: list[Any] = [None] * size
        dist.all_gather_object(objects, {"rank": rank, "text": "x" * rank}, group=group)
        axis.barrier()
        found += [uneven, empty, objects]
    return found


def _same(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def test_all_operations_give_what_gloo_gives():
    sizes = {"tensor": 2, "pipeline": 2}
    expected = run_distributed(4, _collectives, **sizes)
    for ours, theirs in zip(run_sharing_memory(4, _collectives, **sizes), expected, strict=True):
        assert len(ours) == len(theirs)
        assert all(map(_same, ours, theirs))


def _out_of_order(layout: Layout) -> tuple[list[float], list[float]]:
    """Run more collectives and messages at once than there is room for."""
    axis, rank = layout.world, layout.world.rank
    other = 1 - rank
    count = 3 * shared_memory._DEPTH
    sums = [torch.full((2,), float(rank + i)) for i in range(count)]
    pending = [start_all_reduce(x, axis) for x in sums]
    messages = [torch.empty(1) for _ in range(8)]
    receives = [dist.irecv(x, other) for x in messages]
    sends = [dist.isend(torch.tensor([10.0 * rank + i]), other) for i in range(8)]
    for work in [*receives[::-1], *sends, *pending[::-1]]:
        work.wait()
    return [x[1].item() for x in sums], [x.item() for x in messages]


def test_works_may_be_waited_for_in_any_order():
    for rank, (sums, messages) in enumerate(run_sharing_memory(2, _out_of_order)):
        assert sums == [2.0 * i + 1 for i in range(len(sums))]
        assert messages == [10.0 * (1 - rank) + i for i in range(8)]


def _broken(layout: Layout) -> None:
    if layout.world.rank == 1:
        raise ValueError("a mistake")
    layout.world.barrier()


def test_the_others_end_with_a_rank_that_fails():
    with pytest.raises(RuntimeError, match="ValueError: a mistake"):
        run_sharing_memory(3, _broken)


def _forgotten(layout: Layout) -> None:
    shared_memory._SECONDS = 0.2
    if layout.world.rank == 0:
        layout.tensor.barrier()


def test_who_waits_for_nobody_gives_up():
    with pytest.raises(RuntimeError, match=r"rank 0 has waited for 0.2 s"):
        run_sharing_memory(2, _forgotten, tensor=2)


def _both_send_first(layout: Layout) -> None:
    shared_memory._SECONDS = 0.2
    other = 1 - layout.world.rank
    dist.send(torch.ones(1), other)
    dist.recv(torch.ones(1), other)


def test_a_message_goes_when_it_is_asked_for():
    """This is so with gloo and NCCL; otherwise a pipeline could pass here and hang there."""
    with pytest.raises(RuntimeError, match=r"has waited for 0.2 s"):
        run_sharing_memory(2, _both_send_first)


def _of_two_sizes(layout: Layout) -> None:
    dist.all_reduce(torch.ones(3 + layout.world.rank), group=layout.world.group)


def test_what_does_not_match_is_reported():
    with pytest.raises(RuntimeError, match=r"1[26] bytes expected, 1[26] given"):
        run_sharing_memory(2, _of_two_sizes)


def _refused(layout: Layout) -> None:
    dist.all_reduce(torch.ones(1), op=dist.ReduceOp.PRODUCT, group=layout.world.group)


def test_an_unknown_reduction_is_refused():
    with pytest.raises(RuntimeError, match="NotImplementedError: reduction"):
        run_sharing_memory(2, _refused)
