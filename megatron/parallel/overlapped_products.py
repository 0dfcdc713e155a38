"""Products of split layers that communicate while they compute, in both directions.

With sequence parallelism a column-split layer gathers its input and a row-split one scatters the
sum of its outputs, along dimension 0. Here such a product is cut into as many parts of rows as
there are ranks:

    gathered    one's own rows are multiplied while the others' arrive, then those, as they come;
    scattered   the rows of the others are multiplied first and travel while one's own are; then
                what came for these is added.

Backward of the one is the other, and what the weight's gradient needs of the others' rows travels
during a product as well (Wang et al., "Overlap Communication with Dependent Computation via
Decomposition", 2023). Every number is the same sum as without, but a product of fewer rows may be
computed by another kernel of the library, with other last bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from megatron.kernels.weight_gradient import weight_gradient
from megatron.parallel.exchange import Exchange, Use
from megatron.parallel.gradients import GradientSlot
from megatron.parallel.linear import Owner, WorkQueue, arguments, weight_gradient_of

Multiply = Callable[[Tensor, Tensor], None]
"""Writes the product of rows [m, in] to [m, out]."""


def gathered_product(rows: Tensor, multiply: Multiply, out: Tensor, exchange: Exchange) -> Use:
    """The product of all ranks' rows.

    Args:
        rows: [m, in], this rank's, contiguous.
        multiply: writes the product of some rows.
        out: [t m, out], to be written.
        exchange: between the ranks.

    Returns:
        To be closed when its `whole` [t m, in] has been read.
    """
    axis = exchange.axis
    parts = out.unflatten(0, (axis.size, -1))
    use = exchange.open(rows)
    for step in range(1, axis.size):
        use.send(step, rows)
    multiply(rows, parts[axis.rank])
    use.computing()
    for step in range(1, axis.size):
        multiply(use.receive(step), parts[(axis.rank - step) % axis.size])
    return use


class ScatteredProduct:
    """The sum over ranks of products of all rows, each rank its part of them.

    Construction sends what the others need; `finish` waits for theirs.

    Args:
        rows: [t m, in], of which rank r gets the r-th part.
        multiply: writes the product of some rows.
        width: of the product.
        exchange: between the ranks.
        before_sending: called between the first product and the first message.
        dtype: of the product; None: the rows'.
    """

    def __init__(
        self,
        rows: Tensor,
        multiply: Multiply,
        width: int,
        exchange: Exchange,
        before_sending: Callable[[], None] = lambda: None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._axis = axis = exchange.axis
        parts = rows.unflatten(0, (axis.size, -1))
        self._use: Use | None = None
        for step in range(1, axis.size):
            part = rows.new_empty(parts.shape[1], width, dtype=dtype)
            multiply(parts[(axis.rank + step) % axis.size], part)
            if self._use is None:
                before_sending()
                self._use = exchange.open(part)
            else:
                self._use.computing()
            self._use.send(step, part)
        self._own = rows.new_empty(parts.shape[1], width, dtype=dtype)
        multiply(parts[axis.rank], self._own)
        assert self._use is not None
        self._use.computing()

    def finish(self) -> Tensor:
        """[m, out]."""
        assert self._use is not None
        steps = range(1, self._axis.size)
        if len(steps) == 1:
            self._own += self._use.receive(1)
        else:  # rounded once
            arrived = [self._use.receive(step) for step in steps]
            total = self._own.float()
            for part in arrived:
                total += part
            self._own.copy_(total)
        self._use.close()
        return self._own


def overlapped_linear(
    x: Tensor,
    weight: nn.Parameter,
    bias: Tensor | None,
    exchange: Exchange,
    *,
    scatters: bool,
    queue: WorkQueue | None = None,
    slot: GradientSlot | None = None,
) -> Tensor:
    """x W^T + b of a split layer, in the tensors' own format.

    Args:
        x: [s/t, b, in], this rank's part, where the layer is split by columns; else [s, b, in].
        weight: [..., out, in], read as [-1, in].
        bias: [out] after flattening, or None. Of a layer split by rows the caller adds it.
        exchange: between the ranks.
        scatters: the layer is split by rows.
        queue: see `linear.parallel_linear`.
        slot: likewise.

    Returns:
        [s, b, out] where it is split by columns; else [s/t, b, out].
    """
    assert bias is None or not scatters, "it would be added on every rank"
    owner = None if queue is None and slot is None else Owner(weight, queue, slot)
    x, matrix = arguments(x, weight, owner)
    bias = None if bias is None else bias.flatten()
    return _OverlappedProduct.apply(x, matrix, bias, exchange, scatters, owner)


class _ArrivingInput:
    """`WeightProduct` of a layer split by columns: the others' rows of the input travel during
    the product of the input's gradient."""

    def __init__(self, x: Tensor, grad: Tensor, exchange: Exchange) -> None:
        self._rows, self._grad, self._exchange = x.flatten(0, -2), grad, exchange
        self._use: Use | None = None
        self._has_arrived = False

    def start(self) -> None:
        """See `WeightProduct`."""
        self._use = self._exchange.open(self._rows)
        for step in range(1, self._exchange.axis.size):
            self._use.send(step, self._rows)

    def arrive(self) -> None:
        """Wait for the others' rows, where they have been asked for and are not there."""
        if self._use is None or self._has_arrived:
            return
        self._use.computing()
        for step in range(1, self._exchange.axis.size):
            self._use.receive(step)
        self._has_arrived = True

    def compute(self, into: Tensor, *, accumulate: bool) -> None:
        """See `WeightProduct`."""
        self.arrive()
        assert self._use is not None, "compute before start"
        weight_gradient(self._grad, self._use.whole(self._rows), into, accumulate=accumulate)
        self._use.close()


class _ArrivedGradient:
    """`WeightProduct` of a layer split by rows: the others' rows of the output's gradient came for
    the product of the input's gradient.

    Args:
        x: [s, b, in].
        own: [m, out], this rank's rows of the gradient.
        use: has received the others.
        waits: the product is for later: what came is copied.
    """

    def __init__(self, x: Tensor, own: Tensor, use: Use, *, waits: bool) -> None:
        self._x, self._own, self._use = x, own, use
        self._copy: Tensor | None = None
        if waits:
            self._copy = use.whole(own).clone()
            use.close()

    def start(self) -> None:
        """See `WeightProduct`."""

    def compute(self, into: Tensor, *, accumulate: bool) -> None:
        """See `WeightProduct`."""
        if self._copy is not None:
            weight_gradient(self._copy, self._x, into, accumulate=accumulate)
            return
        weight_gradient(self._use.whole(self._own), self._x, into, accumulate=accumulate)
        self._use.close()


class _OverlappedProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        exchange: Exchange,
        scatters: bool,
        owner: Owner | None,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.exchange, ctx.scatters, ctx.owner = exchange, scatters, owner
        rows, size = x.flatten(0, -2).contiguous(), exchange.axis.size
        if scatters:
            part = ScatteredProduct(rows, _by(weight.t()), weight.shape[0], exchange).finish()
            return part.view(x.shape[0] // size, *x.shape[1:-1], -1)
        out = rows.new_empty(size * rows.shape[0], weight.shape[0])
        gathered_product(rows, _by(weight.t(), bias), out, exchange).close()
        return out.view(size * x.shape[0], *x.shape[1:-1], -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        if ctx.owner is not None:
            needs_weight = ctx.owner.weight.requires_grad
        rows = grad.flatten(0, -2).contiguous()
        backward = _backward_of_row if ctx.scatters else _backward_of_column
        input_grad, weight_grad = backward(ctx, x, weight, rows, needs_input, needs_weight)
        bias_grad = rows.sum(0) if needs_bias else None
        input_grad = None if input_grad is None else input_grad.view_as(x)
        return input_grad, weight_grad, bias_grad, None, None, None


def _backward_of_column(
    ctx: Any, x: Tensor, weight: Tensor, grad: Tensor, needs_input: bool, needs_weight: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of input [m, in] and weight, from the output's [t m, out]."""
    product = _ArrivingInput(x, grad, ctx.exchange)
    if needs_weight and not (ctx.owner is not None and ctx.owner.waits):
        product.start()
    summing = None
    if needs_input:
        summing = ScatteredProduct(
            grad, _by(weight), weight.shape[1], ctx.exchange, before_sending=product.arrive
        )
    weight_grad = weight_gradient_of(product, weight, ctx.owner) if needs_weight else None
    return None if summing is None else summing.finish(), weight_grad


def _backward_of_row(
    ctx: Any, x: Tensor, weight: Tensor, grad: Tensor, needs_input: bool, needs_weight: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of input [t m, in] and weight, from this rank's part [m, out] of the output's."""
    size, multiply = ctx.exchange.axis.size, _by(weight) if needs_input else not_at_all
    input_grad = grad.new_empty(size * grad.shape[0], weight.shape[1] if needs_input else 0)
    use = gathered_product(grad, multiply, input_grad, ctx.exchange)
    weight_grad = None
    if needs_weight:
        waits = ctx.owner is not None and ctx.owner.waits
        product = _ArrivedGradient(x, grad, use, waits=waits)
        weight_grad = weight_gradient_of(product, weight, ctx.owner)
    else:
        use.close()
    return input_grad if needs_input else None, weight_grad


def _by(matrix: Tensor, bias: Tensor | None = None) -> Multiply:
    """Multiply rows by a matrix [in, out] and add a vector [out]."""

    def multiply(rows: Tensor, into: Tensor) -> None:
        if bias is None:
            torch.mm(rows, matrix, out=into)
        else:
            torch.addmm(bias, rows, matrix, out=into)

    return multiply


def not_at_all(rows: Tensor, into: Tensor) -> None:
    """The `Multiply` of a gradient that nobody asks for."""
