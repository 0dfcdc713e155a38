"""Gradient of a linear layer's weight, added to what a gradient buffer holds, by the product
itself: no 16-bit result that another pass would add."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.device import Device


def weight_gradient(grad: Tensor, x: Tensor, into: Tensor, *, accumulate: bool) -> None:
    """into = grad^T x, or into += grad^T x, summed in fp32.

    On a GPU a library product with 16-bit inputs and fp32 output, which runs at full speed;
    elsewhere the inputs are converted.

    Args:
        grad: [..., out], of the layer's output.
        x: [..., in], its input, in the same format.
        into: [out, in], in fp32 or the inputs' format.
        accumulate: add to what `into` holds, else write over it, whatever it is.
    """
    left, right = grad.flatten(0, -2).t(), x.flatten(0, -2)
    beta = 1 if accumulate else 0
    if into.dtype == x.dtype:
        torch.addmm(into, left, right, beta=beta, out=into)
    elif Device(into.device).is_gpu:
        torch.addmm(into, left, right, beta=beta, out_dtype=into.dtype, out=into)
    else:
        torch.addmm(into, left.to(into.dtype), right.to(into.dtype), beta=beta, out=into)
