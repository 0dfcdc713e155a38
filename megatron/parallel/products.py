"""The three matrix products of a linear layer in a given number format.

With x [m, in], weight [out, in] and the output's gradient [m, out]:

    output = x W^T        input gradient = grad W        weight gradient = grad^T x

`Products` itself multiplies in the tensors' own format, and `InFp32` in fp32. With `RowByRow`, the
bits of a row do not depend on the other rows. `fp8.Fp8Products` multiplies in 8 bits. How the
operands get to the processes that need them is a separate choice (see `linear`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.kernels.amax import NO_FUSED_AMAXES
from megatron.kernels.weight_gradient import weight_gradient
from megatron.parallel.collectives import ALONE, Communication
from megatron.parallel.layout import Axis

Operand = tuple[Tensor, ...]
"""An operand of a product in the form that a number format uses, such as values with a scale."""


class LinearCall(NamedTuple):
    """The arguments of one call of a linear layer.

    Attributes:
        x: The input [s, ..., in], or a part of it along dimension 0, which is then gathered.
        weight: The weight [out, in].
        bias: The bias [out].
        training: Whether statistics of the input may be recorded.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None = None
    training: bool = True


class RowOperands(NamedTuple):
    """The operands of a product that is computed a few rows at a time.

    Attributes:
        rows: The prepared operand to which the rows belong.
        weight: One of `Products.weight_operands`, or the operand kept for the backward pass.
        bias: The bias to add.
        backward: Whether the product computes the input's gradient.
    """

    rows: Operand
    weight: Operand
    bias: Tensor | None = None
    backward: bool = False


class Products:
    """The products of one layer; in this class, in the tensors' own number format.

    Other formats extend this class. The two products of the backward pass need only what `forward`
    keeps, the prepared gradient, and the input if `keeps_input`. Weight gradients that are kept in
    fp32 are accumulated in fp32.

    Attributes:
        keeps_input: Whether the weight's gradient needs the input itself.
        matches_autograd: Whether `F.linear` under autograd computes the same products.
        can_be_split: Whether products may be computed for some of the rows at a time.
        fused_amaxes: Where kernels store the amaxes of the input and of the output's gradient, for
            a format that casts them.
    """

    keeps_input = True
    matches_autograd = True
    can_be_split = True
    fused_amaxes = NO_FUSED_AMAXES

    def forward(
        self, call: LinearCall, communication: Communication = ALONE
    ) -> tuple[Tensor, Operand]:
        """Return the output [s, ..., out] and the tensors to keep for the backward pass.

        Args:
            call: The arguments.
            communication: The communication that gathers the input.
        """
        x = communication.start_gather(call.x).wait()
        return self._multiply(x, call.weight, call.bias), (call.weight,)

    def _multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the output for the whole input."""
        return F.linear(x, weight, bias)

    def prepare(self, grad: Tensor, axis: Axis | None = None) -> Operand:
        """Return the output's gradient [..., out] in the form that both backward products use.

        Args:
            grad: All rows, or the rows of one rank of an axis.
            axis: The ranks that hold the other rows. All ranks' rows must be cast in the same way.
        """
        return (grad.flatten(0, -2),)

    def input_gradient(self, grad: Operand, saved: Operand) -> Tensor:
        """Return the input's gradient [m, in]."""
        return grad[0] @ saved[0]

    def weight_gradient(
        self, grad: Operand, saved: Operand, x: Tensor | None, into: Tensor, *, accumulate: bool
    ) -> None:
        """Write the gradient [out, in] to `into`, or add it there, in the format of `into`."""
        assert x is not None
        weight_gradient(grad[0], x, into, accumulate=accumulate)

    def forget(self) -> None:
        """Discard everything that is kept between calls.

        Call this when the weight has changed, and when a device starts or stops recording.
        """

    # The same operations in parts, for a transport that splits the product by rows.

    def weight_operands(self, weight: Tensor) -> tuple[Operand, Operand]:
        """Return the weight in two forms, for the output and for the input gradient."""
        return (weight.t(),), (weight,)

    def prepare_input(self, x: Tensor, axis: Axis | None, *, training: bool) -> Operand:
        """Return the input [m, in] in the form that the output's product uses, as in `prepare`."""
        return (x,)

    def rows_of(self, operand: Operand) -> Tensor:
        """Return the rows of a prepared operand in the form that is sent."""
        return operand[0]

    def with_all_rows(self, operand: Operand, rows: Tensor, *, copy: bool) -> Operand:
        """Return the operand with all ranks' rows, for the weight's gradient.

        Args:
            operand: The operand of one rank.
            rows: The rows of all ranks. Their memory will soon be reused.
            copy: Whether the result must not share this memory.
        """
        return (rows.clone() if copy else rows,)

    def keep(self, weight: Operand, operand: Operand) -> Operand:
        """Return the tensors to keep for backward, as `forward` does.

        Args:
            weight: The second form of the weight (`weight_operands`).
            operand: The input in the form that the output's product uses (`prepare_input`).
        """
        return weight

    def multiply_rows(self, operands: RowOperands, rows: Tensor, into: Tensor) -> None:
        """Write some rows of the output or of the input's gradient.

        Args:
            operands: The operands of the whole product.
            rows: The rows in the form that is sent.
            into: The memory for the result, [rows, out] or [rows, in].
        """
        if operands.bias is None:
            torch.mm(rows, operands.weight[0], out=into)
        else:
            torch.addmm(operands.bias, rows, operands.weight[0], out=into)


PLAIN = Products()


class InFp32(Products):
    """Products in fp32 for any format of input and weight. The output stays in fp32.

    This class is for layers with a few outputs that need full precision.
    """

    matches_autograd = False
    can_be_split = False

    def _multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x.float(), weight.float(), None if bias is None else bias.float())

    def input_gradient(self, grad: Operand, saved: Operand) -> Tensor:
        """Return grad W, multiplied in fp32, in the weight's format."""
        (weight,) = saved
        return (grad[0] @ weight.float()).to(weight.dtype)

    def weight_gradient(
        self, grad: Operand, saved: Operand, x: Tensor | None, into: Tensor, *, accumulate: bool
    ) -> None:
        """Write grad^T x to `into`, or add it there, multiplied in fp32."""
        assert x is not None
        value = grad[0].t() @ x.flatten(0, -2).float()
        into.copy_(into + value if accumulate else value)


IN_FP32 = InFp32()


class RowByRow(Products):
    """Products whose forward pass computes the same bits for a row regardless of the other rows."""

    matches_autograd = False
    can_be_split = False

    def __init__(self, product: Callable[[Tensor, Tensor, Tensor | None], Tensor]) -> None:
        """Store the function that multiplies x [m, k] by a weight [n, k] and adds a bias [n]."""
        self._product = product

    def _multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return self._product(x.flatten(0, -2), weight, bias).unflatten(0, x.shape[:-1])
