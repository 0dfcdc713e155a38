"""Normalization over the last dimension. Statistics in fp32, result in the weight's type.

`layer_norm` and `rms_norm` normalize; an `AddNorm` also adds what a layer gives to the residual
stream, which the CUDA kernel does in one pass over memory.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.device import Device
from megatron.kernels.amax import Amaxes
from megatron.kernels.library import DTYPE_CODES, VECTOR_BYTES, Kernel, KernelLibrary, aligned

ADD_NORM_FORWARD = Kernel("add_norm_forward", "pppppppppiiiid")
ADD_NORM_BACKWARD = Kernel("add_norm_backward", "ppppppppppppiiiii")
LONGEST_ROW = {2: 16384, 4: 8192}  # elements, by bytes of a weight; rows.cuh has the same


class AddNorm(Protocol):
    """What a model calls."""

    def __call__(
        self,
        residual: Tensor,
        delta: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        epsilon: float,
    ) -> tuple[Tensor, Tensor]:
        """Add to the residual stream, and normalize the sum.

        Args:
            residual: [..., h], of the weights' type or fp32.
            delta: [..., h] of the weights' type; None adds nothing.
            weight: [h].
            bias: [h] for LayerNorm; None for RMSNorm.
            epsilon: added to the variance.

        Returns:
            residual + delta in the residual's type, and its normalization in the weights'.
        """


def choose_add_norm(library: KernelLibrary | None, amaxes: Amaxes | None = None) -> AddNorm:
    """The fused kernel where there is a library, else PyTorch's operations.

    Args:
        library: of kernels.
        amaxes: where the kernel leaves the largest magnitudes of the normalized sum and of delta's
            gradient; None: it measures none.
    """
    return add_norm if library is None else partial(fused_add_norm, library, amaxes=amaxes)


def layer_norm_reference(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
    """(x - mean) / sqrt(var + epsilon) * weight + bias, over the last dimension of [..., h]."""
    x = x.float()
    centred = x - x.mean(dim=-1, keepdim=True)
    variance = centred.square().mean(dim=-1, keepdim=True)
    normal = centred * (variance + epsilon).rsqrt()
    return (normal * weight.float() + bias.float()).to(weight.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
    """The same by PyTorch's fused kernel."""
    if x.dtype == weight.dtype:
        return F.layer_norm(x, weight.shape, weight, bias, epsilon)
    # An fp32 residual stream enters a layer of 16-bit weights.
    out = F.layer_norm(x.float(), weight.shape, weight.float(), bias.float(), epsilon)
    return out.to(weight.dtype)


def rms_norm_reference(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """x / sqrt(mean(x^2) + epsilon) * weight, over the last dimension of [..., h]."""
    x = x.float()
    normal = x * (x.square().mean(dim=-1, keepdim=True) + epsilon).rsqrt()
    return (normal * weight.float()).to(weight.dtype)


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """The same by PyTorch's fused kernel."""
    if x.dtype == weight.dtype:
        return F.rms_norm(x, weight.shape, weight, epsilon)
    return F.rms_norm(x.float(), weight.shape, weight.float(), epsilon).to(weight.dtype)


def add_norm(
    residual: Tensor, delta: Tensor | None, weight: Tensor, bias: Tensor | None, epsilon: float
) -> tuple[Tensor, Tensor]:
    """See `AddNorm`: by PyTorch's operations, one for the sum and one for its norm."""
    total = residual if delta is None else residual + delta
    if bias is None:
        return total, rms_norm(total, weight, epsilon)
    return total, layer_norm(total, weight, bias, epsilon)


def fused_add_norm(
    library: KernelLibrary,
    residual: Tensor,
    delta: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    epsilon: float,
    *,
    amaxes: Amaxes | None = None,
) -> tuple[Tensor, Tensor]:
    """See `AddNorm`: one kernel forward, and in backward one that takes the gradients of both
    results and gives one of the sum, with those of weight and bias (the same bits every time).
    Sizes that the kernel does not take run on PyTorch's operations."""
    if not _fits(residual, delta, weight, bias):
        return add_norm(residual, delta, weight, bias, epsilon)
    total, normal = _AddNorm.apply(residual, delta, weight, bias, epsilon, library, amaxes)
    return total, normal


def _fits(residual: Tensor, delta: Tensor | None, weight: Tensor, bias: Tensor | None) -> bool:
    hidden, kind = weight.numel(), weight.dtype
    return (
        kind in DTYPE_CODES
        and residual.dtype in (kind, torch.float32)
        and (delta is None or delta.dtype == kind)
        and (bias is None or bias.dtype == kind)
        and hidden % (VECTOR_BYTES // kind.itemsize) == 0
        and hidden <= LONGEST_ROW[kind.itemsize]
        and residual.numel() > 0
        and aligned(residual, delta, weight, bias)
    )


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        residual: Tensor,
        delta: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        epsilon: float,
        library: KernelLibrary,
        amaxes: Amaxes | None,
    ) -> tuple[Tensor, Tensor]:
        residual = residual.contiguous()
        delta = None if delta is None else delta.contiguous()
        hidden = weight.numel()
        rows = residual.numel() // hidden
        total = residual.view_as(residual) if delta is None else torch.empty_like(residual)
        normal = torch.empty_like(residual, dtype=weight.dtype)
        rstd = torch.empty(rows, dtype=torch.float32, device=residual.device)
        mean = None if bias is None else torch.empty_like(rstd)
        library.launch(
            ADD_NORM_FORWARD,
            *(residual, delta, weight, bias, total, normal, mean, rstd),
            None if amaxes is None else amaxes.measure(normal),
            *(rows, hidden, DTYPE_CODES[residual.dtype], DTYPE_CODES[weight.dtype], epsilon),
        )
        ctx.save_for_backward(residual if delta is None else total, weight, mean, rstd)
        ctx.set_materialize_grads(False)
        ctx.library, ctx.amaxes = library, amaxes
        ctx.added = delta is not None
        return total, normal

    @staticmethod
    def backward(
        ctx: Any, grad_total: Tensor | None, grad_normal: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        total, weight, mean, rstd = ctx.saved_tensors
        added = ctx.added
        if grad_normal is None:  # only the sum was used
            passed = grad_total.to(weight.dtype) if added and grad_total is not None else None
            return grad_total, passed, *(None,) * 5
        grad, grad_delta, grad_weight, grad_bias = add_norm_backward(
            ctx.library,
            *(total, grad_normal, grad_total, weight, mean, rstd),
            round_for_delta=added and total.dtype != weight.dtype,
            amaxes=ctx.amaxes if added else None,
        )
        for_delta = (grad if grad_delta is None else grad_delta) if added else None
        return grad, for_delta, grad_weight, grad_bias, None, None, None


def add_norm_backward(
    library: KernelLibrary,
    total: Tensor,
    grad_normal: Tensor,
    grad_total: Tensor | None,
    weight: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    *,
    round_for_delta: bool,
    amaxes: Amaxes | None = None,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """Gradients of the sum (in its type, and if asked in the weights'), of weight and of bias.
    With `amaxes` that in the weights' type is measured."""
    hidden, rows = weight.numel(), rstd.numel()
    grad_normal = grad_normal.contiguous()
    grad_total = None if grad_total is None else grad_total.contiguous()
    grad = torch.empty_like(total)
    grad_delta = torch.empty_like(total, dtype=weight.dtype) if round_for_delta else None
    grad_weight = torch.empty_like(weight)
    grad_bias = None if mean is None else torch.empty_like(weight)
    multiprocessors = Device(total.device).multiprocessors
    partial_shape = (1 if mean is None else 2, multiprocessors, hidden)
    partials = torch.empty(partial_shape, dtype=torch.float32, device=total.device)
    library.launch(
        ADD_NORM_BACKWARD,
        *(total, grad_normal, grad_total, weight, mean, rstd),
        *(grad, grad_delta, grad_weight, grad_bias, partials),
        None if amaxes is None else amaxes.measure(grad if grad_delta is None else grad_delta),
        *(multiprocessors, rows, hidden),
        *(DTYPE_CODES[total.dtype], DTYPE_CODES[weight.dtype]),
    )
    return grad, grad_delta, grad_weight, grad_bias
