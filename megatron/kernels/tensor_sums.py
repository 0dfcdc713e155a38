"""Kernels over many tensors in one launch: the table of addresses, and sums over the tensors.

The kernels here and in `adam` are not registered as PyTorch operators. They access tensors by
address, so a compiler could not see what they read and write. No model uses them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.kernels.library import DTYPE_CODES, Kernel, KernelLibrary
from megatron.kernels.plans import KernelLaunch, Pointer
from megatron.kernels.sources import FLOATS, constant, instance

CHUNK = 2**16  # the number of elements per block, a multiple of every access size


class _TensorSums(NamedTuple):
    """The arguments of kernels that compute the sum of squares and the number of nonzeros."""

    tensors: Pointer
    pieces: Pointer  # (tensor, first element), of up to `chunk` elements each
    results: Pointer  # scratch, two doubles per piece
    total: Pointer  # both sums
    piece_count: int
    chunk: int
    dtype: int

    def plan(self) -> list[KernelLaunch]:
        """Return the kernel launches."""
        block = (constant("tensor_sums.cu", "kThreads"),)
        kernel = instance("pieces_kernel", FLOATS[self.dtype])
        parameters = (self.tensors, self.pieces, self.chunk, self.results)
        add = (
            [KernelLaunch(kernel, (self.piece_count,), block, parameters)]
            if self.piece_count
            else []
        )
        return [
            *add,
            KernelLaunch(
                "finish_kernel", (1,), block, (self.results, self.piece_count, self.total)
            ),
        ]


TENSOR_SUMS = Kernel.of("tensor_sums", _TensorSums)

# The number of elements whose squares are added in fp32. A CPU adds them almost sequentially, so
# short rows keep the relative error below 1e-5, while long rows let it reach 1e-2. The sums of rows
# are added in fp64.
ROW = 2**12

Sums = Callable[[], Tensor]


@dataclass(frozen=True)
class TensorTable:
    """A table of tensor addresses for a kernel. The tensors must not move.

    Attributes:
        tensors: For each row of tensors, their addresses (0 for `None`) and their size in elements,
            int64 [rows, fields + 1].
        pieces: For each block, the index of a row and of the first element to process, int64
            [pieces, 2].
        referenced: The tensors, to keep them alive.
    """

    tensors: Tensor
    pieces: Tensor
    referenced: tuple[Sequence[Tensor | None], ...]

    @classmethod
    def of(cls, rows: Sequence[Sequence[Tensor | None]], device: torch.device) -> TensorTable:
        """Create a table from rows of contiguous tensors.

        Args:
            rows: The rows. All tensors of a row have the same size, and the first is not `None`.
            device: The device on which the kernel runs.
        """
        table, pieces = [], []
        for i, row in enumerate(rows):
            assert row[0] is not None
            size = row[0].numel()
            for tensor in row:
                assert tensor is None or (tensor.numel() == size and tensor.is_contiguous())
            table.append([0 if x is None else x.data_ptr() for x in row] + [size])
            pieces += [(i, start) for start in range(0, size, CHUNK)]
        return cls(
            torch.tensor(table, dtype=torch.int64).to(device),
            torch.tensor(pieces, dtype=torch.int64).reshape(-1, 2).to(device),
            tuple(rows),
        )


def choose_tensor_sums(
    tensors: Sequence[Tensor],
    device: torch.device,
    library: KernelLibrary | None,
    *,
    counts: bool = True,
) -> Sums:
    """Return a deterministic function that returns (sum of squares, number of nonzeros), fp64 [2].

    Args:
        tensors: Contiguous tensors that do not move in memory.
        device: The device of the tensors and of the result.
        library: Compiled kernels; `None` means PyTorch's operations.
        counts: Whether the number of nonzeros is needed. Otherwise it may be 0, because PyTorch
            would have to read all tensors again to count them.
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
    """Compute (sum of squares, number of nonzeros or 0) in PyTorch, fp64 [2] on `device`."""
    nonzero = torch.zeros((), dtype=torch.float64, device=device)  # exact up to 2**53
    for tensor in tensors if counts else ():
        nonzero = nonzero + torch.count_nonzero(tensor)
    return torch.stack([sum_of_squares(tensors, device), nonzero])


def sum_of_squares(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the sum of the squares of all elements, fp64 []. 16-bit values are squared in fp32."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    for tensor in tensors:
        flat = tensor.detach().reshape(-1)
        tail_length = flat.numel() % ROW
        body, tail = flat.split([flat.numel() - tail_length, tail_length])
        for rows in (body.view(-1, ROW), tail.view(1, -1)):
            norms = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float32)
            total = total + norms.double().square().sum()
    return total


def _tensor_sums(
    tables: Sequence[tuple[TensorTable, int]], device: torch.device, library: KernelLibrary
) -> Tensor:
    """Sum over all tensors with two kernels per dtype. Usually there is only one dtype."""
    totals = torch.zeros(len(tables), 2, dtype=torch.float64, device=device)
    for total, (table, dtype) in zip(totals, tables, strict=True):
        count = len(table.pieces)
        parts = torch.empty(count, 2, dtype=torch.float64, device=device)
        arguments = (table.tensors, table.pieces, parts, total, count, CHUNK, dtype)
        library.launch(TENSOR_SUMS, *arguments)
    return totals.sum(dim=0)
