"""Sum of squares and number of nonzero elements over many tensors, in fp64, bitwise repeatable."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from megatron.kernels.library import DTYPE_CODES, Kernel, KernelLibrary
from megatron.kernels.tensor_table import CHUNK, TensorTable

TENSOR_SUMS = Kernel("tensor_sums", "ppppiii")

# Elements whose squares are added in fp32, on a CPU nearly one after another: short rows keep the
# relative error below 1e-5 where long ones lose 1e-2. The rows' sums are added in fp64.
ROW = 2**12

Sums = Callable[[], Tensor]


def choose_tensor_sums(
    tensors: Sequence[Tensor],
    device: torch.device,
    library: KernelLibrary | None,
    *,
    counts: bool = True,
) -> Sums:
    """What gives (sum of squares, nonzero elements), fp64 [2] on `device`, whenever it is called.

    Args:
        tensors: contiguous, staying where they are.
        device: theirs; where there are none, of the result.
        library: of kernels; None: plain PyTorch.
        counts: somebody asks for the second number, which plain PyTorch gets by reading all again;
            off: it may be 0.
    """
    if library is None:
        return partial(tensor_sums_reference, tensors, device, counts=counts)
    by_dtype: dict[torch.dtype, list[tuple[Tensor]]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append((tensor.detach(),))
    tables = [
        (TensorTable.of(rows, device), DTYPE_CODES[dtype]) for dtype, rows in by_dtype.items()
    ]
    return partial(_tensor_sums, tables, device, library)


def tensor_sums_reference(
    tensors: Sequence[Tensor], device: torch.device, *, counts: bool = True
) -> Tensor:
    """(sum of squares, nonzero elements or 0): fp64 [2] on `device`."""
    counted = tensors if counts else []
    return torch.stack([sum_of_squares(tensors, device), count_nonzero(counted, device)])


def sum_of_squares(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Scalar fp64 on `device`. 16-bit tensors are squared in fp32."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    for tensor in tensors:
        flat = tensor.detach().reshape(-1)
        tail_length = flat.numel() % ROW
        body, tail = flat.split([flat.numel() - tail_length, tail_length])
        for rows in (body.view(-1, ROW), tail.view(1, -1)):
            norms = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float32)
            total = total + norms.double().square().sum()
    return total


def count_nonzero(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Scalar fp64 (exact to 2**53) on `device`."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    for tensor in tensors:
        total = total + torch.count_nonzero(tensor)
    return total


def _tensor_sums(
    tables: Sequence[tuple[TensorTable, int]], device: torch.device, library: KernelLibrary
) -> Tensor:
    """Two launches a dtype, of which there is mostly one."""
    totals = torch.zeros(len(tables), 2, dtype=torch.float64, device=device)
    for total, (table, dtype) in zip(totals, tables, strict=True):
        count = len(table.pieces)
        parts = torch.empty(count, 2, dtype=torch.float64, device=device)
        arguments = (table.tensors, table.pieces, parts, total, count, CHUNK, dtype)
        library.launch(TENSOR_SUMS, *arguments)
    return totals.sum(dim=0)
