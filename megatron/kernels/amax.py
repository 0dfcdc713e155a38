"""Largest magnitudes on their way from the kernel that writes a tensor to the cast that reads it.

A cast to fp8 needs the largest magnitude of its tensor first: one more pass over memory, which is
saved if the kernel that wrote the tensor has already found it. Only the kernel and the cast know of
it: an operation between them (autograd, a gather over ranks, a dropout) may give the cast another
tensor, which it then measures itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

POOL = 512  # results that are zeroed at once
VECTORS = 2**20  # elements of vectors that are zeroed at once


class _Measured(NamedTuple):
    tensor: Tensor  # held, so that no other can take its memory
    version: int
    amax: Tensor


class Amaxes:
    """The store in which a model's kernels leave the amaxes that they measure for its casts.

    It holds the last tensor measured, until a cast has asked for it or a newer one replaces it.
    """

    def __init__(self) -> None:
        """Begin with nothing measured."""
        self._zeros: Iterator[Tensor] = iter(())
        self._vectors = torch.empty(0)
        self._last: _Measured | None = None

    def new(self, device: torch.device) -> Tensor:
        """Return a zero for a kernel to raise: fp32 []."""
        zero = next(self._zeros, None)
        if zero is None or zero.device != device:
            # One fill for many: they are never used again, and freed with the last of them.
            self._zeros = iter(torch.zeros(POOL, device=device).unbind())
            zero = next(self._zeros)
        return zero

    def new_vector(self, size: int, device: torch.device) -> Tensor:
        """Return zeros for a kernel to raise: fp32 [size]."""
        if self._vectors.numel() < size or self._vectors.device != device:
            self._vectors = torch.zeros(max(size, VECTORS), device=device)
        zeros, self._vectors = self._vectors[:size], self._vectors[size:]
        return zeros

    def forget(self) -> None:
        """Zero new memory from now on, and forget the last tensor.

        Call this when a device begins or stops recording: a recording must zero the memory that it
        raises.
        """
        self._zeros = iter(())
        self._vectors = torch.empty(0)
        self._last = None

    def measure(self, x: Tensor) -> Tensor:
        """Return a zero that the kernel which writes x raises to its largest magnitude."""
        amax = self.new(x.device)
        x = x.detach()  # shares memory and version; holds no graph
        self._last = _Measured(x, x._version, amax)
        return amax

    def take(self, x: Tensor) -> Tensor | None:
        """Return the largest magnitude of x, fp32 [], or None unless x was the last measured."""
        last = self._last
        if (
            last is None
            or x.data_ptr() != last.tensor.data_ptr()
            or x.numel() != last.tensor.numel()
            or x.dtype != last.tensor.dtype
            or x._version != last.version
        ):
            return None
        self._last = None
        return last.amax
