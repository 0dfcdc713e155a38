"""Fused amaxes: the largest magnitude of a tensor, passed from the kernel that wrote it to a cast.

A cast to fp8 first needs the amax of its tensor. Computing the amax takes another pass over memory,
unless the kernel that writes the tensor computes it in the same pass. A linear layer therefore owns
two objects (`FusedAmaxes`): one for the amax of its input, which its forward pass reads, and one
for the amax of its output's gradient, which its backward pass reads. The kernel that writes such a
tensor receives the object and stores the amax in it:

    normalization       forward: for the layer after it; backward: for the layer before it
    activation          forward: for the second matrix of the MLP; backward: for the first matrix
    split and rotate    backward: for the projection to queries, keys and values

A `FusedAmax` stores one amax at a time. The layer reads the amax in the same pass in which the
kernel stores it, before another micro-batch or a recomputation stores the next one. If an operation
between the kernel and the layer changes the tensor's values (dropout, for example), the kernel must
not receive the object. If shards of the tensor are gathered over ranks in between, the number of
elements changes. `pop` then returns `None`, and the cast computes the amax itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.kernels.library import is_traced

POOL = 512  # the number of scalars that are zeroed together
VECTORS = 2**20  # the number of elements of vectors that are zeroed together


class Zeros:
    """A pool of zeroed memory in which kernels store amaxes."""

    _zeros: Iterator[Tensor]
    _vectors: Tensor

    def __init__(self) -> None:
        """Create an empty pool."""
        self.forget()

    def new(self, device: torch.device) -> Tensor:
        """Return a zeroed scalar, fp32 [], in which a kernel will store an amax."""
        zero = next(self._zeros, None)
        if zero is None or zero.device != device:
            # A single fill creates many zeros. No zero is reused, and the memory is freed with the
            # last of them.
            self._zeros = iter(torch.zeros(POOL, device=device).unbind())
            zero = next(self._zeros)
        return zero

    def new_vector(self, size: int, device: torch.device) -> Tensor:
        """Return a zeroed vector, fp32 [size], in which a kernel will store amaxes."""
        if self._vectors.numel() < size or self._vectors.device != device:
            self._vectors = torch.zeros(max(size, VECTORS), device=device)
        zeros, self._vectors = self._vectors[:size], self._vectors[size:]
        return zeros

    def forget(self) -> None:
        """Discard the remaining zeros, so that later zeros come from newly zeroed memory.

        Call this when a device starts or stops recording, because a recording must itself zero the
        memory in which its kernels store amaxes.
        """
        self._zeros = iter(())
        self._vectors = torch.empty(0)


class FusedAmax:
    """An amax that the kernel that writes a tensor passes to the layer that casts the tensor.

    Args:
        zeros: The pool of zeroed memory for the kernel.
    """

    _stored: tuple[Tensor, int] | None  # the amax and its tensor's number of elements

    def __init__(self, zeros: Zeros) -> None:
        """Create an object without an amax."""
        self._zeros = zeros
        self.forget()

    def allocate(self, x: Tensor) -> Tensor:
        """Return a zeroed scalar, fp32 [], in which the kernel that writes `x` stores its amax."""
        amax = self._zeros.new(x.device)
        self._stored = amax, x.numel()
        return amax

    def pop(self, x: Tensor) -> Tensor | None:
        """Return and discard the stored amax, fp32 [].

        Return `None` if no amax is stored, if it is that of a tensor with another number of
        elements than `x`, or if `x` is traced.
        """
        if is_traced(x):
            return None  # traced kernels store nothing
        stored = self._stored
        self.forget()
        return stored[0] if stored is not None and stored[1] == x.numel() else None

    def forget(self) -> None:
        """Discard the stored amax, if any."""
        self._stored = None


class FusedAmaxes(NamedTuple):
    """The amaxes that a layer reads, or that a kernel between two layers stores.

    Attributes:
        forward: The amax of the layer's input or the kernel's result, if any.
        backward: The amax of the gradient of the layer's output or of the kernel's argument, if
            any.
    """

    forward: FusedAmax | None = None
    backward: FusedAmax | None = None


NO_FUSED_AMAXES = FusedAmaxes()


def zero_for(x: Tensor, fused_amax: FusedAmax | None) -> Tensor | None:
    """Return the zeroed scalar in which the kernel that writes `x` stores its amax, if any."""
    return None if fused_amax is None else fused_amax.allocate(x)
