"""Gradient of an embedding table, added straight into its buffer: no table-sized 16-bit tensor."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from megatron.kernels.library import DTYPE_CODES, Kernel, KernelLibrary, Operator

EMBEDDING_GRADIENT = Kernel("embedding_gradient", "pppppiiii")
WIDTH = 8  # the kernel needs a hidden size that divides by this
CHUNK = 32  # sorted rows that are summed side by side; embedding_gradient.cu has the same

# (entries [n], those outside of the table count for nothing; grad [n, h]; into [rows, h])
EmbeddingGradient = Callable[[Tensor, Tensor, Tensor], None]


def choose_embedding_gradient(library: KernelLibrary | None, hidden: int) -> EmbeddingGradient:
    """into[entries[i]] += grad[i], summed in fp32, bitwise repeatable."""
    if library is None or hidden % WIDTH:
        return embedding_gradient_reference
    return partial(_EMBEDDING_GRADIENT, library)


def embedding_gradient_reference(entries: Tensor, grad: Tensor, into: Tensor) -> None:
    """See `EmbeddingGradient`. Repeatable on a GPU as well: entries in sorted order."""
    inside = (entries >= 0) & (entries < into.shape[0])
    rows = torch.where(inside, entries, 0)
    values = torch.where(inside[:, None], grad, 0).to(into.dtype)
    into.index_put_((rows,), values, accumulate=True)


def _embedding_gradient(
    library: KernelLibrary, entries: Tensor, grad: Tensor, into: Tensor
) -> None:
    if into.dtype != torch.float32:
        embedding_gradient_reference(entries, grad, into)
        return
    count, (rows, hidden) = len(entries), into.shape
    pairs = entries.new_empty(2, count)
    parts = into.new_empty(-(-count // CHUNK), 2, hidden)
    inputs = (entries.contiguous(), grad.contiguous())
    sizes = (count, hidden, rows, DTYPE_CODES[grad.dtype])
    library.launch(EMBEDDING_GRADIENT, *inputs, into, pairs, parts, *sizes)


_EMBEDDING_GRADIENT = Operator(
    "embedding_gradient(str library, Tensor entries, Tensor grad, Tensor(a!) into) -> ()",
    _embedding_gradient,
    fake=lambda *_: None,
)
