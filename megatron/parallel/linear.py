"""Matrix products of split layers, overlapped with communication.

A product has two independent properties: the number format of its operands (see
`products.Products`) and the transport that brings the operands to the ranks that need them:

- `CollectiveTransport` uses collectives before and after the product, or none. If every rank holds
  different rows of the weight [out, in], the backward pass has two products: one for the input's
  gradient, which must be summed over the ranks, and one for the weight's gradient. The sum runs
  during the second product.
  With sequence parallelism (Korthikanti et al., 2022), each rank keeps a shard of the input along
  dimension 0. The forward pass gathers the shards, the backward pass gathers them again during the
  first product, and the sum is a reduce-scatter.
- `OverlappedColumn`: a column-parallel layer gathers its input shard by shard. A rank first
  multiplies its own rows, and then the other ranks' rows as they arrive.
- `OverlappedRow`: a row-parallel layer reduce-scatters its output shard by shard. A rank first
  multiplies the rows that other ranks need and sends the results while it multiplies its own rows.
  It then adds the results that the other ranks have sent for its rows.

The backward pass of a gathered product is a scattered one, and vice versa. The other ranks' rows
that the weight's gradient needs are also sent during a product (Wang et al., "Overlap Communication
with Dependent Computation via Decomposition", 2023). Every transport computes the same sums, but
the library may choose another kernel for a product with fewer rows, so the last bits may differ.
With FP8, shards of the input are cast first and sent in 8 bits with every transport. Shards of the
output's gradient are sent in 8 bits too, except by `CollectiveTransport`, which sends 16 bits.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.parallel.collectives import NO_COMMUNICATION, Communication, Pending
from megatron.parallel.exchange import Exchange, Use
from megatron.parallel.pipeline.weight_gradients import WeightGradientQueue
from megatron.parallel.products import PLAIN, LinearCall, Operand, Products, RowOperands
from megatron.parallel.quantized import PackedWeight, unpacked

WeightSlot = Callable[[], AbstractContextManager[tuple[Tensor, bool]]]
"""A destination, outside autograd, for the weight gradient of one use of a weight.

A backward pass enters the context once. The context yields the gradient [rows, columns] and whether
to add to it instead of overwriting it. When the context ends, the contribution of this use is
complete.
"""


class SavedTensors(NamedTuple):
    """The tensors that the forward pass saves for the backward pass.

    Attributes:
        x: The input, or this rank's shard of it; `None` if the backward pass does not need it.
        weight: The weight [out, in].
        operands: The tensors that the number format saves.
    """

    x: Tensor | None
    weight: Tensor
    operands: Operand


class WeightWork(Protocol):
    """A weight gradient that has not been computed yet."""

    def start(self) -> None:
        """Start gathering the operands of which this rank has only a shard."""

    def compute(self, into: Tensor, *, accumulate: bool) -> None:
        """Write the gradient to `into` [rows, columns], or add it if `accumulate`."""


class WeightProduct:
    """The product grad^T x for a weight's gradient, which has not been computed yet.

    In this class, both operands are complete. Subclasses may have to gather the input.

    Args:
        products: The products of the layer.
        saved: The tensors saved by the forward pass.
        grad: The prepared gradient of the output.
        use: The use of an exchange whose memory holds an operand, if any. `compute` closes it.
    """

    def __init__(
        self, products: Products, saved: SavedTensors, grad: Operand, use: Use | None = None
    ) -> None:
        """Store the operands."""
        self._products, self._grad, self._use = products, grad, use
        self._x, _, self._operands = saved

    def start(self) -> None:
        """Start gathering the input if only a shard was saved; collective in this case."""

    def whole_input(self) -> Tensor | None:
        """Return the whole input, or `None` if it was not saved."""
        return self._x

    def compute(self, into: Tensor, *, accumulate: bool) -> None:
        """Write the gradient to `into` [out, in], or add it if `accumulate`."""
        x = self.whole_input()
        self._products.weight_gradient(self._grad, self._operands, x, into, accumulate=accumulate)
        if self._use is not None:
            self._use.close()


@dataclass(frozen=True)
class DetachedWeight:
    """A weight whose gradient is computed outside autograd.

    Attributes:
        weight: The parameter to which the gradient belongs.
        queue: The queue to which the product for the weight's gradient may be deferred.
        slot: The destination of the weight's gradient; `None` leaves the gradient to autograd.
    """

    weight: Tensor
    queue: WeightGradientQueue | None
    slot: WeightSlot | None

    @property
    def is_deferred(self) -> bool:
        """Whether the product that computes the gradient is deferred."""
        return self.queue is not None and self.queue.is_collecting

    def accept(self, product: WeightWork, later: list[Callable[[], None]] | None = None) -> None:
        """Compute the gradient now or later in this backward pass, or defer it to the queue.

        Args:
            product: The product that computes the gradient. It must already be started if
                the gradient is computed now.
            later: A list of functions that this backward pass will call, to which the computation
                is added if it is not deferred; `None` computes the gradient now.
        """
        if self.is_deferred:
            assert self.queue is not None
            self.queue.push(partial(self._compute, product, starts=True))
        elif later is not None:
            later.append(partial(self._compute, product, starts=True))
        else:
            self._compute(product)

    @torch.no_grad()
    def _compute(self, product: WeightWork, *, starts: bool = False) -> None:
        """Add the product to the gradient: in the slot or, if there is none, through autograd."""
        if starts:
            product.start()
        if self.slot is None:
            value = torch.empty_like(self.weight.flatten(0, -2))
            product.compute(value, accumulate=False)
            torch.autograd.backward(self.weight, value.view_as(self.weight))
            return
        with self.slot() as (into, accumulate):
            product.compute(into, accumulate=accumulate)


class NeededGradients(NamedTuple):
    """The gradients that a backward pass must compute.

    Attributes:
        input: Whether the input's gradient is needed.
        weight: Whether the weight's gradient is needed.
        defers_weight: Whether the product for the weight's gradient is deferred.
    """

    input: bool
    weight: bool
    defers_weight: bool


Finish = Callable[[], Tensor | None]
"""A function that waits for the input's gradient and returns it, or `None` if it is not needed."""


class Transport(Protocol):
    """A method of bringing a product's operands to the ranks that need them."""

    def forward(self, products: Products, call: LinearCall) -> tuple[Tensor, Operand]:
        """Return the output and the tensors to save in addition to the input and the weight.

        Args:
            products: The products of the layer.
            call: The arguments of the layer, with an input [s, b, in] or [s/t, b, in].
        """

    def backward(
        self, products: Products, grad: Tensor, saved: SavedTensors, needed: NeededGradients
    ) -> tuple[WeightProduct, Finish]:
        """Start computing the input's gradient.

        Args:
            products: The products of the layer.
            grad: The gradient of the output, in the output's shape.
            saved: The tensors saved by the forward pass.
            needed: The gradients to compute. The product for the weight's gradient is started
                unless it is deferred or not needed.

        Returns:
            The product for the weight's gradient, and a function that finishes the input's
            gradient.
        """


def parallel_linear(
    call: LinearCall,
    transport: Transport | None = None,
    queue: WeightGradientQueue | None = None,
    slot: WeightSlot | None = None,
    products: Products = PLAIN,
) -> Tensor:
    """Return x W^T + b.

    Args:
        call: The arguments of the layer: the input [s, b, in] or [s/t, b, in]; the weight
            [..., out, in], which is flattened to two dimensions; and the bias, which is flattened
            to [out].
        transport: How operands reach the ranks that need them; `None` if each rank already has its
            operands.
        queue: The queue to which the backward pass defers the product for the weight's gradient
            while the queue is collecting. The deferred work accumulates its result as autograd
            would, including hooks. Running the work is collective if the input is split along the
            sequence.
        slot: The destination of the weight's gradient; `None` leaves the gradient to autograd.
        products: The products of the layer.

    Returns:
        The output [s, b, out], or [s/t, b, out] with an `OverlappedRow`. Without a transport, its
        leading dimensions are those of the input.
    """
    x, weight, bias, training = call
    bias = None if bias is None else bias.flatten()
    if queue is None and slot is None:
        # Autograd would keep the values of a packed weight. `_Product` keeps only its codes.
        is_plain = products.matches_autograd and not isinstance(weight, PackedWeight)
        if transport is None and is_plain:
            return F.linear(x, weight.flatten(0, -2), bias)
        detached, matrix = None, weight.flatten(0, -2)
    else:
        # Detach the weight. Otherwise the parameter's hooks would run in every backward pass, even
        # without a gradient.
        detached, matrix = DetachedWeight(weight, queue, slot), weight.detach().flatten(0, -2)
        if not x.requires_grad and torch.is_grad_enabled():
            x = x.detach().requires_grad_()  # backward must reach this function
    transport = transport or NO_TRANSPORT
    return _Product.apply(x, matrix, bias, transport, products, detached, training)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        transport: Transport,
        products: Products,
        detached: DetachedWeight | None,
        training: bool,
    ) -> Tensor:
        out, operands = transport.forward(products, LinearCall(x, weight, bias, training))
        # Only the weight's gradient needs the input, and a frozen weight has no gradient.
        keeps_input = products.keeps_input and (detached is not None or ctx.needs_input_grad[1])
        ctx.save_for_backward(x if keeps_input else None, weight, *operands)
        ctx.transport, ctx.products, ctx.detached = transport, products, detached
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, *operands = ctx.saved_tensors
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        detached: DetachedWeight | None = ctx.detached
        is_deferred = False
        if detached is not None:
            needs_weight, is_deferred = detached.weight.requires_grad, detached.is_deferred
        needed = NeededGradients(needs_input, needs_weight, is_deferred)
        saved = SavedTensors(x, weight, tuple(operands))
        product, finish = ctx.transport.backward(ctx.products, grad, saved, needed)
        weight_grad = None
        if needs_weight and detached is not None:
            detached.accept(product)
        elif needs_weight:
            weight_grad = torch.empty_like(weight)
            product.compute(weight_grad, accumulate=False)
        bias_grad = grad.flatten(0, -2).sum(0) if needs_bias else None
        return finish(), weight_grad, bias_grad, None, None, None, None


class CollectiveTransport:
    """A transport that runs collectives before and after whole products.

    Args:
        communication: The collectives to use.
    """

    def __init__(self, communication: Communication) -> None:
        """Store the collectives."""
        self._communication = communication

    def forward(self, products: Products, call: LinearCall) -> tuple[Tensor, Operand]:
        """Return the output, and the tensors that the number format saves."""
        return products.forward(call, self._communication)

    def backward(
        self, products: Products, grad: Tensor, saved: SavedTensors, needed: NeededGradients
    ) -> tuple[WeightProduct, Finish]:
        """Gather the input, multiply, and start summing the input's gradient."""
        prepared = products.prepare(grad)
        product = _GatheredInput(products, saved, prepared, self._communication)
        if needed.weight and not needed.defers_weight:
            product.start()
        if not needed.input:
            return product, lambda: None
        input_grad = products.input_gradient(prepared, saved.operands)
        summing = self._communication.start_sum(input_grad.view(*grad.shape[:-1], -1))
        return product, summing.wait


NO_TRANSPORT = CollectiveTransport(NO_COMMUNICATION)


def collective_transport(communication: Communication) -> Transport | None:
    """Return a transport that uses these collectives, or `None` if the axis has one process."""
    return None if communication.axis.size == 1 else CollectiveTransport(communication)


class _GatheredInput(WeightProduct):
    """A `WeightProduct` that gathers its input with a collective if only a shard was saved."""

    def __init__(
        self, products: Products, saved: SavedTensors, grad: Operand, communication: Communication
    ) -> None:
        super().__init__(products, saved, grad)
        self._communication = communication
        self._gathering: Pending | None = None

    def start(self) -> None:
        if self._x is not None:
            self._gathering = self._communication.start_gather(self._x)

    def whole_input(self) -> Tensor | None:
        return None if self._gathering is None else self._gathering.wait()


Multiply = Callable[[Tensor, Tensor], None]
"""A function that writes the product of rows [m, in] to a tensor [m, out]."""


def gathered_product(rows: Tensor, multiply: Multiply, out: Tensor, exchange: Exchange) -> Use:
    """Multiply the rows of all ranks as they arrive.

    Args:
        rows: This rank's rows [m, in], contiguous.
        multiply: A function that writes the product of some rows.
        out: The memory for the result, [t m, out].
        exchange: The exchange between the ranks.

    Returns:
        The use of the exchange. The caller must close it after reading its `whole` [t m, in].
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
    """A product whose rows are reduce-scattered over the ranks.

    The constructor multiplies all rows and sends the results that other ranks need. `finish` adds
    the results that other ranks have sent to this rank's own.

    Args:
        rows: All rows [t m, in]; rank r gets the result of the r-th m rows.
        multiply: A function that writes the product of some rows.
        width: The number of columns of the product.
        exchange: The exchange between the ranks.
        dtype: The data type of the product.
        before_sending: A function to call between the first product and the first message.
    """

    def __init__(
        self,
        rows: Tensor,
        multiply: Multiply,
        width: int,
        exchange: Exchange,
        dtype: torch.dtype,
        before_sending: Callable[[], None] = lambda: None,
    ) -> None:
        """Multiply all rows, and send the results that other ranks need."""
        self._axis = axis = exchange.axis
        parts = rows.unflatten(0, (axis.size, -1))

        def product(step: int) -> Tensor:
            part = rows.new_empty(parts.shape[1], width, dtype=dtype)
            multiply(parts[(axis.rank + step) % axis.size], part)
            return part

        part = product(1)
        before_sending()
        self._use = exchange.open(part)
        self._use.send(1, part)
        for step in range(2, axis.size):
            part = product(step)
            self._use.computing()
            self._use.send(step, part)
        self._own = product(0)
        self._use.computing()

    def finish(self) -> Tensor:
        """Return this rank's rows of the sum, [m, out]."""
        steps = range(1, self._axis.size)
        if len(steps) == 1:
            self._own += self._use.receive(1)
        else:  # so that the sum is rounded once
            received = [self._use.receive(step) for step in steps]
            total = self._own.float()
            for part in received:
                total += part
            self._own.copy_(total)
        self._use.close()
        return self._own


class OverlappedColumn:
    """A transport that gathers a product's input shard by shard while the product is computed.

    Args:
        exchange: The exchange between the ranks.
    """

    def __init__(self, exchange: Exchange) -> None:
        """Store the exchange."""
        self._exchange = exchange

    def fits(self, x: Tensor, weight: Tensor) -> bool:
        """Return whether the ranks' messages, forward and backward, fit into the exchange."""
        return self._exchange.fits(x.numel(), x.dtype)

    def forward(self, products: Products, call: LinearCall) -> tuple[Tensor, Operand]:
        """Return the output [s, b, out], given this rank's shard [s/t, b, in] of the input."""
        x, weight, bias, training = call
        rows, axis = x.flatten(0, -2).contiguous(), self._exchange.axis
        by_out, by_in = products.weight_operands(weight)
        operand = products.prepare_input(rows, axis, training=training)
        out = rows.new_empty(axis.size * rows.shape[0], weight.shape[0])
        multiply = partial(products.multiply_rows, RowOperands(operand, by_out, bias))
        own = products.rows_of(operand)
        use = gathered_product(own, multiply, out, self._exchange)
        if not products.keeps_input:
            operand = products.with_all_rows(operand, use.whole(own), copy=False)
        use.close()
        shape = (axis.size * x.shape[0], *x.shape[1:-1], -1)
        return out.view(shape), products.keep(by_in, operand)

    def backward(
        self, products: Products, grad: Tensor, saved: SavedTensors, needed: NeededGradients
    ) -> tuple[WeightProduct, Finish]:
        """Reduce-scatter the input's gradient while the other ranks' rows of the input arrive."""
        rows, exchange = grad.flatten(0, -2).contiguous(), self._exchange
        operand = products.prepare(rows)
        product = _ArrivingInput(products, saved, operand, exchange)
        if needed.weight and not needed.defers_weight:
            product.start()
        if not needed.input:
            return product, lambda: None
        weight = tuple(map(unpacked, saved.operands))  # unpacked once for all products
        operands = RowOperands(operand, weight, backward=True)
        multiply, width = partial(products.multiply_rows, operands), saved.weight.shape[1]
        own = products.rows_of(operand)
        scattered = ScatteredProduct(own, multiply, width, exchange, grad.dtype, product.arrive)
        shape = (grad.shape[0] // exchange.axis.size, *grad.shape[1:-1], -1)
        return product, lambda: scattered.finish().view(shape)


class _ArrivingInput(WeightProduct):
    """A `WeightProduct` that receives the other ranks' input rows while another product runs."""

    def __init__(
        self, products: Products, saved: SavedTensors, grad: Operand, exchange: Exchange
    ) -> None:
        super().__init__(products, saved, grad)
        self._exchange = exchange
        self._rows = None if self._x is None else self._x.flatten(0, -2).contiguous()
        self._has_arrived = False

    def start(self) -> None:
        if self._rows is not None:
            self._use = self._exchange.open(self._rows)
            for step in range(1, self._exchange.axis.size):
                self._use.send(step, self._rows)

    def arrive(self) -> None:
        """Wait for the other ranks' rows, if they were requested and have not arrived."""
        if self._use is None or self._has_arrived:
            return
        self._use.computing()
        for step in range(1, self._exchange.axis.size):
            self._use.receive(step)
        self._has_arrived = True

    def whole_input(self) -> Tensor | None:
        self.arrive()
        if self._rows is None:
            return None
        assert self._use is not None, "compute before start"
        return self._use.whole(self._rows)


class OverlappedRow:
    """A transport that reduce-scatters a product's output shard by shard while it is computed.

    Args:
        exchange: The exchange between the ranks.
    """

    def __init__(self, exchange: Exchange) -> None:
        """Store the exchange."""
        self._exchange = exchange

    def fits(self, x: Tensor, weight: Tensor) -> bool:
        """Return whether the ranks' messages, forward and backward, fit into the exchange."""
        rows = x.shape[:-1].numel() // self._exchange.axis.size
        return self._exchange.fits(rows * weight.shape[:-1].numel(), x.dtype)

    def forward(self, products: Products, call: LinearCall) -> tuple[Tensor, Operand]:
        """Return this rank's shard [s/t, b, out] of the output, given the input [s, b, in]."""
        x, weight, bias, training = call
        assert bias is None, "a bias would be added on every rank"
        exchange = self._exchange
        by_out, by_in = products.weight_operands(weight)
        operand = products.prepare_input(x.flatten(0, -2).contiguous(), None, training=training)
        multiply = partial(products.multiply_rows, RowOperands(operand, by_out))
        rows, width = products.rows_of(operand), weight.shape[0]
        part = ScatteredProduct(rows, multiply, width, exchange, x.dtype).finish()
        shape = (x.shape[0] // exchange.axis.size, *x.shape[1:-1], -1)
        return part.view(shape), products.keep(by_in, operand)

    def backward(
        self, products: Products, grad: Tensor, saved: SavedTensors, needed: NeededGradients
    ) -> tuple[WeightProduct, Finish]:
        """Gather the output's gradient and multiply the ranks' rows as they arrive."""
        rows, exchange = grad.flatten(0, -2).contiguous(), self._exchange
        operand = products.prepare(rows, exchange.axis)
        weight = tuple(map(unpacked, saved.operands)) if needed.input else saved.operands
        operands = RowOperands(operand, weight, backward=True)

        def multiply(part: Tensor, into: Tensor) -> None:
            if needed.input:
                products.multiply_rows(operands, part, into)

        size, width = exchange.axis.size, saved.weight.shape[1] if needed.input else 0
        input_grad = rows.new_empty(size * rows.shape[0], width)
        own = products.rows_of(operand)
        use = gathered_product(own, multiply, input_grad, exchange)
        if needed.weight:
            operand = products.with_all_rows(operand, use.whole(own), copy=needed.defers_weight)
        reads_later = needed.weight and not needed.defers_weight
        if not reads_later:
            use.close()
        result = input_grad.view(size * grad.shape[0], *grad.shape[1:-1], -1)
        product = WeightProduct(products, saved, operand, use if reads_later else None)
        return product, lambda: result if needed.input else None
