"""Moments and master weights in 16 or 8 bits, and Adam updates on them.

An update decodes a piece of these tensors to fp32, computes in fp32, and encodes the result.

fp16 and fp8 values are scaled by a power of two for each block of `BLOCK` elements. Variances
(`exp_avg_sq`) in these formats are stored as square roots, which need only half the exponent range:
small variances in a block do not underflow to zero, which would make Adam divide by zero.

Encoding rounds stochastically, with probabilities that make the expected value exact. An
exponential average changes by about 1 - beta of its value in each step. If beta is above 0.996,
this change is less than half the spacing of bf16 values, so rounding to nearest would freeze the
average. The random numbers are a function of the update and of an element's index in its parameter,
so a resumed run draws the same numbers.

Encoding decoded values again gives the same codes. A checkpoint can therefore store the decoded
values, which can be loaded in any layout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.config.optimizer import STATE_BLOCK as BLOCK
from megatron.kernels.adam import AdamNumbers, AdamTensors, adam_reference, copy_weights

_PIECE = 2**22  # elements decoded at a time, which bounds the temporary memory
_FRACTION, _BIAS = 23, 127  # fp32's fraction bits and exponent bias
_WORD = 0xFFFFFFFF


@dataclass(frozen=True)
class StateFormat:
    """A number format of optimizer states.

    Attributes:
        dtype: The dtype of the codes.
        bits: The number of fraction bits of a code.
        saved: The smallest dtype that represents every decoded value exactly, for checkpoints.
        normal: The smallest normal number of the codes; 0 for bf16, which has fp32's exponents.
        top: The exponent of the power of two that bounds the codes of a block; `None` if blocks
            have no scales.
        min_exponents: The minimum exponents of scales, for values and for square roots.
    """

    dtype: torch.dtype
    bits: int
    saved: torch.dtype
    normal: float = 0.0
    top: int | None = None
    min_exponents: tuple[int, int] = (0, 0)


FORMATS = {
    "bf16": StateFormat(torch.bfloat16, 7, torch.bfloat16),
    "fp16": StateFormat(torch.float16, 10, torch.float32, 2.0**-14, 15, (-120, -50)),
    "fp8": StateFormat(torch.float8_e4m3fn, 3, torch.bfloat16, 2.0**-6, 8, (-117, -57)),
}
"""The formats other than fp32, by their names in --exp-avg-dtype and --main-params-dtype."""


class PackedTensor:
    """A tensor of fp32 values that is stored in fewer bits.

    Args:
        like: A tensor with the desired shape and device.
        state_format: The number format.
        on_host: Whether to allocate host memory instead, pinned if `like` is on a GPU.
        roots: Whether formats with scales store square roots of the values, which must then be
            nonnegative.
        first: The index of the first element in its parameter.
        salt: A number that makes the rounding independent of the rounding of other states.
    """

    def __init__(
        self,
        like: Tensor,
        state_format: StateFormat,
        *,
        on_host: bool = False,
        roots: bool = False,
        first: int = 0,
        salt: int = 0,
    ) -> None:
        """Allocate a tensor of zeros."""
        self.shape, self._format = like.shape, state_format
        self._roots = roots and state_format.top is not None
        self._first, self._salt = first, salt
        blocks = -(-like.numel() // BLOCK)
        options: dict[str, Any] = {"device": like.device}
        if on_host:
            options = {"device": "cpu", "pin_memory": like.is_cuda}
        self._codes = torch.zeros(blocks * BLOCK, dtype=state_format.dtype, **options)
        self._scales: Tensor | None = None
        if state_format.top is not None:
            self._scales = torch.zeros(blocks, dtype=torch.int8, **options)

    def numel(self) -> int:
        """Return the number of elements."""
        return self.shape.numel()

    @property
    def nbytes(self) -> int:
        """The memory that the tensor uses, in bytes."""
        return self._codes.nbytes + (0 if self._scales is None else self._scales.nbytes)

    @property
    def device(self) -> torch.device:
        """The device of the codes."""
        return self._codes.device

    def values(self, start: int = 0, end: int | None = None) -> Tensor:
        """Return elements [start, end) in fp32, 1-D. `start` must be a multiple of `BLOCK`."""
        end = self.numel() if end is None else end
        blocks = slice(start // BLOCK, -(-end // BLOCK))
        values = self._codes.view(-1, BLOCK)[blocks].float()
        if self._scales is not None:
            values *= _power(self._scales[blocks])[:, None]
        if self._roots:
            values *= values
        return values.view(-1)[: end - start]

    def saved(self) -> Tensor:
        """Return a tensor to save, or into which to load a checkpoint.

        Without scales, this is a view of the codes; otherwise it is a decoded copy, which `load`
        encodes.
        """
        if self._scales is None:
            return self._codes[: self.numel()].view(self.shape)
        return self.values().to(self._format.saved).view(self.shape)

    def load(self, saved: Tensor) -> None:
        """Encode the result of `saved()`, into which a checkpoint has been loaded."""
        if self._scales is not None:
            self.store(saved)

    def store(self, values: Tensor, start: int = 0, count: Tensor | None = None) -> None:
        """Encode values into the elements from `start` on.

        Args:
            values: The values to encode.
            start: The index of the first element to set, a multiple of `BLOCK`.
            count: The index of the update, a scalar tensor; `None` outside updates.
        """
        flat = values.detach().reshape(-1).to(self.device, torch.float32)
        size, padding = flat.numel(), -flat.numel() % BLOCK
        whole = torch.nn.functional.pad(flat, (0, padding)).view(-1, BLOCK)
        sizes = whole.abs()
        blocks = slice(start // BLOCK, start // BLOCK + len(whole))
        if self._scales is not None:
            scales = self._scales_of(sizes.amax(1))
            self._scales[blocks] = scales.to(torch.int8)
            inverse = _power(-scales)[:, None]
            sizes *= inverse
            if self._roots:
                sizes *= inverse
        random = _uniform(whole, self._first + start, self._salt, count)
        codes = self._rounded(sizes, random).copysign_(whole)
        self._codes[start : start + size] = codes.view(-1)[:size].to(self._format.dtype)

    def _scales_of(self, largest: Tensor) -> Tensor:
        """Return the exponents of the blocks' scales, given the blocks' largest magnitudes."""
        assert self._format.top is not None
        fraction, exponent = torch.frexp(largest.sqrt() if self._roots else largest)
        # A maximum that is a power of two gets the largest code. If the maximum becomes such a
        # power by rounding down, encoding the decoded values again halves the scale, which is
        # exact. Doubling the scale would not be.
        exponent = exponent - (fraction == 0.5).int() - self._format.top
        return exponent.clamp_(min=self._format.min_exponents[self._roots])

    def _rounded(self, sizes: Tensor, random: Tensor) -> Tensor:
        """Round scaled magnitudes, or their square roots if these are stored, to codes."""
        state_format = self._format
        numbers = sizes.sqrt() if self._roots else sizes
        # Below the smallest normal number, codes are evenly spaced, like the codes just above it.
        shift = torch.where(numbers < state_format.normal, state_format.normal, 0.0)
        unit = 1 << (_FRACTION - state_format.bits)
        below = (numbers + shift).view(torch.int32) & -unit
        above = (below + unit).view(torch.float32) - shift
        below = below.view(torch.float32) - shift
        if not self._roots:
            return torch.where(random * (above - below) < sizes - below, above, below)
        # The expected square is exact. Only 0 becomes 0.
        low, high = below.square(), above.square()
        goes_up = (random * (high - low) < sizes - low) | ((sizes > 0) & (below == 0))
        return torch.where(goes_up, above, below)


State = Tensor | PackedTensor


def values_of(state: State) -> Tensor:
    """Return the values of a state in fp32, in the state's shape."""
    return state.values().view(state.shape) if isinstance(state, PackedTensor) else state


def _power(exponents: Tensor) -> Tensor:
    """Return powers of two in fp32, exactly; the results of `exp2` are not exact."""
    return ((exponents.int() + _BIAS) << _FRACTION).view(torch.float32)


def _uniform(like: Tensor, first: int, salt: int, count: Tensor | None) -> Tensor:
    """Return uniform random numbers in [0, 1) for elements from `first` on, shaped like `like`."""
    index = torch.arange(first, first + like.numel(), device=like.device)
    seed = torch.full((), salt, device=like.device) if count is None else count.long() * 8 + salt
    x = (index * 0x9E3779B1 + _mixed(seed & _WORD)) & _WORD
    return (_mixed(x) >> 8).float().mul_(2.0**-24).view(like.shape)


def _mixed(x: Tensor) -> Tensor:
    """Mix the bits of 32-bit words stored in int64 tensors."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = ((x ^ (x >> shift)) * factor) & _WORD
    return x ^ (x >> 16)


class _Part(NamedTuple):
    """Elements [start, end) of the tensor at index `tensor_index` of each list."""

    tensor_index: int
    start: int
    end: int


def packed_adam(
    weights: Sequence[State],
    copies: Sequence[Tensor | None],
    gradients: Sequence[Tensor],
    first: Sequence[State],
    second: Sequence[State],
) -> Callable[[AdamNumbers], None]:
    """Return a function that runs Adam, in plain PyTorch, on tensors that may be packed.

    Args:
        weights: The weights, which are updated in place.
        copies: The 16-bit copies of the weights; `None` for a weight without a copy.
        gradients: The gradients of the weights, in fp32 or 16 bits.
        first: The running means of the gradients.
        second: The running means of the squared gradients.
    """
    pieces: list[list[_Part]] = [[]]
    remaining = _PIECE
    for index, gradient in enumerate(gradients):
        for start in range(0, gradient.numel(), _PIECE):
            part = _Part(index, start, min(gradient.numel(), start + _PIECE))
            if part.end - part.start > remaining:
                pieces.append([])
                remaining = _PIECE
            pieces[-1].append(part)
            remaining -= part.end - part.start
    return partial(_update, pieces, (weights, copies, gradients, first, second))


def _update(
    pieces: Sequence[Sequence[_Part]],
    tensors: tuple[Sequence[Any], ...],
    numbers: AdamNumbers,
) -> None:
    weights, copies, *moments = tensors
    for parts in pieces:
        updated, *opened = (
            [_open(s[p.tensor_index], p) for p in parts] for s in (weights, *moments)
        )
        adam_reference(AdamTensors(updated, [None] * len(parts), *opened), numbers)
        for states, decoded in ((weights, updated), *zip(moments, opened, strict=True)):
            for part, values in zip(parts, decoded, strict=True):
                state = states[part.tensor_index]
                if isinstance(state, PackedTensor):
                    state.store(values, part.start, numbers.step)
        # Copy the stored values, so that a skipped update leaves the copies unchanged.
        copy_weights(
            [_open(weights[part.tensor_index], part) for part in parts],
            [
                None if copies[p.tensor_index] is None else _open(copies[p.tensor_index], p)
                for p in parts
            ],
        )


def _open(state: Any, part: _Part) -> Tensor:
    """Return some elements of a tensor, 1-D: a view, or decoded values of a packed tensor."""
    if isinstance(state, PackedTensor):
        return state.values(part.start, part.end)
    view: Tensor = state.detach().view(-1)[part.start : part.end]
    return view
