"""The product of a few rows with a matrix. It takes as long as reading the matrix: a library, made
for large products, leaves a part of the memory's speed unused."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from megatron.kernels.library import DTYPE_CODES, VECTOR_BYTES, Kernel, KernelLibrary, aligned

FEW_ROWS = Kernel("few_rows", "ppppiiii")
MOST_ROWS = 4  # few_rows.cu has the same


def few_rows_linear(
    library: KernelLibrary, x: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor:
    """x W^T + b, without gradients; PyTorch's where there are more rows than a few.

    Args:
        library: of kernels.
        x: [..., in].
        weight: [out, in].
        bias: [out], or None.

    Returns:
        [..., out].
    """
    rows = x.numel() // x.shape[-1]
    if not 1 <= rows <= MOST_ROWS or not _fits(x, weight, bias):
        return F.linear(x, weight, bias)
    outputs, size = weight.shape
    out = x.new_empty(*x.shape[:-1], outputs)
    library.launch(
        FEW_ROWS,
        *(x.contiguous(), weight, bias, out, rows, outputs, size, DTYPE_CODES[x.dtype]),
    )
    return out


def _fits(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    return (
        x.dtype in DTYPE_CODES
        and weight.dtype == x.dtype
        and (bias is None or bias.dtype == x.dtype)
        and weight.is_contiguous()
        and x.shape[-1] * x.element_size() % VECTOR_BYTES == 0
        and aligned(x, weight)
    )
