"""Weights in 8 or 4 bits: codes, and a scale for each block of 64 adjacent elements of a row.

The scale of a block is its largest magnitude, which is exact in the dtype of the weights. An
element is a level between -1 and 1, times the scale. Its code selects the nearest of 16 levels
(nf4, two codes per byte), or is the nearest fp8 e4m3 number, whose level is this number divided by
the largest e4m3 number. With bf16 scales, a weight takes 4.25 or 8.25 bits.

Every block that is not all zeros has an element with the level 1 or -1. Quantizing a dequantized
matrix therefore gives the same values and scales.
"""

from __future__ import annotations

import functools
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.config.adapters import FROZEN_BLOCK
from megatron.kernels.fp8 import E4M3
from megatron.kernels.library import DTYPE_CODES, Kernel, KernelLibrary, aligned, operator
from megatron.kernels.plans import KernelLaunch, Pointer, divide_up
from megatron.kernels.sources import FLOATS, constant, instance

FrozenFormat = Literal["fp8", "nf4"]

BLOCK = FROZEN_BLOCK  # the number of adjacent elements of a row that share a scale
# The 16 levels of NormalFloat are quantiles of a normal distribution, scaled to [-1, 1], so that
# each is used about equally often. The lower 8 levels include -1 and 0, the upper 8 include 1.
_LEVELS = 16
_OUTERMOST = 0.9677083  # the probability of the outermost quantile: 1 - (1/30 + 1/32) / 2


class _Unpack(NamedTuple):
    """The arguments of a kernel that dequantizes weights. Without levels, codes are fp8 values."""

    codes: Pointer
    scales: Pointer
    levels: Pointer | None
    out: Pointer  # [size]
    size: int
    dtype: int

    def plan(self) -> list[KernelLaunch]:
        """Return the kernel launches."""
        at_once = 8 * constant("unpack.cu", "kAtOnce") * constant("unpack.cu", "kThreads")
        kernel = instance(
            "unpack_fp8_kernel" if self.levels is None else "unpack_nf4_kernel", FLOATS[self.dtype]
        )
        read = self[:2] if self.levels is None else self[:3]
        block = (constant("unpack.cu", "kThreads"),)
        return [
            KernelLaunch(
                kernel, (divide_up(self.size, at_once),), block, (*read, self.out, self.size)
            )
        ]


UNPACK = Kernel.of("unpack", _Unpack)


@functools.cache
def nf4_levels(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the levels of nf4 in ascending order, from -1 to 1, [16].

    They are quantiles of the normal distribution, divided by the largest quantile. The lowest 8
    levels, up to 0, are evenly spaced quantiles up to the median. The highest 9 levels, from 0 on,
    are evenly spaced quantiles from the median on.

    Args:
        dtype: The data type of the result.
        device: The device of the result.
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
    """Return the two levels encoded by each byte, [256, 2], the lower four bits first."""
    levels = nf4_levels(dtype, device)
    return torch.stack((levels.repeat(_LEVELS), levels.repeat_interleave(_LEVELS)), dim=1)


def bytes_of(parameters: int, frozen_format: FrozenFormat, scale_bytes: int) -> int:
    """Return the number of bytes that weights occupy.

    Args:
        parameters: The number of weights.
        frozen_format: The format of the weights.
        scale_bytes: The number of bytes of a scale, which has the dtype of the weights.
    """
    codes = parameters if frozen_format == "fp8" else parameters // 2
    return codes + parameters // BLOCK * scale_bytes


@torch.no_grad()
def quantize(matrix: Tensor, frozen_format: FrozenFormat) -> tuple[Tensor, Tensor]:
    """Quantize a matrix.

    Args:
        matrix: The values [..., in]; `in` is a multiple of `BLOCK`.
        frozen_format: The format of the codes.

    Returns:
        The codes, uint8 [..., in], or [..., in / 2] for nf4, and the scales [..., in / BLOCK] in
        the dtype of the matrix.
    """
    blocks = matrix.unflatten(-1, (-1, BLOCK))
    scales = blocks.abs().amax(-1)
    # A block of zeros has the scale 0. Its codes represent 0 with any divisor.
    divisors = torch.where(scales > 0, scales, 1).float().unsqueeze(-1)
    values = (blocks.float() / divisors).flatten(-2)
    if frozen_format == "fp8":
        return values.mul_(torch.finfo(E4M3).max).to(E4M3).view(torch.uint8), scales
    levels = nf4_levels(torch.float32, matrix.device)
    codes = torch.bucketize(values, (levels[1:] + levels[:-1]) / 2, out_int32=True)
    return (codes[..., ::2] + _LEVELS * codes[..., 1::2]).to(torch.uint8), scales


@functools.cache
def _largest(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the largest fp8 value as a tensor [].

    GPUs divide by a Python number by multiplying by its inverse, which would round twice.
    """
    return torch.tensor(torch.finfo(E4M3).max, dtype=dtype, device=device)


@torch.no_grad()
def dequantize(
    codes: Tensor, scales: Tensor, frozen_format: FrozenFormat, library: KernelLibrary | None = None
) -> Tensor:
    """Return the matrix [..., in] that codes and scales represent, in the dtype of the scales.

    Args:
        codes: The codes that `quantize` returned.
        scales: The scales [..., in / BLOCK].
        frozen_format: The format of the codes.
        library: Compiled kernels; `None` means PyTorch's operations, which give the same bits.
    """
    dtype, device = scales.dtype, codes.device
    if codes.is_meta:
        library = None  # kernels need memory
    if library is not None and dtype in DTYPE_CODES and codes.numel() and aligned(codes, scales):
        levels = nf4_levels(dtype, device) if frozen_format == "nf4" else None
        return unpack_weight(library, codes, scales, levels)
    if frozen_format == "fp8":
        values = codes.view(E4M3).to(dtype).div_(_largest(dtype, device))
    else:
        values = F.embedding(codes.int(), _nf4_pairs(dtype, device)).flatten(-2)
    values.unflatten(-1, (-1, BLOCK)).mul_(scales.unsqueeze(-1))
    return values


@operator()
def unpack_weight(
    library: KernelLibrary, codes: Tensor, scales: Tensor, levels: Tensor | None
) -> Tensor:
    """Dequantize a matrix with one kernel, which reads each code once.

    Args:
        library: Compiled kernels.
        codes: The codes, uint8 [..., in], or [..., in / 2] with levels; contiguous.
        scales: The scales [..., in / BLOCK], contiguous.
        levels: The levels of nf4 [16], in the dtype of the scales; `None` for fp8.

    Returns:
        The matrix [..., in] in the dtype of the scales.
    """
    out = scales.new_empty(*scales.shape[:-1], scales.shape[-1] * BLOCK)
    library.launch(UNPACK, codes, scales, levels, out, out.numel(), DTYPE_CODES[scales.dtype])
    return out


def prepare(frozen_format: FrozenFormat, dtype: torch.dtype, device: torch.device) -> None:
    """Allocate the tables that `dequantize` reads.

    A pass that is being recorded must not allocate memory that later passes read.

    Args:
        frozen_format: The format of the codes.
        dtype: The data type of the dequantized values.
        device: The device of the codes.
    """
    if frozen_format == "fp8":
        _largest(dtype, device)
    else:
        _nf4_pairs(dtype, device)
