"""Bias, dropout and residual addition in one operation."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.config.model import ModelConfig
from megatron.device import Device
from megatron.kernels.library import DTYPE_CODES, Kernel, KernelLibrary, operator, supports
from megatron.kernels.plans import (
    KernelLaunch,
    Pointer,
    column_shape,
    column_sums,
    stream_types,
    summing_blocks,
)
from megatron.kernels.sources import constant, instance

GROUP = 8  # the number of elements that share a block of random words, as in dropout.cu


class _BiasDropoutAddForward(NamedTuple):
    """The arguments of a kernel that computes out = residual + dropout(x + bias)."""

    x: Pointer  # [rows, columns] of w_dtype
    bias: Pointer | None  # [columns] of w_dtype
    residual: Pointer  # [rows, columns] of x_dtype, like out
    seed: Pointer  # one int64
    out: Pointer
    rows: int
    columns: int
    drop: int  # how many of the 65536 random values drop an element
    x_dtype: int
    w_dtype: int

    def plan(self) -> list[KernelLaunch]:
        """Return the kernel launches."""
        stream, weights = stream_types(self.x_dtype, self.w_dtype)
        shape = column_shape(
            self.rows, self.columns // GROUP, constant("dropout.cu", "kRowsAtOnce")
        )
        parameters = (*self[:8], 65536 / (65536 - self.drop))
        kernel = instance("bias_dropout_add_forward_kernel", stream, weights)
        return [KernelLaunch(kernel, shape.grid, (shape.threads,), parameters)]


class _BiasDropoutAddBackward(NamedTuple):
    """The arguments of kernels that compute the gradients of x and bias.

    With a bias, each multiprocessor runs one block.
    """

    grad: Pointer
    seed: Pointer
    grad_x: Pointer  # of w_dtype
    grad_bias: Pointer | None
    partials: Pointer | None  # scratch, fp32 [multiprocessors, columns]
    multiprocessors: int
    rows: int
    columns: int
    drop: int
    x_dtype: int
    w_dtype: int

    def plan(self) -> list[KernelLaunch]:
        """Return the kernel launches."""
        stream, weights = stream_types(self.x_dtype, self.w_dtype)
        vectors, sums = self.columns // GROUP, self.grad_bias is not None
        rows_of_block = constant("dropout.cu", "kResidency") if sums else 1
        blocks = summing_blocks(vectors, self.multiprocessors, self.multiprocessors) if sums else 0
        at_once = rows_of_block * constant("dropout.cu", "kRowsAtOnceBackward")
        shape = column_shape(self.rows, vectors, at_once, blocks)
        launches = [
            KernelLaunch(
                instance("bias_dropout_add_backward_kernel", stream, weights, sums),
                shape.grid,
                (shape.threads, rows_of_block),
                (*self[:3], self.partials, *self[6:9], 65536 / (65536 - self.drop)),
                shared=shape.threads * rows_of_block * GROUP * 4 if sums else 0,
            )
        ]
        if sums:
            out = (self.grad_bias, None)
            launches.append(
                column_sums(weights, (self.partials, None), out, shape.grid[0], self.columns)
            )
        return launches


FORWARD = Kernel.of("bias_dropout_add_forward", _BiasDropoutAddForward)
BACKWARD = Kernel.of("bias_dropout_add_backward", _BiasDropoutAddBackward)


BiasDropoutAdd = Callable[[Tensor, Tensor | None, Tensor, float], Tensor]
"""An implementation of `bias_dropout_add`, with the same arguments."""


def choose_bias_dropout_add(model: ModelConfig, library: KernelLibrary | None) -> BiasDropoutAdd:
    """Choose the kernel if there is a library and --no-bias-dropout-fusion is not given."""
    if library is None or not model.bias_dropout_fusion:
        return bias_dropout_add
    return partial(fused_bias_dropout_add, library)


def bias_dropout_add(
    x: Tensor, bias: Tensor | None, residual: Tensor, probability: float
) -> Tensor:
    """Return residual + dropout(x + bias), computed with PyTorch's operations.

    Args:
        x: The layer's output [..., h].
        bias: The layer's bias [h], or `None`.
        residual: The residual stream [..., h], in the dtype of x or fp32.
        probability: The probability of dropping an element; 0 outside training.

    Returns:
        The sum [..., h] in the dtype of the residual.
    """
    return residual + F.dropout(x if bias is None else x + bias, probability)


def fused_bias_dropout_add(
    library: KernelLibrary, x: Tensor, bias: Tensor | None, residual: Tensor, probability: float
) -> Tensor:
    """Return residual + dropout(x + bias), computed by one kernel.

    The backward pass redraws the mask. The seed comes from the device's default generator and stays
    on the device, so the host never waits. The probability is rounded to a multiple of 1/65536.
    PyTorch's operations handle arguments that the kernel does not support.

    Args:
        library: Compiled kernels.
        x: The layer's output [..., h].
        bias: The layer's bias [h], or `None`.
        residual: The residual stream [..., h], in the dtype of x or fp32.
        probability: The probability of dropping an element; 0 outside training.

    Returns:
        The sum [..., h] in the dtype of the residual.
    """
    drop = round(probability * 65536)
    fits = (
        supports(x, bias)
        and supports(residual)
        and residual.dtype in (x.dtype, torch.float32)
        and residual.shape == x.shape
        and x.shape[-1] % GROUP == 0
        and 0 <= drop < 65536
    )
    if not fits:
        return bias_dropout_add(x, bias, residual, probability)
    seed = torch.randint(2**62, (1,), dtype=torch.int64, device=x.device)
    out: Tensor = _apply(library, x, bias, residual, seed, drop)
    return out


@operator()
def bias_dropout_add_forward(
    library: KernelLibrary,
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    seed: Tensor,
    drop: int,
) -> Tensor:
    """Compute residual + dropout(x + bias) with one kernel.

    Args:
        library: Compiled kernels.
        x: The layer's output [..., h].
        bias: The layer's bias [h], or `None`.
        residual: The residual stream [..., h], in the dtype of x or fp32.
        seed: The seed that determines the mask, int64 [1].
        drop: The probability of dropping an element, times 65536.

    Returns:
        The sum [..., h] in the dtype of the residual.
    """
    x, residual = x.contiguous(), residual.contiguous()
    out = torch.empty_like(residual)
    library.launch(
        FORWARD,
        *(x, bias, residual, seed, out, x.numel() // x.shape[-1], x.shape[-1], drop),
        *(DTYPE_CODES[residual.dtype], DTYPE_CODES[x.dtype]),
    )
    return out


@operator()
def bias_dropout_add_backward(
    library: KernelLibrary,
    grad: Tensor,
    seed: Tensor,
    drop: int,
    dtype: torch.dtype,
    has_bias: bool,
) -> tuple[Tensor, Tensor | None]:
    """Compute the gradients of x and the bias, redrawing the same mask.

    Args:
        library: Compiled kernels.
        grad: The gradient of the result, [..., h].
        seed: The seed that was passed to `bias_dropout_add_forward`.
        drop: The probability of dropping an element, times 65536.
        dtype: The dtype of x.
        has_bias: Whether there was a bias.

    Returns:
        The gradients of x and of the bias (`None` without a bias).
    """
    grad = grad.contiguous()
    columns = grad.shape[-1]
    grad_x = torch.empty_like(grad, dtype=dtype)
    blocks = Device(grad.device).multiprocessors
    grad_bias = partials = None
    if has_bias:
        grad_bias = grad_x.new_empty(columns)
        partials = grad_x.new_empty(blocks, columns, dtype=torch.float32)
    library.launch(
        BACKWARD,
        *(grad, seed, grad_x, grad_bias, partials, blocks, grad.numel() // columns, columns, drop),
        *(DTYPE_CODES[grad.dtype], DTYPE_CODES[dtype]),
    )
    return grad_x, grad_bias


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.library, x, bias, _, seed, ctx.drop = inputs
    ctx.dtype, ctx.has_bias = x.dtype, bias is not None
    ctx.save_for_backward(seed)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (seed,) = ctx.saved_tensors
    settings = (ctx.drop, ctx.dtype, ctx.has_bias)
    grad_x, grad_bias = bias_dropout_add_backward(ctx.library, grad, seed, *settings)
    return None, grad_x, grad_bias if ctx.has_bias else None, grad, None, None


_apply = bias_dropout_add_forward.differentiate(_differentiate, _keep)
