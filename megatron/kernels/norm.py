"""Normalization over the last dimension, with fp32 statistics and results in the weight's dtype.

`normalize` is LayerNorm or RMSNorm. `add_norm` first adds a layer's output to the residual stream.
The CUDA kernel does both in a single pass over memory.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.device import Device
from megatron.kernels.amax import NO_FUSED_AMAXES, FusedAmax, FusedAmaxes, zero_for
from megatron.kernels.library import (
    DTYPE_CODES,
    VECTOR_BYTES,
    Kernel,
    KernelLibrary,
    operator,
    supports,
)
from megatron.kernels.plans import (
    SIZES,
    KernelLaunch,
    Number,
    Pointer,
    column_sums,
    divide_up,
    row_shape,
    row_threads,
    stream_types,
)
from megatron.kernels.sources import instance

LONGEST_ROW = {2: 16384, 4: 8192}  # in elements, by the bytes per weight, as in rows.cuh
_STATIC_SHARED = 1024  # bytes that norm_backward.cu uses, with a margin


class _AddNormForward(NamedTuple):
    """The arguments of a kernel that adds delta to a residual stream and normalizes the sum.

    The normalization is LayerNorm or, without a bias, RMSNorm.
    """

    residual: Pointer  # [rows, hidden] of x_dtype
    delta: Pointer | None  # [rows, hidden] of w_dtype
    weight: Pointer  # [hidden] of w_dtype, like bias
    bias: Pointer | None
    total: Pointer | None  # like residual; only with delta
    normal: Pointer  # [rows, hidden] of w_dtype
    mean: Pointer | None  # fp32 [rows], like rstd
    rstd: Pointer
    amax: Pointer | None  # initially zero; raised to the largest magnitude of normal
    rows: int
    hidden: int
    x_dtype: int
    w_dtype: int
    epsilon: Number

    def plan(self) -> list[KernelLaunch]:
        """Return the kernel launches."""
        x, w = stream_types(self.x_dtype, self.w_dtype)
        shape = row_shape(self.hidden, w, 8 if self.bias is None else 16)
        return [
            KernelLaunch(
                instance("add_norm_forward_kernel", x, w, shape.elements, self.bias is not None),
                (divide_up(self.rows, shape.rows),),
                shape.block,
                (*self[:11], self.epsilon),  # tensors, rows, hidden, epsilon
            )
        ]


class _AddNormBackward(NamedTuple):
    """The arguments of kernels that compute the backward pass of `_AddNormForward`.

    Blocks loop over rows, and then the sums of the blocks are added. Tensors have the dtypes of the
    forward pass.
    """

    total: Pointer
    grad_normal: Pointer
    grad_total: Pointer | None
    weight: Pointer
    mean: Pointer | None
    rstd: Pointer
    grad: Pointer
    grad_delta: Pointer | None
    grad_weight: Pointer
    grad_bias: Pointer | None
    partials: Pointer  # scratch, fp32 [2 (or 1 without a bias), multiprocessors, hidden]
    amax: Pointer | None  # initially zero; raised to the largest magnitude of grad in w_dtype
    multiprocessors: int
    shared_memory: int  # bytes that a block may use
    rows: int
    hidden: int
    x_dtype: int
    w_dtype: int

    def plan(self) -> list[KernelLaunch]:
        """Return the kernel launches."""
        x, w = stream_types(self.x_dtype, self.w_dtype)
        shape = row_shape(self.hidden, w, 16)
        block = (shape.threads, row_threads(shape.elements) // shape.threads)
        stage = block[0] * block[1] * shape.elements * (2 * SIZES[x] + SIZES[w])
        stages = 2 if 2 * stage + _STATIC_SHARED <= self.shared_memory else 1
        blocks = min(self.multiprocessors, divide_up(self.rows, block[1]))
        partial_bias = (
            None if self.grad_bias is None else self.partials.after(blocks * self.hidden * 4)
        )
        return [
            KernelLaunch(
                instance(
                    "add_norm_backward_kernel", x, w, shape.elements, self.grad_bias is not None
                ),
                (blocks,),
                block,
                (*self[:8], self.partials, partial_bias, self.amax, self.rows, self.hidden, stages),
                shared=stages * stage,
            ),
            column_sums(
                w,
                (self.partials, partial_bias),
                (self.grad_weight, self.grad_bias),
                blocks,
                self.hidden,
            ),
        ]


ADD_NORM_FORWARD = Kernel.of("add_norm_forward", _AddNormForward)
ADD_NORM_BACKWARD = Kernel.of("add_norm_backward", _AddNormBackward)


AddNorm = Callable[..., tuple[Tensor, Tensor]]
"""An implementation of `add_norm`, with the same arguments and results."""


def choose_add_norm(library: KernelLibrary | None) -> AddNorm:
    """Choose the kernel if there is a library, otherwise PyTorch's operations."""
    return add_norm if library is None else partial(fused_add_norm, library)


def normalize_reference(x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float) -> Tensor:
    """Return the LayerNorm of x over the last dimension or, without a bias, the RMSNorm.

    LayerNorm is (x - mean) / sqrt(variance + epsilon) * weight + bias. RMSNorm uses 0 as the mean
    and has no bias.

    Args:
        x: The input [..., h].
        weight: The weight [h].
        bias: The bias [h] of a LayerNorm; `None` for RMSNorm.
        epsilon: The number added to the variance.

    Returns:
        The result [..., h] in the dtype of the weight.
    """
    x = x.float()
    centered = x if bias is None else x - x.mean(dim=-1, keepdim=True)
    variance = centered.square().mean(dim=-1, keepdim=True)
    normal = centered * (variance + epsilon).rsqrt() * weight.float()
    return (normal if bias is None else normal + bias.float()).to(weight.dtype)


def normalize(x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float) -> Tensor:
    """Compute `normalize_reference`, with the same arguments, using PyTorch's fused kernels."""
    dtype = weight.dtype
    if x.dtype != dtype:  # an fp32 residual stream enters a layer with 16-bit weights
        x, weight, bias = x.float(), weight.float(), None if bias is None else bias.float()
    if bias is None:
        return F.rms_norm(x, weight.shape, weight, epsilon).to(dtype)
    return F.layer_norm(x, weight.shape, weight, bias, epsilon).to(dtype)


def add_norm(
    residual: Tensor,
    delta: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    epsilon: float,
    fused_amaxes: FusedAmaxes = NO_FUSED_AMAXES,
) -> tuple[Tensor, Tensor]:
    """Add an update to the residual stream and normalize the sum, with PyTorch's operations.

    Args:
        residual: The residual stream [..., h], in the dtype of the weight or fp32.
        delta: The update [..., h], in the dtype of the weight; `None` adds nothing.
        weight: The weight [h].
        bias: The bias [h] of a LayerNorm; `None` for RMSNorm.
        epsilon: The number added to the variance.
        fused_amaxes: Where to store the amaxes of the normalized sum and of the gradient of delta.
            Only the kernel computes these amaxes.

    Returns:
        The sum [..., h] in the dtype of the residual, and the normalized sum [..., h] in the dtype
        of the weight.
    """
    total = residual if delta is None else residual + delta
    return total, normalize(total, weight, bias, epsilon)


def fused_add_norm(
    library: KernelLibrary,
    residual: Tensor,
    delta: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    epsilon: float,
    fused_amaxes: FusedAmaxes = NO_FUSED_AMAXES,
) -> tuple[Tensor, Tensor]:
    """Compute `add_norm`, with the same arguments and results, using one kernel.

    The backward kernel takes the gradients of both results, and computes the gradients of the sum,
    the weight and the bias deterministically. PyTorch's operations handle arguments that the
    kernels do not support.
    """
    hidden, dtype = weight.numel(), weight.dtype
    fits = (
        supports(weight, delta, bias)
        and supports(residual)
        and residual.dtype in (dtype, torch.float32)
        and hidden % (VECTOR_BYTES // dtype.itemsize) == 0
        and hidden <= LONGEST_ROW[dtype.itemsize]
    )
    if not fits:
        return add_norm(residual, delta, weight, bias, epsilon)
    total, normal, *_ = _apply(library, residual, delta, weight, bias, epsilon, fused_amaxes)
    # When traced without a delta, the operator returns no sum, because results may not be
    # arguments.
    return total if total.numel() else residual, normal


@operator()
def add_norm_forward(
    library: KernelLibrary,
    residual: Tensor,
    delta: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    epsilon: float,
    fused_amaxes: FusedAmaxes = NO_FUSED_AMAXES,
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Add and normalize with one kernel.

    Args:
        library: Compiled kernels.
        residual: The residual stream [..., h], in the dtype of the weight or fp32.
        delta: The update [..., h], in the dtype of the weight; `None` adds nothing.
        weight: The weight [h].
        bias: The bias [h] of a LayerNorm; `None` for RMSNorm.
        epsilon: The number added to the variance.
        fused_amaxes: Where to store the amaxes of the normalized sum and, in the backward pass, of
            the gradient of delta.

    Returns:
        The sum (`None` without a delta), the normalized sum, and the moments of each row, fp32:
        [2, rows] with the inverse standard deviation and the mean, or [1, rows] for RMSNorm, which
        has no mean.
    """
    residual = residual.contiguous()
    delta = None if delta is None else delta.contiguous()
    hidden = weight.numel()
    rows = residual.numel() // hidden
    total = None if delta is None else torch.empty_like(residual)
    normal = torch.empty_like(residual, dtype=weight.dtype)
    moments = residual.new_empty(1 if bias is None else 2, rows, dtype=torch.float32)
    library.launch(
        ADD_NORM_FORWARD,
        *(residual, delta, weight, bias, total, normal),
        *(None if bias is None else moments[1], moments),
        zero_for(normal, fused_amaxes.forward),
        *(rows, hidden, DTYPE_CODES[residual.dtype], DTYPE_CODES[weight.dtype], epsilon),
    )
    return total, normal, moments


@operator()
def add_norm_backward(
    library: KernelLibrary,
    grad_normal: Tensor,
    grad_total: Tensor | None,
    total: Tensor,
    weight: Tensor,
    moments: Tensor,
    round_for_delta: bool,
    fused_amax: FusedAmax | None = None,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """Compute the gradients of the arguments of `add_norm` deterministically.

    Args:
        library: Compiled kernels.
        grad_normal: The gradient of the normalized sum, [..., h].
        grad_total: The gradient of the sum, [..., h]; `None` if only the normalized sum was used.
        total: The sum, [..., h].
        weight: The weight [h].
        moments: The moments that `add_norm_forward` returned.
        round_for_delta: Whether to also return the gradient of the sum in the dtype of the weight.
        fused_amax: Where to store the amax of the gradient of the sum in the dtype of the weight.

    Returns:
        The gradients of the sum in its own dtype, of the sum in the dtype of the weight (`None`
        unless requested), of the weight, and of the bias (`None` for RMSNorm).
    """
    hidden, (kinds, rows) = weight.numel(), moments.shape
    grad_normal, total = grad_normal.contiguous(), total.contiguous()
    grad_total = None if grad_total is None else grad_total.contiguous()
    grad = torch.empty_like(total)
    grad_delta = torch.empty_like(total, dtype=weight.dtype) if round_for_delta else None
    grad_weight = torch.empty_like(weight)
    grad_bias = None if kinds == 1 else torch.empty_like(weight)
    device = Device(total.device)
    blocks = device.multiprocessors
    partials = moments.new_empty(kinds, blocks, hidden)
    library.launch(
        ADD_NORM_BACKWARD,
        *(total, grad_normal, grad_total, weight),
        *(None if kinds == 1 else moments[1], moments),
        *(grad, grad_delta, grad_weight, grad_bias, partials),
        zero_for(grad if grad_delta is None else grad_delta, fused_amax),
        *(blocks, device.block_memory, rows, hidden),
        *(DTYPE_CODES[total.dtype], DTYPE_CODES[weight.dtype]),
    )
    return grad, grad_delta, grad_weight, grad_bias


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    ctx.library, residual, delta, weight, bias, _, *fused_amaxes = inputs
    total, _, moments = output
    ctx.fused_amax = fused_amaxes[0].backward if fused_amaxes else None
    ctx.added, ctx.has_bias = delta is not None, bias is not None
    ctx.save_for_backward(total if ctx.added else residual, weight, moments)
    ctx.set_materialize_grads(False)


def _differentiate(
    ctx: Any, grad_total: Tensor | None, grad_normal: Tensor | None, *_: Tensor | None
) -> tuple[Tensor | None, ...]:
    total, weight, moments = ctx.saved_tensors
    if grad_normal is None:  # only the sum was used
        passed = grad_total.to(weight.dtype) if ctx.added and grad_total is not None else None
        return None, grad_total, passed, None, None, None, None
    rounds = ctx.added and total.dtype != weight.dtype
    grad, grad_delta, grad_weight, grad_bias = add_norm_backward(
        ctx.library,
        *(grad_normal, grad_total, total, weight, moments, rounds),
        fused_amax=ctx.fused_amax if ctx.added else None,
    )
    for_delta = (grad_delta if rounds else grad) if ctx.added else None
    return None, grad, for_delta, grad_weight, grad_bias if ctx.has_bias else None, None, None


def _forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
    results = add_norm_forward.function(*inputs)
    _keep(ctx, inputs, results)
    total, normal, _ = results
    # Without a delta the sum is the residual, and the kernel adds up both of its gradients.
    return inputs[1].view_as(inputs[1]) if total is None else total, normal


_apply = add_norm_forward.differentiate(_differentiate, _keep, _forward)
