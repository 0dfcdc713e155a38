"""Weight gradients that are accumulated directly into a gradient buffer.

Otherwise, a linear layer or an embedding would write a 16-bit gradient as large as its weight, and
another pass over memory would add this gradient to the buffer.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.device import Device
from megatron.kernels.library import DTYPE_CODES, Kernel, KernelLibrary, operator
from megatron.kernels.plans import KernelLaunch, PlanError, Pointer, divide_up, vector_size
from megatron.kernels.sources import FLOATS, constant, instance


class _EmbeddingGradient(NamedTuple):
    """The arguments of kernels that add gradient rows to the rows of a table.

    The gradient rows are first radix-sorted by entry.
    """

    entries: Pointer  # [row_count]
    gradient: Pointer  # [row_count, hidden]
    into: Pointer  # fp32 [table_rows, hidden]
    pairs: Pointer  # scratch, 8 bytes [2, row_count]
    parts: Pointer  # scratch, fp32 [chunks, 2, hidden]
    row_count: int
    hidden: int
    table_rows: int
    dtype: int

    def plan(self) -> list[KernelLaunch]:
        """Return the kernel launches."""
        if self.row_count == 0 or self.table_rows == 0:
            return []
        if (self.row_count | self.table_rows) >> 30:
            raise PlanError(f"{self.row_count} rows or {self.table_rows} entries are too many")
        source, name = "embedding_gradient.cu", FLOATS[self.dtype]
        bits, threads = constant(source, "kBits"), constant(source, "kThreads")
        sorters = 1 << bits
        launches: list[KernelLaunch] = []
        ordered, next_pairs, spare_pairs = None, self.pairs, self.pairs.after(8 * self.row_count)
        for shift in range(0, self.table_rows.bit_length(), bits):
            sort_parameters = (
                None if ordered else self.entries,
                ordered,
                next_pairs,
                self.row_count,
                self.table_rows,
                shift,
            )
            grid = (divide_up(self.row_count, sorters),)
            launches.append(
                KernelLaunch("sort_kernel", grid, (sorters,), sort_parameters, early=True)
            )
            ordered, next_pairs, spare_pairs = next_pairs, spare_pairs, next_pairs
        sizes, block = (self.row_count, self.hidden, self.table_rows), (threads,)
        launches.append(
            KernelLaunch(
                instance("rows_kernel", name),
                (self.row_count, divide_up(self.hidden, threads * vector_size(name))),
                block,
                (ordered, self.gradient, self.parts, self.into, *sizes),
                early=True,
            )
        )
        if boundaries := (self.row_count - 1) // CHUNK:
            across = divide_up(self.hidden, threads * 4)
            parts_parameters = (ordered, self.parts, self.into, *sizes)
            launches.append(
                KernelLaunch(
                    "parts_kernel", (boundaries, across), block, parts_parameters, early=True
                )
            )
        return launches


EMBEDDING_GRADIENT = Kernel.of("embedding_gradient", _EmbeddingGradient)
WIDTH = 8  # the kernel requires a hidden size that is a multiple of this
CHUNK = 32  # the number of sorted rows that are summed together, as in embedding_gradient.cu

EmbeddingGradient = Callable[[Tensor, Tensor, Tensor], None]
"""A function that adds grad[i] to into[entries[i]].

It takes entries [n], of which those outside the table are ignored, grad [n, h] and into [rows, h].
"""


def weight_gradient(grad: Tensor, x: Tensor, into: Tensor, *, accumulate: bool) -> None:
    """Compute into = grad^T x, or into += grad^T x, summed in fp32.

    On a GPU this is a single cuBLAS product with 16-bit inputs and fp32 output, which runs at full
    speed. On other devices the inputs are converted first.

    Args:
        grad: The gradient of the layer's output, [..., out].
        x: The input of the layer, [..., in], in the dtype of `grad`.
        into: The result [out, in], in fp32 or the dtype of the inputs.
        accumulate: Whether to add to `into` instead of overwriting it.
    """
    left, right = grad.flatten(0, -2).t(), x.flatten(0, -2)
    beta = 1 if accumulate else 0
    if into.dtype == x.dtype:
        torch.addmm(into, left, right, beta=beta, out=into)
    elif Device(into.device).is_gpu:
        torch.addmm(into, left, right, beta=beta, out_dtype=into.dtype, out=into)
    else:
        torch.addmm(into, left.to(into.dtype), right.to(into.dtype), beta=beta, out=into)


def choose_embedding_gradient(library: KernelLibrary | None, hidden: int) -> EmbeddingGradient:
    """Choose the kernel if there is a library and it supports the hidden size, otherwise PyTorch.

    Both implementations are deterministic and sum in fp32 if the table is in fp32.

    Args:
        library: Compiled kernels; `None` means PyTorch's operations.
        hidden: The hidden size.
    """
    if library is None or hidden % WIDTH:
        return embedding_gradient_reference
    return partial(embedding_gradient, library)


def embedding_gradient_reference(entries: Tensor, grad: Tensor, into: Tensor) -> None:
    """Add grad[i] to into[entries[i]] in PyTorch.

    This is deterministic even on a GPU, where rows are added in order.
    """
    inside = (entries >= 0) & (entries < into.shape[0])
    rows = torch.where(inside, entries, 0)
    values = torch.where(inside[:, None], grad, 0).to(into.dtype)
    into.index_put_((rows,), values, accumulate=True)


@operator("into")
def embedding_gradient(library: KernelLibrary, entries: Tensor, grad: Tensor, into: Tensor) -> None:
    """Add grad[i] to into[entries[i]] with a kernel, or in PyTorch if `into` is not fp32."""
    if into.dtype != torch.float32:
        embedding_gradient_reference(entries, grad, into)
        return
    count, (rows, hidden) = len(entries), into.shape
    pairs = entries.new_empty(2, count)
    parts = into.new_empty(-(-count // CHUNK), 2, hidden)
    inputs = (entries.contiguous(), grad.contiguous())
    sizes = (count, hidden, rows, DTYPE_CODES[grad.dtype])
    library.launch(EMBEDDING_GRADIENT, *inputs, into, pairs, parts, *sizes)
