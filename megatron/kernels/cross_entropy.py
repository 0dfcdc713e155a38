"""Cross entropy over a shard of a vocabulary: statistics of each row of logits, and the gradient.

Logits keep their dtype. fp32 values exist only for a few rows at a time (plain PyTorch) or in
registers (kernel). Over the whole vocabulary, loss = log(sum) + maximum - target.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.kernels.library import DTYPE_CODES, Kernel, KernelLibrary, operator
from megatron.kernels.plans import KernelLaunch, Pointer
from megatron.kernels.sources import FLOATS, constant, instance

CHUNK = 2**24  # the number of logits that plain PyTorch converts to fp32 at a time: 64 MiB


class _Statistics(NamedTuple):
    """The arguments of a kernel that computes the `Statistics` of each row of logits."""

    logits: Pointer  # [rows, size]
    labels: Pointer
    maxima: Pointer
    sums: Pointer
    targets: Pointer
    rows: int
    size: int
    dtype: int

    def plan(self) -> list[KernelLaunch]:
        """Return the kernel launches."""
        if self.rows == 0:
            return []
        threads = constant("cross_entropy.cu", "kThreads")
        kernel = instance("statistics_kernel", FLOATS[self.dtype])
        return [
            KernelLaunch(
                kernel,
                (self.rows,),
                (threads,),
                (self.logits, self.labels, self.size, self.maxima, self.sums, self.targets),
            )
        ]


class _Gradient(NamedTuple):
    """The arguments of a kernel that computes the gradient of logits.

    result = upstream * (exp(logit - maximum) / sum - [is the label])
    """

    logits: Pointer  # [rows, size]
    result: Pointer  # like logits, possibly the same memory
    labels: Pointer
    maxima: Pointer
    sums: Pointer
    upstream: Pointer
    rows: int
    size: int
    dtype: int

    def plan(self) -> list[KernelLaunch]:
        """Return the kernel launches."""
        if self.rows == 0:
            return []
        threads = constant("cross_entropy.cu", "kGradientThreads")
        kernel = instance("gradient_kernel", FLOATS[self.dtype])
        parameters = (*self[:3], self.size, self.maxima, self.sums, self.upstream)
        return [KernelLaunch(kernel, (self.rows,), (threads,), parameters)]


STATISTICS = Kernel.of("cross_entropy_statistics", _Statistics)
GRADIENT = Kernel.of("cross_entropy_gradient", _Gradient)


class Statistics(NamedTuple):
    """Statistics of each row, fp32 [n].

    Attributes:
        maxima: The largest logit.
        sums: The sum of exp(logit - maximum).
        targets: The logit of the label, or 0 if the label is outside this shard.
    """

    maxima: Tensor
    sums: Tensor
    targets: Tensor


@dataclass(frozen=True)
class CrossEntropy:
    """An implementation of cross entropy.

    Attributes:
        statistics: A function of logits [n, v] and labels [n], relative to this shard's first
            entry, that returns `Statistics`.
        gradient: A function of logits, labels, maxima, sums, upstream [n] and out [n, v]. It sets
            out, which may share the memory of logits, to
            upstream * (exp(logit - maximum) / sum - [is the label]).
        name: The name for the start-up panel.
    """

    statistics: Callable[[Tensor, Tensor], Statistics]
    gradient: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], None]
    name: str

    def __str__(self) -> str:
        """Return the name."""
        return self.name


def choose_cross_entropy(library: KernelLibrary | None, *, in_16_bits: bool) -> CrossEntropy:
    """Choose the kernel if there is a library, otherwise (or with `in_16_bits`) plain PyTorch.

    Args:
        library: Compiled kernels.
        in_16_bits: Whether to compute exponentials in the logits' own dtype, which only plain
            PyTorch supports.
    """
    if in_16_bits:
        return CrossEntropy(
            partial(statistics_reference, in_16_bits=True),
            partial(gradient_reference, in_16_bits=True),
            "plain PyTorch, exponentials in 16 bits",
        )
    if library is None:
        return REFERENCE

    def statistics(logits: Tensor, labels: Tensor) -> Statistics:
        return Statistics(*cross_entropy_statistics(library, logits, labels))

    return CrossEntropy(statistics, partial(cross_entropy_gradient, library), "fused kernel")


def statistics_reference(logits: Tensor, labels: Tensor, *, in_16_bits: bool = False) -> Statistics:
    """Compute `CrossEntropy.statistics` in PyTorch, a few rows at a time.

    Args:
        logits: The logits [n, v].
        labels: The labels [n], relative to this shard's first entry.
        in_16_bits: Whether to compute exponentials in the dtype of the logits instead of fp32.
    """
    maxima = logits.amax(dim=-1)
    shift = maxima if in_16_bits else maxima.float()  # determines the dtype of the differences
    sums = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
    for part in _row_chunks(logits):
        differences = logits[part] - shift[part, None]
        sums[part] = differences.exp_().sum(dim=-1, dtype=torch.float32)
    is_local = (labels >= 0) & (labels < logits.shape[1])
    targets = logits.gather(1, torch.where(is_local, labels, 0)[:, None])[:, 0].float()
    return Statistics(maxima.float(), sums, targets.where(is_local, 0.0))


def gradient_reference(
    logits: Tensor,
    labels: Tensor,
    maxima: Tensor,
    sums: Tensor,
    upstream: Tensor,
    out: Tensor,
    *,
    in_16_bits: bool = False,
) -> None:
    """Compute `CrossEntropy.gradient` in PyTorch, a few rows at a time.

    Args:
        logits: The logits [n, v].
        labels: The labels [n], relative to this shard's first entry.
        maxima: The maximum of each row over the whole vocabulary, fp32 [n].
        sums: The sum of exponentials of each row over the whole vocabulary, fp32 [n].
        upstream: The gradient of each row's loss, [n].
        out: The memory for the gradient of the logits, [n, v]; it may be `logits`.
        in_16_bits: Whether to compute exponentials in the dtype of the logits instead of fp32.
    """
    shift = maxima.to(logits.dtype) if in_16_bits else maxima
    is_local = (labels >= 0) & (labels < logits.shape[1])
    columns, at_label = torch.where(is_local, labels, 0)[:, None], -(upstream * is_local)[:, None]
    scale = (upstream / sums)[:, None]
    for part in _row_chunks(logits):
        chunk = (logits[part] - shift[part, None]).exp_().mul_(scale[part])
        chunk.scatter_add_(1, columns[part], at_label[part].to(chunk.dtype))
        out[part] = chunk


REFERENCE = CrossEntropy(statistics_reference, gradient_reference, "plain PyTorch")


def _row_chunks(rows: Tensor) -> Iterator[slice]:
    """Return slices of rows with at most CHUNK elements each, but at least one row."""
    height = max(1, CHUNK // rows.shape[1])
    return (slice(i, i + height) for i in range(0, rows.shape[0], height))


@operator()
def cross_entropy_statistics(
    library: KernelLibrary, logits: Tensor, labels: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `CrossEntropy.statistics` with a kernel."""
    rows, size = logits.shape
    maxima, sums, targets = (logits.new_empty(rows, dtype=torch.float32) for _ in range(3))
    labels = labels.contiguous()
    sizes = (rows, size, DTYPE_CODES[logits.dtype])
    library.launch(STATISTICS, logits, labels, maxima, sums, targets, *sizes)
    return maxima, sums, targets


@operator("out")
def cross_entropy_gradient(
    library: KernelLibrary,
    logits: Tensor,
    labels: Tensor,
    maxima: Tensor,
    sums: Tensor,
    upstream: Tensor,
    out: Tensor,
) -> None:
    """Compute `CrossEntropy.gradient` with a kernel."""
    arguments = [x.contiguous() for x in (labels, maxima, sums, upstream.float())]
    library.launch(GRADIENT, logits, out, *arguments, *logits.shape, DTYPE_CODES[logits.dtype])
