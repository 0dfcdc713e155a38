"""Fused amaxes: the largest magnitude of a tensor, passed from the kernel that wrote it to a cast.

A cast to fp8 needs the amax of its tensor first. Measuring it takes another pass over memory,
unless the kernel that writes the tensor measures it on the way. A linear layer therefore owns two
objects (`FusedAmaxes`): one for the amax of its input, which its forward pass reads, and one for
the amax of its output's gradient, which its backward pass reads. The kernel that writes such a
tensor receives the object and stores the amax there:

    normalization       forward: for the layer after it; backward: for the layer before it
    activation          forward: for the second matrix of the MLP; backward: for the first matrix
    split and rotate    backward: for the projection to queries, keys and values

A `FusedAmax` holds one amax at a time. The layer reads it in the same pass in which the kernel
stored it, before another micro-batch or a recomputation stores the next one. If an operation
between the two changes the tensor's values (dropout, for example), the kernel must not receive the
object.
If parts are gathered over ranks in between, the number of elements changes. `pop` then returns
`None`, and the cast measures its tensor itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.kernels.library import is_traced

POOL = 512  # scalars that are zeroed together
VECTORS = 2**20  # elements of vectors that are zeroed together


class Zeros:
    """A supply of zeros in which kernels store the largest magnitudes that they find."""

    _zeros: Iterator[Tensor]
    _vectors: Tensor

    def __init__(self) -> None:
        """Create an empty supply."""
        self.forget()

    def new(self, device: torch.device) -> Tensor:
        """Return a zeroed scalar, fp32 [], in which a kernel will store the largest magnitude."""
        zero = next(self._zeros, None)
        if zero is None or zero.device != device:
            # A single fill creates many zeros. No zero is reused, and their memory is freed with
            # the last of them.
            self._zeros = iter(torch.zeros(POOL, device=device).unbind())
            zero = next(self._zeros)
        return zero

    def new_vector(self, size: int, device: torch.device) -> Tensor:
        """Return a zeroed vector, fp32 [size], in which a kernel will store the amaxes."""
        if self._vectors.numel() < size or self._vectors.device != device:
            self._vectors = torch.zeros(max(size, VECTORS), device=device)
        zeros, self._vectors = self._vectors[:size], self._vectors[size:]
        return zeros

    def forget(self) -> None:
        """Discard the remaining zeros, so that later ones come from newly zeroed memory.

        Call this when a device starts or stops recording, because a recording must itself zero the
        memory in which its kernels collect maxima.
        """
        self._zeros = iter(())
        self._vectors = torch.empty(0)


class FusedAmax:
    """The memory through which a kernel passes the amax of a tensor to the layer that casts it.

    Args:
        zeros: The supply of zeros for the kernel.
    """

    _stored: tuple[Tensor, int] | None  # the amax and its tensor's number of elements

    def __init__(self, zeros: Zeros) -> None:
        """Create an object without an amax."""
        self._zeros = zeros
        self.forget()

    def allocate(self, x: Tensor) -> Tensor:
        """Return a zeroed scalar, fp32 [], in which the kernel that writes x stores x's amax."""
        amax = self._zeros.new(x.device)
        self._stored = amax, x.numel()
        return amax

    def pop(self, x: Tensor) -> Tensor | None:
        """Return the amax of x, fp32 [], or `None` if no kernel has stored it."""
        if is_traced(x):
            return None  # traced kernels store nothing
        stored = self._stored
        self.forget()
        return stored[0] if stored is not None and stored[1] == x.numel() else None

    def forget(self) -> None:
        """Discard the stored amax, if any."""
        self._stored = None


class FusedAmaxes(NamedTuple):
    """The amaxes of a layer, or of a kernel between two layers.

    Attributes:
        forward: The amax of the layer's input or the kernel's result, if any.
        backward: The amax of the gradient of the layer's output or of the kernel's argument, if
            any.
    """

    forward: FusedAmax | None = None
    backward: FusedAmax | None = None


NO_FUSED_AMAXES = FusedAmaxes()


def zero_for(x: Tensor, fused_amax: FusedAmax | None) -> Tensor | None:
    """Return a zero in which the kernel writing x stores x's amax; `None` if none is read."""
    return None if fused_amax is None else fused_amax.allocate(x)
