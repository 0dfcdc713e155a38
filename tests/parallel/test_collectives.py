"""Collectives with autograd, on one process and on two."""

import pytest
import torch

from megatron.parallel.collectives import (
    InTransit,
    gather_to,
    reduce_from,
    reduce_scatter_from,
    start_all_to_all_rows,
    start_gather_rows,
    start_sum_rows,
)
from megatron.parallel.layout import Layout
from tests.distributed import run_distributed


def _run(layout, function, weight):
    """Run forward on rank + 1 and backward on a gradient; return both results as lists."""
    x = torch.full((2, 2), layout.tensor.rank + 1.0, requires_grad=True)
    out = function(x, layout.tensor)
    out.backward(weight * torch.arange(1.0, out.numel() + 1).view_as(out))
    return out.tolist(), x.grad.tolist()


def _reduce(layout):
    return _run(layout, reduce_from, 1)


def test_reduce_sums_the_values():
    for out, grad in run_distributed(2, _reduce, tensor=2):
        assert out == [[3, 3], [3, 3]]
        assert grad == [[1, 2], [3, 4]]


def _gather_to(layout):
    return _run(layout, gather_to, layout.tensor.rank + 1)


def test_gather_to_joins_and_backward_sums_the_own_slice():
    first, second = run_distributed(2, _gather_to, tensor=2)
    assert first[0] == second[0] == [[1, 1, 2, 2], [1, 1, 2, 2]]
    assert first[1] == [[3, 6], [15, 18]]
    assert second[1] == [[9, 12], [21, 24]]


def _reduce_scatter(layout):
    return _run(layout, reduce_scatter_from, layout.tensor.rank + 1)


def test_reduce_scatter_keeps_the_own_part_and_backward_joins():
    first, second = run_distributed(2, _reduce_scatter, tensor=2)
    assert first[0] == second[0] == [[3, 3]]
    assert first[1] == second[1] == [[1, 2], [2, 4]]


def test_one_process_needs_no_groups():
    x = torch.ones(2)
    for function in (reduce_from, gather_to, reduce_scatter_from):
        assert function(x, Layout.single().tensor) is x


def _gather_rows(x, axis):
    return start_gather_rows(x, axis)


def _sum_rows(x, axis):
    return start_sum_rows(x, axis)


def _send_rows(x, axis):
    counts = [[1, 3], [2, 2]]  # from each rank to each rank
    received = [row[axis.rank] for row in counts]
    return start_all_to_all_rows(x, axis, counts[axis.rank], received)


class _Noted(torch.autograd.Function):
    """The identity, which records its passes."""

    @staticmethod
    def forward(ctx, x, notes):
        ctx.notes = notes
        notes.append("forward")
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        ctx.notes.append("backward")
        return grad, None


def _overlapped(layout, start):
    """Return values, gradients, and the order of events on this rank."""
    notes, transfer = [], layout.journal.transfer

    def noted(kind, ranks, work):
        notes.append(f"start {kind}")
        return transfer(kind, ranks, work)

    layout.journal.transfer = noted
    read_transfer = InTransit._read
    InTransit._read = lambda self, read: (notes.append("arrived"), read_transfer(self, read))[1]
    try:
        rank = layout.tensor.rank
        x = (torch.arange(8.0).view(4, 2) + 10 * rank).requires_grad_()
        transit = start(x, layout.tensor)
        transit.deferred_work.append(lambda: notes.append("later"))
        between = _Noted.apply(x, notes)
        out = transit.wait()
        (out * (1 + torch.arange(float(len(out))).view(-1, 1))).sum().add(between.sum()).backward()
    finally:
        InTransit._read = read_transfer
    return out.tolist(), x.grad.tolist(), notes


@pytest.mark.parametrize("start", [_gather_rows, _sum_rows, _send_rows])
def test_what_is_computed_during_a_transfer_is_computed_during_its_gradients(start):
    kinds = {
        _gather_rows: ("start all-gather", "start all-to-all"),
        _sum_rows: ("start all-to-all", "start all-gather"),
        _send_rows: ("start all-to-all", "start all-to-all"),
    }[start]
    for *_, notes in run_distributed(2, _overlapped, start, tensor=2):
        forth, back = kinds
        assert notes == [
            *(forth, "forward", "arrived"),
            *(back, "later", "backward", "arrived"),
        ]


def test_rows_in_transit_arrive_and_their_gradients_return():
    first, second = run_distributed(2, _overlapped, _gather_rows, tensor=2)
    rows = [[0, 1], [2, 3], [4, 5], [6, 7]]
    others = [[10, 11], [12, 13], [14, 15], [16, 17]]
    assert first[0] == second[0] == rows + others
    # Both ranks give a row the gradient 1 + its index; `between` adds another 1.
    assert first[1] == [[2 * i + 1] * 2 for i in range(1, 5)]
    assert second[1] == [[2 * i + 1] * 2 for i in range(5, 9)]

    first, second = run_distributed(2, _overlapped, _sum_rows, tensor=2)
    assert first[0] == [[10, 12], [14, 16]]
    assert second[0] == [[18, 20], [22, 24]]
    assert first[1] == second[1] == [[2] * 2, [3] * 2, [2] * 2, [3] * 2]

    first, second = run_distributed(2, _overlapped, _send_rows, tensor=2)
    assert first[0] == [[0, 1], [10, 11], [12, 13]]
    assert second[0] == [[2, 3], [4, 5], [6, 7], [14, 15], [16, 17]]
    assert first[1] == [[2] * 2, [2] * 2, [3] * 2, [4] * 2]
    assert second[1] == [[3] * 2, [4] * 2, [5] * 2, [6] * 2]
