"""Collectives with autograd, on one process and on two."""

import torch

from megatron.parallel.collectives import (
    gather_to,
    reduce_from,
    reduce_scatter_from,
)
from megatron.parallel.layout import Layout
from tests.distributed import run_distributed


def _run(layout, function, weight):
    """Forward of rank + 1, then backward of a gradient: both as lists."""
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
