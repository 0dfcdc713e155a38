"""Frozen weights in 8 or 4 bits, with trained adapters beside them (QLoRA, Dettmers et al., 2023).

A row of a matrix is cut into blocks of 64 elements. A block keeps its largest magnitude, which is
exact in the weights' own number format, and each element keeps a code: the nearest of 16 multiples
of that magnitude (nf4, two codes in a byte), or the nearest number of fp8 e4m3 (fp8). With bf16
scales that is 4.25 or 8.25 bits for each parameter.

A `PackedWeight` stands for the matrix. It is a tensor without memory of its own, and every
operation on it computes the matrix again. So a product saves only the codes for the backward pass,
and the matrix lives no longer than the product that reads it.

Every block has an element whose code stands for exactly 1 or -1. Quantizing a matrix that was read
back therefore gives the same codes and scales, and a checkpoint can hold the matrix in the weights'
own format: a run that resumes continues with the same bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from megatron.config.adapters import FROZEN_BLOCK
from megatron.kernels.fp8 import E4M3

FrozenFormat = Literal["fp8", "nf4"]

BLOCK = FROZEN_BLOCK  # elements that share a scale, neighbors in a row
# The 16 levels of NormalFloat: quantiles of a normal distribution, so that each is used about
# equally often, scaled to [-1, 1]; the 8 lower ones include -1 and 0, the 8 upper ones 1.
_LEVELS = 16
_OUTERMOST = 0.9677083  # the quantile of the largest magnitude: 1 - (1/30 + 1/32) / 2


@functools.cache
def nf4_levels(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the levels of nf4 in ascending order, [16].

    The negative ones are 8 evenly spaced quantiles up to the median, the positive ones 9 from it.

    Args:
        dtype: The number format.
        device: The device.
    """

    def quantiles(count: int) -> Tensor:
        shares = torch.linspace(_OUTERMOST, 0.5, count, dtype=torch.float64)[:-1]
        return torch.special.ndtri(shares)

    half = _LEVELS // 2
    lower, upper = -quantiles(half), quantiles(half + 1)
    levels = torch.cat((lower, torch.zeros(1, dtype=torch.float64), upper.flip(0)))
    return (levels / upper[0]).to(device, dtype)


@functools.cache
def _nf4_pairs(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the two levels that each byte stands for, [256, 2]: its lower four bits first."""
    levels = nf4_levels(dtype, device)
    return torch.stack((levels.repeat(_LEVELS), levels.repeat_interleave(_LEVELS)), dim=1)


def bytes_of(parameters: int, form: FrozenFormat, scale_bytes: int) -> int:
    """Return the bytes that weights take.

    Args:
        parameters: The number of weights.
        form: Their format.
        scale_bytes: The size of a scale, which has the weights' own number format.
    """
    codes = parameters if form == "fp8" else parameters // 2
    return codes + parameters // BLOCK * scale_bytes


@torch.no_grad()
def quantize(matrix: Tensor, form: FrozenFormat) -> tuple[Tensor, Tensor]:
    """Round a matrix to codes.

    Args:
        matrix: The values [..., in]; `in` is a multiple of `BLOCK`.
        form: The format of the codes.

    Returns:
        The codes, uint8 [..., in] or for nf4 [..., in / 2], and the scales [..., in / BLOCK] in the
        matrix's own number format.
    """
    blocks = matrix.unflatten(-1, (-1, BLOCK))
    scales = blocks.abs().amax(-1)
    # A block of zeros has the scale 0. Its codes are those of 0, whatever they are divided by.
    divisors = torch.where(scales > 0, scales, 1).float().unsqueeze(-1)
    values = (blocks.float() / divisors).flatten(-2)
    if form == "fp8":
        return values.mul_(torch.finfo(E4M3).max).to(E4M3).view(torch.uint8), scales
    levels = nf4_levels(torch.float32, matrix.device)
    codes = torch.bucketize(values, (levels[1:] + levels[:-1]) / 2, out_int32=True)
    return (codes[..., ::2] + _LEVELS * codes[..., 1::2]).to(torch.uint8), scales


@torch.no_grad()
def dequantize(codes: Tensor, scales: Tensor, form: FrozenFormat) -> Tensor:
    """Return the matrix [..., in] that codes stand for, in the scales' number format.

    Args:
        codes: The codes of `quantize`.
        scales: The scales.
        form: The format of the codes.
    """
    dtype, device = scales.dtype, codes.device
    if form == "fp8":
        values = codes.view(E4M3).to(dtype).div_(torch.finfo(E4M3).max)
    else:
        pairs = _nf4_pairs(dtype, device)
        values = torch.nn.functional.embedding(codes.int(), pairs).flatten(-2)
    values.unflatten(-1, (-1, BLOCK)).mul_(scales.unsqueeze(-1))
    return values


class PackedWeight(torch.Tensor):
    """A frozen matrix that is kept in 8 or 4 bits; operations read its values in a wider format.

    `copy_` quantizes what is copied. Views of other shapes, and single entries of the first
    dimension, are packed, too; all other results are plain tensors. The weight has no gradient.

    Attributes:
        codes: The codes, uint8 [..., in] or for nf4 [..., in / 2].
        scales: The scale of each block, [..., in / BLOCK] in the format of the values.
        form: The format of the codes.
    """

    codes: Tensor
    scales: Tensor
    form: FrozenFormat

    @staticmethod
    def __new__(cls, codes: Tensor, scales: Tensor, form: FrozenFormat) -> PackedWeight:
        """Stand for the matrix of these codes and scales.

        Args:
            cls: This class.
            codes: The codes.
            scales: The scales.
            form: The format of the codes.
        """
        shape = (*scales.shape[:-1], scales.shape[-1] * BLOCK)
        weight: PackedWeight = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=scales.dtype, device=codes.device
        )
        weight.codes, weight.scales, weight.form = codes, scales, form
        return weight

    @classmethod
    def empty(
        cls,
        shape: tuple[int, ...],
        form: FrozenFormat,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> PackedWeight:
        """Allocate a weight whose values are not set.

        Args:
            shape: The shape; the last dimension is a multiple of `BLOCK`.
            form: The format of the codes.
            dtype: The number format of the values, and of the scales.
            device: The device.

        Raises:
            ValueError: The last dimension cannot be cut into blocks.
        """
        *rows, width = shape
        if width % BLOCK:
            raise ValueError(f"rows of {width} elements cannot be cut into blocks of {BLOCK}")
        codes = torch.empty(
            *rows, width if form == "fp8" else width // 2, dtype=torch.uint8, device=device
        )
        scales = torch.empty(*rows, width // BLOCK, dtype=dtype, device=device)
        if form == "nf4":  # now, because a recorded pass must not allocate what later ones read
            _nf4_pairs(dtype, device)
        return cls(codes, scales, form)

    def __repr__(self) -> str:  # type: ignore[override]
        """Return the format and the shape."""
        return f"PackedWeight({self.form}, {self.dtype}, {list(self.shape)})"

    @property
    def packed_bytes(self) -> int:
        """The bytes of memory that the weight takes."""
        return self.codes.nbytes + self.scales.nbytes

    def values(self) -> Tensor:
        """Return the values as a plain tensor."""
        return dequantize(self.codes, self.scales, self.form)

    # Operations reach the dispatcher below; Python's own overrides are not needed.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operation on the values, or on the codes if that is enough."""
        first = args[0] if args else None
        if isinstance(first, PackedWeight):
            if func in _ON_CODES:
                return _ON_CODES[func](*args, **(kwargs or {}))
            if func is _aten.copy_.default:
                first._store(args[1])
                return first
            # The result would not be part of this weight, and what is written to it would be lost.
            if func in _REFUSED or func._schema.is_mutable:  # type: ignore[attr-defined]
                raise NotImplementedError(f"{func} of a packed weight: copy all of it")
        args, kwargs = tree_map(_values, (args, kwargs or {}))
        return func(*args, **kwargs)

    def _store(self, values: Tensor) -> None:
        """Take over the values of a tensor of any format."""
        if isinstance(values, PackedWeight):
            values = values.values()
        values = values.to(self.device, self.dtype).expand(self.shape)
        codes, scales = quantize(values, self.form)
        self.codes.copy_(codes)
        self.scales.copy_(scales)


def unpacked(tensor: Tensor) -> Tensor:
    """Return a packed weight's values; any other tensor is returned as it is."""
    return tensor.values() if isinstance(tensor, PackedWeight) else tensor


def _values(value: Any) -> Any:
    return unpacked(value) if isinstance(value, Tensor) else value


def _same(weight: PackedWeight, **kwargs: Any) -> PackedWeight:
    return PackedWeight(weight.codes, weight.scales, weight.form)


def _reshaped(weight: PackedWeight, shape: list[int]) -> PackedWeight | Tensor:
    rows = shape[:-1]
    if shape[-1] != weight.shape[-1]:
        return weight.values().view(shape)
    codes, scales = weight.codes, weight.scales
    codes, scales = (part.view(*rows, part.shape[-1]) for part in (codes, scales))
    return PackedWeight(codes, scales, weight.form)


def _selected(weight: PackedWeight, dim: int, index: int) -> PackedWeight | Tensor:
    if dim != 0 or weight.dim() < 2:
        return weight.values().select(dim, index)
    return PackedWeight(weight.codes[index], weight.scales[index], weight.form)


_aten = torch.ops.aten
_ON_CODES: dict[Callable[..., Any], Callable[..., Any]] = {
    _aten.detach.default: _same,
    _aten.alias.default: _same,
    _aten.view.default: _reshaped,
    _aten._unsafe_view.default: _reshaped,
    _aten.select.int: _selected,
}
_REFUSED = (_aten.slice.Tensor, _aten.index_put_.default)
