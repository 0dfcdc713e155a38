"""Dropout of what a layer gives, with its bias before and the residual stream after it."""

from __future__ import annotations

from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.config.model import ModelConfig
from megatron.device import Device
from megatron.kernels.library import DTYPE_CODES, Kernel, KernelLibrary, aligned

FORWARD = Kernel("bias_dropout_add_forward", "pppppiiiii")
BACKWARD = Kernel("bias_dropout_add_backward", "pppppiiiiii")
GROUP = 8  # elements that share a block of random words; dropout.cu has the same


class BiasDropoutAdd(Protocol):
    """What a model calls."""

    def __call__(
        self, x: Tensor, bias: Tensor | None, residual: Tensor, probability: float
    ) -> Tensor:
        """residual + dropout(x + bias).

        Args:
            x: [..., h].
            bias: [h] or None.
            residual: [..., h], of the type of x or fp32.
            probability: of an element to be dropped; 0 outside of training.

        Returns:
            [..., h] in the residual's type.
        """


def choose_bias_dropout_add(model: ModelConfig, library: KernelLibrary | None) -> BiasDropoutAdd:
    """The fused kernel where there is a library, but for --no-bias-dropout-fusion."""
    if library is None or not model.bias_dropout_fusion:
        return bias_dropout_add
    return partial(fused_bias_dropout_add, library)


def bias_dropout_add(
    x: Tensor, bias: Tensor | None, residual: Tensor, probability: float
) -> Tensor:
    """See `BiasDropoutAdd`: by PyTorch's operations."""
    return residual + F.dropout(x if bias is None else x + bias, probability)


def fused_bias_dropout_add(
    library: KernelLibrary,
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    probability: float,
) -> Tensor:
    """See `BiasDropoutAdd`: one kernel, and one in backward that draws the same mask again. Its
    seed comes from the device's default generator and stays on the device, so that the host never
    waits. A probability is rounded to 1/65536. Sizes that the kernel does not take run on PyTorch's
    operations."""
    drop = round(probability * 65536)
    fits = (
        x.dtype in DTYPE_CODES
        and residual.dtype in (x.dtype, torch.float32)
        and (bias is None or bias.dtype == x.dtype)
        and residual.shape == x.shape
        and x.shape[-1] % GROUP == 0
        and x.numel() > 0
        and 0 <= drop < 65536
        and aligned(x, bias, residual)
    )
    if not fits:
        return bias_dropout_add(x, bias, residual, probability)
    seed = torch.randint(2**62, (1,), dtype=torch.int64, device=x.device)
    return _BiasDropoutAdd.apply(x, bias, residual, seed, drop, library)


class _BiasDropoutAdd(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        bias: Tensor | None,
        residual: Tensor,
        seed: Tensor,
        drop: int,
        library: KernelLibrary,
    ) -> Tensor:
        x, residual = x.contiguous(), residual.contiguous()
        out = torch.empty_like(residual)
        library.launch(
            FORWARD,
            *(x, bias, residual, seed, out, x.numel() // x.shape[-1], x.shape[-1], drop),
            *(DTYPE_CODES[residual.dtype], DTYPE_CODES[x.dtype]),
        )
        ctx.save_for_backward(seed)
        ctx.drop, ctx.library, ctx.dtype, ctx.bias = drop, library, x.dtype, bias is not None
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (seed,) = ctx.saved_tensors
        incoming = grad.contiguous()
        columns = grad.shape[-1]
        grad_x = torch.empty_like(incoming, dtype=ctx.dtype)
        multiprocessors = Device(grad.device).multiprocessors
        grad_bias = partials = None
        if ctx.bias:
            grad_bias = grad_x.new_empty(columns)
            partials = grad_x.new_empty(multiprocessors, columns, dtype=torch.float32)
        ctx.library.launch(
            BACKWARD,
            *(incoming, seed, grad_x, grad_bias, partials, multiprocessors),
            *(grad.numel() // columns, columns, ctx.drop),
            *(DTYPE_CODES[grad.dtype], DTYPE_CODES[ctx.dtype]),
        )
        return grad_x, grad_bias, grad, None, None, None
