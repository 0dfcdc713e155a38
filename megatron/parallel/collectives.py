"""Communication inside the network, each operation with its backward.

Every function is the identity on an axis of one process. `copy_to` and `reduce_from` are each
other's backward; together they bracket a computation that is split over the axis.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.parallel.layout import Axis


def copy_to(x: Tensor, axis: Axis) -> Tensor:
    """Hand one replicated tensor to the axis: forward nothing, backward all-reduce."""
    return x if axis.size == 1 else _CopyTo.apply(x, axis)


def reduce_from(x: Tensor, axis: Axis) -> Tensor:
    """Sum the axis' partial results: forward all-reduce, backward nothing."""
    return x if axis.size == 1 else _ReduceFrom.apply(x, axis)


def gather_from(x: Tensor, axis: Axis) -> Tensor:
    """Join the axis' parts along the last dimension: forward all-gather, backward own slice.

    Backward expects the same gradient on every rank.
    """
    return x if axis.size == 1 else _GatherFrom.apply(x, axis)


def all_reduce(x: Tensor, axis: Axis, op: Any = dist.ReduceOp.SUM) -> Tensor:
    """All-reduce `x` in place, without autograd; returns it."""
    if axis.size > 1:
        assert axis.group is not None, "a layout without process groups cannot communicate"
        dist.all_reduce(x, op=op, group=axis.group)
    return x


class _CopyTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        # A clone: autograd may hand the same gradient to another branch.
        return all_reduce(grad.clone(memory_format=torch.contiguous_format), ctx.axis), None


class _ReduceFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        return all_reduce(x.clone(memory_format=torch.contiguous_format), axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _GatherFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in axis.ranks]
        dist.all_gather(parts, x.contiguous(), group=axis.group)
        return torch.cat(parts, dim=-1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.chunk(ctx.axis.size, dim=-1)[ctx.axis.rank].contiguous(), None
