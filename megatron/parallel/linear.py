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

from megatron.parallel.collectives import Pending
from megatron.parallel.communication import Communication
from megatron.parallel.gradients import GradientSlot
from megatron.parallel.products import PLAIN, Kept, Products


class WorkQueue(Protocol):
    """What a zero-bubble pipeline schedule lends to layers: see `weight_gradients`."""

    @property
    def is_collecting(self) -> bool:
        """Whether layers are to push their weight's gradient rather than compute it."""

    def push(self, work: Callable[[], None], /) -> None:
        """Run `work` once, later, but before the optimizer's step."""


def parallel_linear(
    x: Tensor,
    weight: nn.Parameter,
    bias: Tensor | None,
    communication: Communication,
    queue: WorkQueue | None = None,
    slot: GradientSlot | None = None,
    products: Products = PLAIN,
    *,
    training: bool = True,
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
        products: in which number format.
        training: see `Products.forward`.

    Returns:
        [s, b, out].
    """
    bias = None if bias is None else bias.flatten()
    owner = None if queue is None and slot is None else Owner(weight, queue, slot)
    if owner is None and communication.axis.size == 1 and products is PLAIN:
        return F.linear(x, weight.flatten(0, -2), bias)
    x, matrix = arguments(x, weight, owner)
    return _Product.apply(x, matrix, bias, communication, products, owner, training)


def arguments(x: Tensor, weight: nn.Parameter, owner: Owner | None) -> tuple[Tensor, Tensor]:
    """Input and weight [out, in] as an autograd function takes them."""
    if owner is None:
        return x, weight.flatten(0, -2)
    # Outside of autograd: there hooks would run in every backward, gradient or not.
    if torch.is_grad_enabled() and not x.requires_grad:
        x = x.detach().requires_grad_()  # backward must come here
    return x, weight.detach().flatten(0, -2)


@dataclass(frozen=True)
class Owner:
    """A weight that stands outside of autograd: where its gradient's product may wait, and where
    its result goes."""

    weight: nn.Parameter
    queue: WorkQueue | None
    slot: GradientSlot | None

    @property
    def waits(self) -> bool:
        return self.queue is not None and self.queue.is_collecting

    def accumulate(self, product: WeightProduct) -> None:
        """Add to the gradient: in the slot, or as autograd does."""
        if self.slot is None:
            value = _alone(product, self.weight.flatten(0, -2))
            torch.autograd.backward(self.weight, value.view_as(self.weight))
            return
        with self.slot.open() as (into, accumulate):
            product.compute(into, accumulate=accumulate)

    def accumulate_later(self, product: WeightProduct) -> None:
        """The same when the queue says so."""
        assert self.queue is not None
        self.queue.push(partial(self._accumulate_now, product))

    @torch.no_grad()
    def _accumulate_now(self, product: WeightProduct) -> None:
        product.start()
        self.accumulate(product)


class WeightProduct(Protocol):
    """The weight's gradient, to be computed: grad^T x, for which a factor may have to be
    gathered."""

    def start(self) -> None:
        """Begin to gather, where only a part was kept: then it is collective."""
        ...

    def compute(self, into: Tensor, *, accumulate: bool) -> None:
        """Write or add to `into` [out, in]."""
        ...


def weight_gradient_of(
    product: WeightProduct, weight: Tensor, owner: Owner | None
) -> Tensor | None:
    """Compute a weight's gradient, or leave it to who owns the weight.

    Args:
        product: started, unless the owner waits.
        weight: [out, in].
        owner: None: autograd.

    Returns:
        What autograd is to get, [out, in].
    """
    if owner is None:
        return _alone(product, weight)
    if owner.waits:
        owner.accumulate_later(product)
    else:
        owner.accumulate(product)
    return None


def _alone(product: WeightProduct, weight: Tensor) -> Tensor:
    """As a tensor of its own, like the weight."""
    value = torch.empty_like(weight)
    product.compute(value, accumulate=False)
    return value


class _WeightProduct:
    """`WeightProduct` of an input that may be this rank's part."""

    def __init__(
        self,
        products: Products,
        communication: Communication,
        x: Tensor | None,
        kept: Kept,
        grad: Kept,
    ) -> None:
        self._products, self._communication = products, communication
        self._x, self._kept, self._grad = x, kept, grad
        self._gathering: Pending | None = None

    def start(self) -> None:
        """See `WeightProduct`."""
        if self._x is not None:
            self._gathering = self._communication.start_gather(self._x)

    def compute(self, into: Tensor, *, accumulate: bool) -> None:
        """See `WeightProduct`."""
        x = None if self._gathering is None else self._gathering.wait()
        self._products.weight_gradient(self._grad, self._kept, x, into, accumulate=accumulate)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        communication: Communication,
        products: Products,
        owner: Owner | None,
        training: bool,
    ) -> Tensor:
        out, kept = products.forward(x, weight, bias, communication, training=training)
        ctx.save_for_backward(x if products.keeps_input else None, weight, *kept)
        ctx.communication, ctx.products, ctx.owner = communication, products, owner
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, *kept = ctx.saved_tensors
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        communication, products, owner = ctx.communication, ctx.products, ctx.owner
        waits = owner is not None and owner.waits
        needs_weight = needs_weight if owner is None else owner.weight.requires_grad
        prepared = products.prepare(grad)
        product = _WeightProduct(products, communication, x, tuple(kept), prepared)
        if needs_weight and not waits:
            product.start()
        summing = None
        if needs_input:
            input_grad = products.input_gradient(prepared, tuple(kept))
            summing = communication.start_sum(input_grad.view(*grad.shape[:-1], -1))
        weight_grad = weight_gradient_of(product, weight, owner) if needs_weight else None
        bias_grad = grad.flatten(0, -2).sum(0) if needs_bias else None
        input_grad = None if summing is None else summing.wait()
        return input_grad, weight_grad, bias_grad, None, None, None, None
