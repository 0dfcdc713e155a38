"""The products of `overlapped_products` in 8 bits.

All ranks' rows of a factor have one scale, so parts are cast first and travel in 8 bits: those of
an input as without cutting, and those of the output's gradient, which otherwise travel in 16. A
whole factor is transposed for the weight's gradient when it has arrived.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from megatron.kernels.fp8 import Fp8
from megatron.parallel.exchange import Exchange
from megatron.parallel.fp8_products import Fp8Products
from megatron.parallel.gradients import GradientSlot
from megatron.parallel.linear import Owner, WorkQueue, arguments, weight_gradient_of
from megatron.parallel.overlapped_products import (
    Multiply,
    ScatteredProduct,
    gathered_product,
    not_at_all,
)


def overlapped_fp8_linear(
    x: Tensor,
    weight: nn.Parameter,
    bias: Tensor | None,
    products: Fp8Products,
    exchange: Exchange,
    *,
    scatters: bool,
    queue: WorkQueue | None = None,
    slot: GradientSlot | None = None,
    training: bool = True,
) -> Tensor:
    """See `overlapped_products.overlapped_linear`.

    Args:
        products: of the layer, which `can_be_cut`.
        training: see `Products.forward`.
    """
    assert bias is None or not scatters, "it would be added on every rank"
    owner = None if queue is None and slot is None else Owner(weight, queue, slot)
    x, matrix = arguments(x, weight, owner)
    bias = None if bias is None else bias.flatten()
    return _OverlappedFp8.apply(x, matrix, bias, products, exchange, scatters, owner, training)


class _Factors:
    """`WeightProduct` of two transposes [out, s] and [in, s]."""

    def __init__(self, products: Fp8Products, grad: Fp8, x: Fp8) -> None:
        self._products, self._grad, self._x = products, grad, x

    def start(self) -> None:
        """See `WeightProduct`."""

    def compute(self, into: Tensor, *, accumulate: bool) -> None:
        """See `WeightProduct`."""
        self._products.multiply(self._grad, self._x, into, accumulate=accumulate)


class _OverlappedFp8(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        products: Fp8Products,
        exchange: Exchange,
        scatters: bool,
        owner: Owner | None,
        training: bool,
    ) -> Tensor:
        rows, size = x.flatten(0, -2).contiguous(), exchange.axis.size
        by_out, by_in = products.weight_factors(weight)
        if scatters:
            left, turned = products.input_factors(rows, training=training)
            multiply = _by(products, left, by_out, fast=True)
            width = weight.shape[0]
            cut = ScatteredProduct(_bytes(left), multiply, width, exchange, dtype=x.dtype)
            out = cut.finish()
            shape = (x.shape[0] // size, *x.shape[1:-1], -1)
        else:
            left = products.input_part(rows, exchange.axis, training=training)
            out = rows.new_empty(size * rows.shape[0], weight.shape[0])
            multiply = _by(products, left, by_out, bias, fast=True)
            turned = _gathered(products, left, multiply, out, exchange)
            shape = (size * x.shape[0], *x.shape[1:-1], -1)
        ctx.save_for_backward(weight, by_in.values, by_in.inverse, turned.values, turned.inverse)
        ctx.products, ctx.exchange, ctx.scatters = products, exchange, scatters
        ctx.owner, ctx.shape = owner, x.shape
        return out.view(shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, *saved = ctx.saved_tensors
        by_in, x = Fp8(*saved[:2]), Fp8(*saved[2:])
        products, exchange = ctx.products, ctx.exchange
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        if ctx.owner is not None:
            needs_weight = ctx.owner.weight.requires_grad
        rows, width = grad.flatten(0, -2).contiguous(), weight.shape[1] if needs_input else 0
        summing, input_grad = None, None
        if ctx.scatters:
            left = products.gradient_part(rows, exchange.axis)
            multiply = _by(products, left, by_in) if needs_input else not_at_all
            input_grad = rows.new_empty(exchange.axis.size * rows.shape[0], width)
            turned = _gathered(products, left, multiply, input_grad, exchange)
        else:
            left, turned = products.gradient_factors(rows)
            if needs_input:
                summing = ScatteredProduct(
                    _bytes(left), _by(products, left, by_in), width, exchange, dtype=rows.dtype
                )
        product, weight_grad = _Factors(products, turned, x), None
        if needs_weight:
            weight_grad = weight_gradient_of(product, weight, ctx.owner)
        bias_grad = rows.sum(0) if needs_bias else None
        if summing is not None:
            input_grad = summing.finish()
        result = input_grad.view(ctx.shape) if needs_input and input_grad is not None else None
        return result, weight_grad, bias_grad, None, None, None, None, None


def _gathered(
    products: Fp8Products, part: Fp8, multiply: Multiply, out: Tensor, exchange: Exchange
) -> Fp8:
    """The product of all ranks' rows, written to `out`; their transpose [k, t m]."""
    use = gathered_product(_bytes(part), multiply, out, exchange)
    whole = Fp8(use.whole(_bytes(part)).view(part.values.dtype), part.inverse)
    turned = products.transpose(whole)
    use.close()
    return turned


def _bytes(matrix: Fp8) -> Tensor:
    """As it travels: gloo knows no fp8."""
    return matrix.values.view(torch.uint8)


def _by(
    products: Fp8Products,
    left: Fp8,
    right: Fp8,
    bias: Tensor | None = None,
    *,
    fast: bool = False,
) -> Multiply:
    """Multiply rows that are scaled as `left` by the transpose of `right`, and add a vector."""

    def multiply(rows: Tensor, into: Tensor) -> None:
        part = Fp8(rows.view(left.values.dtype), left.inverse)
        products.multiply(part, right, into, bias=bias, fast=fast)

    return multiply
