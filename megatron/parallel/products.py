"""The three matrix products of a linear layer, in a number format.

With x [m, in], weight [out, in] and the output's gradient [m, out]:

    output = x W^T        input gradient = grad W        weight gradient = grad^T x

`Plain` multiplies in the tensors' own format, `InFp32` in fp32, `RowByRow` so that the bits of a
row do not depend on the others. `fp8_products.Fp8Products` multiplies in 8 bits.
"""

from __future__ import annotations

from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

from megatron.kernels.row_product import RowProduct
from megatron.kernels.weight_gradient import weight_gradient
from megatron.parallel.communication import ALONE, Communication

Kept = tuple[Tensor, ...]


class Products(Protocol):
    """How a layer multiplies; one object a layer.

    Forward's `kept` and the layer's gradient, once prepared, are all that the two products of
    backward need, besides the input where `keeps_input`.
    """

    @property
    def keeps_input(self) -> bool:
        """Whether the weight's gradient needs the input itself."""
        ...

    def forward(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        communication: Communication = ALONE,
        *,
        training: bool = True,
    ) -> tuple[Tensor, Kept]:
        """The output, and what to keep.

        Args:
            x: [s, ..., in], or a part along dimension 0, which is gathered.
            weight: [out, in].
            bias: [out].
            communication: says so.
            training: whether statistics of the input may be recorded.

        Returns:
            [s, ..., out], and what to keep.
        """
        ...

    def prepare(self, grad: Tensor) -> Kept:
        """The output's gradient [..., out], as both products of backward take it."""
        ...

    def input_gradient(self, grad: Kept, kept: Kept) -> Tensor:
        """[m, in]."""
        ...

    def weight_gradient(
        self, grad: Kept, kept: Kept, x: Tensor | None, into: Tensor, *, accumulate: bool
    ) -> None:
        """Write [out, in] over what `into` holds, or add it, in its format."""
        ...

    def forget(self) -> None:
        """What is kept from one call to the next is void: the weight has changed, or a device
        begins or ends to record."""
        ...


class Plain:
    """In the tensors' own format; weight gradients are added in fp32 where they are kept so."""

    keeps_input = True

    def forward(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        communication: Communication = ALONE,
        *,
        training: bool = True,
    ) -> tuple[Tensor, Kept]:
        """See `Products`."""
        return self._multiply(communication.start_gather(x).wait(), weight, bias), (weight,)

    def _multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Forward's product, of the whole input."""
        return F.linear(x, weight, bias)

    def prepare(self, grad: Tensor) -> Kept:
        """See `Products`."""
        return (grad.flatten(0, -2),)

    def input_gradient(self, grad: Kept, kept: Kept) -> Tensor:
        """See `Products`."""
        return grad[0] @ kept[0]

    def weight_gradient(
        self, grad: Kept, kept: Kept, x: Tensor | None, into: Tensor, *, accumulate: bool
    ) -> None:
        """See `Products`."""
        assert x is not None
        weight_gradient(grad[0], x, into, accumulate=accumulate)

    def forget(self) -> None:
        """See `Products`."""


PLAIN = Plain()


class InFp32(Plain):
    """In fp32 whatever the format of input and weight; the output is not rounded to it. For a
    layer with few outputs, each of which counts."""

    def _multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x.float(), weight.float(), None if bias is None else bias.float())

    def input_gradient(self, grad: Kept, kept: Kept) -> Tensor:
        """See `Products`."""
        (weight,) = kept
        return (grad[0] @ weight.float()).to(weight.dtype)

    def weight_gradient(
        self, grad: Kept, kept: Kept, x: Tensor | None, into: Tensor, *, accumulate: bool
    ) -> None:
        """See `Products`."""
        assert x is not None
        value = grad[0].t() @ x.flatten(0, -2).float()
        into.copy_(into + value if accumulate else value)


IN_FP32 = InFp32()


class RowByRow(Plain):
    """Forward gives each row the same bits whatever rows come with it."""

    def __init__(self, product: RowProduct) -> None:
        self._product = product

    def _multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return self._product(x.flatten(0, -2), weight, bias).unflatten(0, x.shape[:-1])
