"""The matrix product of split layers: its communication runs while its backward computes.

With weight [out, in] and every rank holding different rows of it, backward has two products: the
input's gradient, which must be summed over the ranks, and the weight's. The sum travels during the
second product. With sequence parallelism (Korthikanti et al., 2022) ranks keep parts of the input
along dimension 0: forward gathers them, backward gathers them again, during the first product,
and the sum is a reduce-scatter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.kernels.weight_gradient import weight_gradient
from megatron.parallel.collectives import (
    Pending,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)
from megatron.parallel.gradients import GradientSlot
from megatron.parallel.layout import Axis


class WorkQueue(Protocol):
    """What a zero-bubble pipeline schedule lends to layers: see `weight_gradients`."""

    @property
    def is_collecting(self) -> bool:
        """Whether layers are to push their weight's gradient rather than compute it."""

    def push(self, work: Callable[[], None], /) -> None:
        """Run `work` once, later, but before the optimizer's step."""


@dataclass(frozen=True)
class Communication:
    """What a product has to do around itself.

    Attributes:
        axis: ranks that hold different rows of the weight; of one process: nothing to do.
        along_sequence: the input is this rank's part along dimension 0, else it is whole.
        overlap: communicate during the products, else before and after them: the same results.
    """

    axis: Axis = Axis()
    along_sequence: bool = False
    overlap: bool = True

    def start_gather(self, x: Tensor) -> Pending:
        """The whole input from its part."""
        return self._maybe_wait(start_all_gather(x, self.axis) if self._gathers else Pending(x))

    def start_sum(self, grad: Tensor) -> Pending:
        """The input's gradient, from the whole input's on every rank; may change `grad`."""
        start = start_reduce_scatter if self._gathers else start_all_reduce
        return self._maybe_wait(start(grad, self.axis))

    @property
    def _gathers(self) -> bool:
        return self.along_sequence and self.axis.size > 1

    def _maybe_wait(self, pending: Pending) -> Pending:
        return pending if self.overlap else Pending(pending.wait())


def parallel_linear(
    x: Tensor,
    weight: nn.Parameter,
    bias: Tensor | None,
    communication: Communication,
    queue: WorkQueue | None = None,
    slot: GradientSlot | None = None,
) -> Tensor:
    """x W^T + b.

    Args:
        x: [s or s/t, b, in].
        weight: [..., out, in], read as [-1, in].
        bias: [out] after flattening, or None.
        communication: see there.
        queue: where backward leaves the weight's product for later. The pushed work accumulates
            its result as autograd would have, hooks included. Of a product whose input is split
            along the sequence it is a collective.
        slot: where the weight's gradient goes; None: to autograd.

    Returns:
        [s, b, out].
    """
    bias = None if bias is None else bias.flatten()
    if queue is not None or slot is not None:
        # Outside of autograd: there hooks would run in every backward, gradient or not.
        owner = _Owner(weight, queue, slot)
        if torch.is_grad_enabled() and not x.requires_grad:
            x = x.detach().requires_grad_()  # backward must come here
        return _Product.apply(x, weight.detach().flatten(0, -2), bias, communication, owner)
    if communication.axis.size == 1:
        return F.linear(x, weight.flatten(0, -2), bias)
    return _Product.apply(x, weight.flatten(0, -2), bias, communication, None)


@dataclass(frozen=True)
class _Owner:
    """A weight that stands outside of autograd: where its gradient's product may wait, and where
    its result goes."""

    weight: nn.Parameter
    queue: WorkQueue | None
    slot: GradientSlot | None

    @property
    def waits(self) -> bool:
        return self.queue is not None and self.queue.is_collecting

    def accumulate(self, grad: Tensor, x: Tensor) -> None:
        """Add grad^T x to the gradient: in the slot, or as autograd does."""
        if self.slot is None:
            value = _weight_gradient(grad, x)
            torch.autograd.backward(self.weight, value.view_as(self.weight))
            return
        with self.slot.open() as (into, accumulate):
            weight_gradient(grad, x, into, accumulate=accumulate)

    def accumulate_later(self, communication: Communication, grad: Tensor, x: Tensor) -> None:
        """The same when the queue says so, from the input as it was kept."""
        assert self.queue is not None
        self.queue.push(partial(_accumulate_later, self, communication, grad, x))


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        communication: Communication,
        owner: _Owner | None,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.communication, ctx.owner = communication, owner
        return F.linear(communication.start_gather(x).wait(), weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        communication, owner = ctx.communication, ctx.owner
        waits = owner is not None and owner.waits
        needs_weight = needs_weight if owner is None else owner.weight.requires_grad
        gathering = communication.start_gather(x) if needs_weight and not waits else None
        summing = communication.start_sum(grad @ weight) if needs_input else None
        weight_grad = None
        if needs_weight and waits:
            owner.accumulate_later(communication, grad, x)
        elif gathering is not None and owner is not None:
            owner.accumulate(grad, gathering.wait())
        elif gathering is not None:
            weight_grad = _weight_gradient(grad, gathering.wait())
        bias_grad = grad.flatten(0, -2).sum(0) if needs_bias else None
        input_grad = None if summing is None else summing.wait()
        return input_grad, weight_grad, bias_grad, None, None


def _weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    return grad.flatten(0, -2).t() @ x.flatten(0, -2)


@torch.no_grad()
def _accumulate_later(owner: _Owner, communication: Communication, grad: Tensor, x: Tensor) -> None:
    owner.accumulate(grad, communication.start_gather(x).wait())
