"""The three matrix products of a linear layer in a given number format.

With x [m, in], weight [out, in] and the output's gradient [m, out]:

    output = x W^T        input gradient = grad W        weight gradient = grad^T x

`Products` itself computes in the tensors' own format, `InFp32` in fp32, and `fp8.Fp8Products` in
FP8. With `RowByRow`, the bits of a row do not depend on the other rows. How operands reach the
ranks that need them is a separate choice (see `linear`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.kernels.amax import NO_FUSED_AMAXES
from megatron.kernels.weight_gradient import weight_gradient
from megatron.parallel.collectives import NO_COMMUNICATION, Communication
from megatron.parallel.layout import Axis

Operand = tuple[Tensor, ...]
"""An operand of a product, as a number format represents it: for example values and their scale."""


class LinearCall(NamedTuple):
    """The arguments of one call of a linear layer.

    Attributes:
        x: The input [s, ..., in], or this rank's shard of it along dimension 0.
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
        weight: The weight: one of `Products.weight_operands`, or as saved for the backward pass.
        bias: The bias [out] to add.
        backward: Whether the product computes the input's gradient.
    """

    rows: Operand
    weight: Operand
    bias: Tensor | None = None
    backward: bool = False


class Products:
    """The products of one layer; in this class, in the tensors' own number format.

    Subclasses implement other formats. The two products of the backward pass need only the tensors
    that `forward` saves, the prepared gradient and, if `keeps_input`, the input. Weight gradients
    stored in fp32 are accumulated in fp32.

    Attributes:
        keeps_input: Whether the product for the weight's gradient needs the input itself.
        matches_autograd: Whether `F.linear` under autograd computes the same products.
        can_be_split: Whether products may be computed a few rows at a time.
        fused_amaxes: Where kernels store the amaxes of the input and of the output's gradient, for
            formats that cast these tensors.
    """

    keeps_input = True
    matches_autograd = True
    can_be_split = True
    fused_amaxes = NO_FUSED_AMAXES

    def forward(
        self, call: LinearCall, communication: Communication = NO_COMMUNICATION
    ) -> tuple[Tensor, Operand]:
        """Return the output [s, ..., out] and the tensors to save for the backward pass.

        Args:
            call: The arguments of the layer.
            communication: The collectives that gather the input.
        """
        x = communication.start_gather(call.x).wait()
        return self._multiply(x, call.weight, call.bias), (call.weight,)

    def _multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the output [s, ..., out] of the whole input [s, ..., in]."""
        return F.linear(x, weight, bias)

    def prepare(self, grad: Tensor, axis: Axis | None = None) -> Operand:
        """Return the output's gradient [..., out] as the operand of both backward products.

        Args:
            grad: All rows of the gradient, or this rank's rows.
            axis: The ranks among which the rows are divided, so that all rows are cast with the
                same scale; `None` if this rank has all rows.
        """
        return (grad.flatten(0, -2),)

    def input_gradient(self, grad: Operand, saved: Operand) -> Tensor:
        """Return the input's gradient grad W, [m, in].

        Args:
            grad: The prepared gradient of the output.
            saved: The tensors that `forward` saved.
        """
        return grad[0] @ saved[0]

    def weight_gradient(
        self, grad: Operand, saved: Operand, x: Tensor | None, into: Tensor, *, accumulate: bool
    ) -> None:
        """Write the weight's gradient grad^T x to `into` [out, in], or add it to `into`.

        Args:
            grad: The prepared gradient of the output.
            saved: The tensors that `forward` saved.
            x: The whole input if `keeps_input`, otherwise `None`.
            into: The memory for the gradient, in the dtype of the result.
            accumulate: Whether to add to `into` instead of overwriting it.
        """
        assert x is not None
        weight_gradient(grad[0], x, into, accumulate=accumulate)

    def forget(self) -> None:
        """Discard everything that is cached between calls.

        Call this when the weight has changed, and when a device starts or stops recording a pass.
        """

    # The same operations for a transport that splits the products by rows.

    def weight_operands(self, weight: Tensor) -> tuple[Operand, Operand]:
        """Return a weight [out, in] as operands for the output and for the input's gradient."""
        return (weight.t(),), (weight,)

    def prepare_input(self, x: Tensor, axis: Axis | None, *, training: bool) -> Operand:
        """Return the input [m, in] as an operand of the product that computes the output.

        Args:
            x: All rows of the input, or this rank's rows.
            axis: The ranks among which the rows are divided, as in `prepare`.
            training: Whether statistics of the input may be recorded.
        """
        return (x,)

    def rows_of(self, operand: Operand) -> Tensor:
        """Return the rows of a prepared operand, as they are sent to other ranks."""
        return operand[0]

    def with_all_rows(self, operand: Operand, rows: Tensor, *, copy: bool) -> Operand:
        """Return the operand with all ranks' rows, for the weight's gradient.

        Args:
            operand: The operand of this rank.
            rows: The rows of all ranks, as `rows_of` returns them, in memory that will be reused.
            copy: Whether to copy the rows, so that the result does not share this memory.
        """
        return (rows.clone() if copy else rows,)

    def keep(self, weight: Operand, operand: Operand) -> Operand:
        """Return the tensors to save for the backward pass, as `forward` does.

        Args:
            weight: The operand for the input's gradient (`weight_operands`).
            operand: The operand for the input (`prepare_input`).
        """
        return weight

    def multiply_rows(self, operands: RowOperands, rows: Tensor, into: Tensor) -> None:
        """Write some rows of the output or of the input's gradient.

        Args:
            operands: The operands of the whole product.
            rows: The rows, as `rows_of` returns them.
            into: The memory for the result, [rows, out] or [rows, in].
        """
        if operands.bias is None:
            torch.mm(rows, operands.weight[0], out=into)
        else:
            torch.addmm(operands.bias, rows, operands.weight[0], out=into)


PLAIN = Products()


class InFp32(Products):
    """Products in fp32 for any dtype of input and weight. The output stays in fp32.

    Use this class for layers with few outputs that need full precision.
    """

    matches_autograd = False
    can_be_split = False

    def _multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x.float(), weight.float(), None if bias is None else bias.float())

    def input_gradient(self, grad: Operand, saved: Operand) -> Tensor:
        """Return the input's gradient grad W, computed in fp32 and cast to the weight's dtype."""
        (weight,) = saved
        return (grad[0] @ weight.float()).to(weight.dtype)

    def weight_gradient(
        self, grad: Operand, saved: Operand, x: Tensor | None, into: Tensor, *, accumulate: bool
    ) -> None:
        """Write grad^T x, computed in fp32, to `into` [out, in], or add it if `accumulate`."""
        assert x is not None
        value = grad[0].t() @ x.flatten(0, -2).float()
        into.copy_(into + value if accumulate else value)


class RowByRow(Products):
    """Products whose forward pass computes the same bits for a row in any batch."""

    matches_autograd = False
    can_be_split = False

    def __init__(self, product: Callable[[Tensor, Tensor, Tensor | None], Tensor]) -> None:
        """Store the function that multiplies x [m, k] by a weight [n, k] and adds a bias [n]."""
        self._product = product

    def _multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return self._product(x.flatten(0, -2), weight, bias).unflatten(0, x.shape[:-1])
