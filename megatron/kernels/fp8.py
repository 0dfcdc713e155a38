"""Casts to fp8 with scales that never leave the device, and the transposed copies that the other
products of a linear layer read.

A tensor x becomes values = x * (largest fp8 value / amax), saturating, and the inverse scale that
brings them back: what `torch._scaled_mm` takes. amax, the largest magnitude, is of this very
tensor (current scaling) or of earlier ones (delayed scaling): a cast by an earlier one measures the
tensor as it goes. Sizes are multiples of 16, as fp8 products need them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from megatron.kernels.amax import Amaxes
from megatron.kernels.library import DTYPE_CODES, Kernel, KernelLibrary, is_traced, operator

AMAX = Kernel("fp8_amax", "ppii")
AMAX_BOTH = Kernel("fp8_amax_both", "pppiii")
CAST = Kernel("fp8_cast", "pppppiii")
CAST_ROWS = Kernel("fp8_cast_rows", "pppiiii")
CAST_TRANSPOSE = Kernel("fp8_cast_transpose", "ppppppppiiii")
TRANSPOSE = Kernel("fp8_transpose", "ppii")

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FP8_CODES = {E4M3: 0, E5M2: 1}  # fp8.cu has the same
SMALLEST = 1e-12  # amax of a tensor of zeros


@dataclass(frozen=True)
class Fp8:
    """A matrix in fp8.

    Attributes:
        values: [m, k], row-major.
        inverse: fp32, times which values are the matrix: [] for all or [m, 1] for each row.
    """

    values: Tensor
    inverse: Tensor

    def dequantized(self) -> Tensor:
        """The matrix in fp32."""
        return self.values.float() * self.inverse


def inverses_of(amaxes: Tensor, fp8: torch.dtype) -> Tensor:
    """What a cast with one scale gives as `Fp8.inverse`, for each of `amaxes`: fp32, [n]."""
    held = amaxes.clamp(min=SMALLEST)
    # By a tensor: a GPU would multiply by the inverse of a number, and round twice.
    return held / torch.full_like(held, torch.finfo(fp8).max)


class Fp8Casts(Protocol):
    """Matrices x are [m, k], contiguous, in bf16, fp16 or fp32; `fp8` is E4M3 or E5M2.

    Where `found`, fp32 [], is given, it rises to the largest magnitude of x, if that is larger (nan
    is the largest), and what is not finite becomes nan: with the amax of another tensor, inf would
    else come out as a number.
    """

    def amax(self, x: Tensor) -> Tensor:
        """Largest magnitude: fp32 []. nan where x has one."""
        ...

    def cast(
        self,
        x: Tensor,
        amax: Tensor,
        fp8: torch.dtype,
        *,
        found: Tensor | None = None,
        into: Tensor | None = None,
    ) -> Fp8:
        """x with one scale. m may be any number. The values go `into` where given, [m, k]."""
        ...

    def cast_transpose(
        self, x: Tensor, amax: Tensor, fp8: torch.dtype, *, found: Tensor | None = None
    ) -> tuple[Fp8, Fp8]:
        """x and its transpose [k, m] with one scale, the same for both."""
        ...

    def forget(self) -> None:
        """See `Amaxes.forget`."""
        ...

    def transpose(self, matrix: Fp8) -> Fp8:
        """The transpose [k, m] of a matrix with one scale."""
        ...

    def cast_rows(self, x: Tensor, fp8: torch.dtype) -> Fp8:
        """x with its own scale for each row. m may be any number."""
        ...

    def cast_transpose_rows(self, x: Tensor, fp8: torch.dtype) -> tuple[Fp8, Fp8]:
        """x with a scale for each row, and x^T with a scale for each of its rows."""
        ...


def choose_fp8_casts(library: KernelLibrary | None, amaxes: Amaxes | None = None) -> Fp8Casts:
    """Kernels where there is a library, else plain PyTorch.

    Args:
        library: of kernels.
        amaxes: where other kernels leave what they measure.
    """
    return ReferenceCasts() if library is None else KernelCasts(library, amaxes or Amaxes())


class ReferenceCasts:
    """Plain PyTorch."""

    def amax(self, x: Tensor) -> Tensor:
        return x.abs().amax().float()

    def cast(
        self,
        x: Tensor,
        amax: Tensor,
        fp8: torch.dtype,
        *,
        found: Tensor | None = None,
        into: Tensor | None = None,
    ) -> Fp8:
        largest = torch.finfo(fp8).max
        held = amax.float().clamp(min=SMALLEST)
        factor = torch.full_like(held, largest) / held  # a number / tensor would round twice
        scaled = (x.float() * factor).clamp(-largest, largest)
        if found is not None:
            found.copy_(torch.maximum(found, self.amax(x)))
            scaled = scaled.masked_fill(~x.isfinite(), math.nan)
        values = scaled.to(fp8)
        return Fp8(values if into is None else into.copy_(values), held / largest)

    def cast_transpose(
        self, x: Tensor, amax: Tensor, fp8: torch.dtype, *, found: Tensor | None = None
    ) -> tuple[Fp8, Fp8]:
        whole = self.cast(x, amax, fp8, found=found)
        return whole, self.transpose(whole)

    def forget(self) -> None:
        pass

    def transpose(self, matrix: Fp8) -> Fp8:
        return Fp8(matrix.values.t().contiguous(), matrix.inverse)

    def cast_rows(self, x: Tensor, fp8: torch.dtype) -> Fp8:
        return self.cast(x, x.abs().amax(dim=1, keepdim=True), fp8)

    def cast_transpose_rows(self, x: Tensor, fp8: torch.dtype) -> tuple[Fp8, Fp8]:
        return self.cast_rows(x, fp8), self.cast_rows(x.t().contiguous(), fp8)


@dataclass(frozen=True)
class KernelCasts:
    """Compiled kernels: each reads x once, and writes what it gives once. A tensor that the kernel
    before has measured is not measured again."""

    library: KernelLibrary
    amaxes: Amaxes = field(default_factory=Amaxes)

    def forget(self) -> None:
        self.amaxes.forget()

    def amax(self, x: Tensor) -> Tensor:
        known = None if is_traced(x) else self.amaxes.take(x)
        if known is not None:
            return known
        result = self._zeros(x)
        fp8_amax(self.library, x, result)
        return result

    def cast(
        self,
        x: Tensor,
        amax: Tensor,
        fp8: torch.dtype,
        *,
        found: Tensor | None = None,
        into: Tensor | None = None,
    ) -> Fp8:
        _check_row(x)
        values = torch.empty_like(x, dtype=fp8) if into is None else into
        return Fp8(values, fp8_cast(self.library, x, amax, values, found))

    def cast_transpose(
        self, x: Tensor, amax: Tensor, fp8: torch.dtype, *, found: Tensor | None = None
    ) -> tuple[Fp8, Fp8]:
        _check_both(x)
        values, turned, inverse, _ = fp8_cast_transpose(self.library, x, amax, None, fp8, found)
        return Fp8(values, inverse), Fp8(turned, inverse)

    def transpose(self, matrix: Fp8) -> Fp8:
        _check_both(matrix.values)
        return Fp8(fp8_transpose(self.library, matrix.values), matrix.inverse)

    def cast_rows(self, x: Tensor, fp8: torch.dtype) -> Fp8:
        _check_row(x)
        return Fp8(*fp8_cast_rows(self.library, x, fp8))

    def cast_transpose_rows(self, x: Tensor, fp8: torch.dtype) -> tuple[Fp8, Fp8]:
        _check_both(x)
        of_rows, of_columns = (self._zeros(x, size)[:, None] for size in x.shape)
        fp8_amax_both(self.library, x, of_rows, of_columns)
        values, turned, inverse, inverse_turned = fp8_cast_transpose(
            self.library, x, of_rows, of_columns, fp8, None
        )
        return Fp8(values, inverse), Fp8(turned, inverse_turned)

    def _zeros(self, x: Tensor, size: int | None = None) -> Tensor:
        """Return fp32 zeros for a kernel to raise: [], or [size]."""
        if is_traced(x):
            return x.new_zeros(() if size is None else (size,), dtype=torch.float32)
        if size is None:
            return self.amaxes.new(x.device)
        return self.amaxes.new_vector(size, x.device)


def _check_row(x: Tensor) -> None:
    assert x.dim() == 2, x.shape
    assert x.shape[1] % 16 == 0, f"fp8 products need multiples of 16, not {list(x.shape)}"


def _check_both(x: Tensor) -> None:
    _check_row(x)
    assert x.shape[0] % 16 == 0, f"fp8 products need multiples of 16, not {list(x.shape)}"


@operator("result")
def fp8_amax(library: KernelLibrary, x: Tensor, result: Tensor) -> None:
    library.launch(AMAX, x, result, x.numel(), DTYPE_CODES[x.dtype])


@operator("of_rows", "of_columns")
def fp8_amax_both(library: KernelLibrary, x: Tensor, of_rows: Tensor, of_columns: Tensor) -> None:
    library.launch(AMAX_BOTH, x, of_rows, of_columns, *x.shape, DTYPE_CODES[x.dtype])


@operator("values", "found")
def fp8_cast(
    library: KernelLibrary, x: Tensor, amax: Tensor, values: Tensor, found: Tensor | None
) -> Tensor:
    inverse = torch.empty_like(amax)
    codes = (x.numel(), DTYPE_CODES[x.dtype], FP8_CODES[values.dtype])
    library.launch(CAST, x, values, amax, inverse, found, *codes)
    return inverse


@operator()
def fp8_cast_rows(library: KernelLibrary, x: Tensor, fp8: torch.dtype) -> tuple[Tensor, Tensor]:
    values = torch.empty_like(x, dtype=fp8)
    inverse = x.new_empty(x.shape[0], 1, dtype=torch.float32)
    codes = (*x.shape, DTYPE_CODES[x.dtype], FP8_CODES[fp8])
    library.launch(CAST_ROWS, x, values, inverse, *codes)
    return values, inverse


@operator("found")
def fp8_cast_transpose(
    library: KernelLibrary,
    x: Tensor,
    amax: Tensor,
    amax_columns: Tensor | None,
    fp8: torch.dtype,
    found: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return x and its transpose in 8 bits, and their inverse scales (the second None: the first
    serves both)."""
    values, turned = torch.empty_like(x, dtype=fp8), x.new_empty(x.shape[::-1], dtype=fp8)
    inverse = torch.empty_like(amax)
    inverse_turned = None if amax_columns is None else torch.empty_like(amax_columns)
    scales = (inverse, inverse if inverse_turned is None else inverse_turned)
    codes = (*x.shape, DTYPE_CODES[x.dtype], FP8_CODES[fp8])
    library.launch(CAST_TRANSPOSE, x, values, turned, amax, amax_columns, *scales, found, *codes)
    return values, turned, inverse, inverse_turned


@operator()
def fp8_transpose(library: KernelLibrary, matrix: Tensor) -> Tensor:
    turned = matrix.new_empty(matrix.shape[::-1])
    library.launch(TRANSPOSE, matrix, turned, *matrix.shape)
    return turned
