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
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.parallel.collectives import (
    Pending,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)
from megatron.parallel.layout import Axis


class WorkQueue(Protocol):
    """Takes work for later: see `weight_gradients`."""

    def push(self, work: Callable[[], None], /) -> None:
        """Run `work` once, some time before the optimizer's step."""


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
) -> Tensor:
    """x W^T + b.

    Args:
        x: [s or s/t, b, in].
        weight: [..., out, in], read as [-1, in].
        bias: [out] after flattening, or None.
        communication: see there.
        queue: where the weight's gradient is computed later: pushed work then adds it to the
            parameter's `main_grad`, or `grad` where it has none. Autograd's hooks on the weight
            do not run then.

    Returns:
        [s, b, out].
    """
    flat = weight.flatten(0, -2)
    bias = None if bias is None else bias.flatten()
    if communication.axis.size == 1 and queue is None:
        return F.linear(x, flat, bias)
    return _Product.apply(x, flat, bias, communication, weight, queue)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        flat: Tensor,
        bias: Tensor | None,
        communication: Communication,
        weight: nn.Parameter,
        queue: WorkQueue | None,
    ) -> Tensor:
        ctx.save_for_backward(x, flat)
        ctx.communication, ctx.weight, ctx.queue = communication, weight, queue
        return F.linear(communication.start_gather(x).wait(), flat, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, flat = ctx.saved_tensors
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        communication, weight, queue = ctx.communication, ctx.weight, ctx.queue
        now = needs_weight and queue is None
        gathering = communication.start_gather(x) if now else None
        summing = communication.start_sum(grad @ flat) if needs_input else None
        weight_grad = None
        if gathering is not None:
            weight_grad = _weight_gradient(grad, gathering.wait())
        elif needs_weight:
            queue.push(lambda: _accumulate(weight, grad, communication.start_gather(x).wait()))
        bias_grad = grad.flatten(0, -2).sum(0) if needs_bias else None
        input_grad = summing.wait() if summing is not None else None
        return input_grad, weight_grad, bias_grad, None, None, None


def _weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    return grad.flatten(0, -2).t() @ x.flatten(0, -2)


@torch.no_grad()
def _accumulate(weight: nn.Parameter, grad: Tensor, x: Tensor) -> None:
    """Add the weight's gradient to where autograd and the gradient buffer would have put it."""
    value = _weight_gradient(grad, x).view_as(weight)
    target = getattr(weight, "main_grad", weight.grad)
    if target is None:
        weight.grad = value
    else:
        target.add_(value)
