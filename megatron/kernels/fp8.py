"""Casts to fp8, with scales that never leave the device and with transposed copies.

The two products in the backward pass of a linear layer need the transposed copies. A cast computes
the values x * (largest fp8 value / amax), which saturate, and the inverse scale that restores x, as
`torch._scaled_mm` expects them. The amax is the largest magnitude of the tensor itself (current
scaling) or of earlier tensors (delayed scaling). With delayed scaling, the cast also computes the
tensor's own amax while reading it. Sizes are multiples of 16, as fp8 products require.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.kernels.amax import Zeros
from megatron.kernels.library import DTYPE_CODES, Kernel, KernelLibrary, is_traced, operator
from megatron.kernels.plans import SIZES, WARP, KernelLaunch, Pointer, divide_up, vector_size
from megatron.kernels.sources import FLOATS, constant, instance

_THREADS = 256  # the number of threads of most blocks, as in fp8.cuh
_ROWS_OF_WARPS = 4  # the number of rows per block if a single warp handles a row


class _Amax(NamedTuple):
    """The arguments of a kernel that computes the largest magnitude of a tensor."""

    x: Pointer  # [size]
    amax: Pointer  # initially zero; raised to the largest magnitude of x
    size: int
    dtype: int

    def plan(self) -> list[KernelLaunch]:
        """Return the kernel launches."""
        if self.size == 0:
            return []
        name = FLOATS[self.dtype]
        at_once = vector_size(name) * constant("fp8.cu", "kInFlight") * _THREADS
        grid = (divide_up(self.size, at_once),)
        return [
            KernelLaunch(
                instance("amax_kernel", name), grid, (_THREADS,), (self.x, self.size, self.amax)
            )
        ]


class _AmaxBoth(NamedTuple):
    """The arguments of a kernel that computes the amax of each row and column of matrices."""

    x: Pointer  # [matrices, rows, columns]
    of_rows: Pointer  # [matrices, rows], initially zero
    of_columns: Pointer  # [matrices, columns], initially zero
    matrices: int
    rows: int
    columns: int
    dtype: int

    def plan(self) -> list[KernelLaunch]:
        """Return the kernel launches."""
        if self.matrices == 0 or self.rows == 0 or self.columns == 0:
            return []
        warps = constant("fp8_transpose.cu", "kStripWarps")
        strip = _THREADS // WARP // warps * constant("fp8_transpose.cu", "kStripRows")
        grid = (
            divide_up(self.columns, warps * WARP * 8),
            divide_up(self.rows, strip),
            self.matrices,
        )
        kernel = instance("amax_both_kernel", FLOATS[self.dtype])
        return [
            KernelLaunch(
                kernel,
                grid,
                (_THREADS,),
                (self.x, self.rows, self.columns, self.of_rows, self.of_columns),
                early=True,
            )
        ]


class _Cast(NamedTuple):
    """The arguments of a kernel that casts to fp8 with one scale."""

    x: Pointer  # [size]
    y: Pointer  # [size] in fp8
    amax: Pointer
    inverse: Pointer  # the factor that restores x
    running_amax: Pointer | None  # initially zero; raised to the largest magnitude of x
    size: int
    dtype: int
    fp8: int

    def plan(self) -> list[KernelLaunch]:
        """Return the kernel launches."""
        if self.size == 0:
            return []
        kernel = instance(
            "cast_kernel", FLOATS[self.dtype], self.fp8, self.running_amax is not None
        )
        grid = (divide_up(self.size, 8 * constant("fp8.cu", "kCastInFlight") * _THREADS),)
        return [
            KernelLaunch(
                kernel,
                grid,
                (_THREADS,),
                (self.x, self.y, self.size, self.amax, self.inverse, self.running_amax),
                early=True,
            )
        ]


class _CastRows(NamedTuple):
    """The arguments of a kernel that casts to fp8 with a scale for each row."""

    x: Pointer  # [rows, columns]
    y: Pointer  # [rows, columns] in fp8
    inverse: Pointer  # the factors that restore rows, [rows]
    rows: int
    columns: int
    dtype: int
    fp8: int

    def plan(self) -> list[KernelLaunch]:
        """Return the kernel launches."""
        if self.rows == 0:
            return []
        vectors, name = divide_up(self.columns, 8), FLOATS[self.dtype]
        vectors_per_thread = 8 if SIZES[name] == 2 else 3  # kRowVectors in fp8.cu
        max_warps = constant("fp8.cu", "kMostRowThreads") // WARP
        warps = min(divide_up(vectors, WARP * vectors_per_thread), max_warps)
        turns = divide_up(vectors, warps * WARP)  # the block has as few warps as these turns allow
        block = (divide_up(vectors, turns * WARP) * WARP, _ROWS_OF_WARPS if warps == 1 else 1)
        kernel = instance("cast_rows_kernel", name, self.fp8)
        return [
            KernelLaunch(
                kernel,
                (divide_up(self.rows, block[1]),),
                block,
                (self.x, self.y, self.rows, self.columns, self.inverse),
            )
        ]


def _tiles(rows: int, columns: int) -> tuple[int, int]:
    tile = constant("fp8_transpose.cu", "kTile")
    return divide_up(columns, tile), divide_up(rows, tile)


class _CastTranspose(NamedTuple):
    """The arguments of a kernel that casts matrices and their transposes to fp8.

    Without `amax_columns` there is a single matrix, and both results have the same scale. Otherwise
    y has a scale for each row, and `transposed` has a scale for each column of x.
    """

    x: Pointer  # [matrices, rows, columns], like y
    y: Pointer
    transposed: Pointer  # [matrices, columns, rows]
    amax: Pointer
    amax_columns: Pointer | None
    inverse: Pointer
    inverse_columns: Pointer | None
    running_amax: Pointer | None  # with one scale; initially zero; raised to the amax of x
    matrices: int
    rows: int
    columns: int
    dtype: int
    fp8: int

    def plan(self) -> list[KernelLaunch]:
        """Return the kernel launches."""
        if self.matrices == 0 or self.rows == 0 or self.columns == 0:
            return []
        name = FLOATS[self.dtype]
        scales = (self.amax, self.amax_columns, self.inverse, self.inverse_columns)
        return [
            KernelLaunch(
                instance("cast_transpose_kernel", name, self.fp8, self.running_amax is not None),
                (*_tiles(self.rows, self.columns), self.matrices),
                (_THREADS,),
                (*self[:3], self.rows, self.columns, *scales, self.running_amax),
                shared=constant("fp8_transpose.cu", "kTile") ** 2 * SIZES[name],
                early=True,
            )
        ]


class _Transpose(NamedTuple):
    """The arguments of a kernel that transposes a matrix of bytes."""

    x: Pointer  # [rows, columns]
    y: Pointer  # [columns, rows]
    rows: int
    columns: int

    def plan(self) -> list[KernelLaunch]:
        """Return the kernel launches."""
        if self.rows == 0 or self.columns == 0:
            return []
        return [
            KernelLaunch(
                "transpose_kernel",
                _tiles(self.rows, self.columns),
                (_THREADS,),
                (self.x, self.y, self.rows, self.columns),
            )
        ]


AMAX = Kernel.of("fp8_amax", _Amax)
AMAX_BOTH = Kernel.of("fp8_amax_both", _AmaxBoth)
CAST = Kernel.of("fp8_cast", _Cast)
CAST_ROWS = Kernel.of("fp8_cast_rows", _CastRows)
CAST_TRANSPOSE = Kernel.of("fp8_cast_transpose", _CastTranspose)
TRANSPOSE = Kernel.of("fp8_transpose", _Transpose)

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FP8_CODES = {E4M3: 0, E5M2: 1}  # as in fp8.cu
SMALLEST = 1e-12  # the smallest amax, used for a tensor of zeros


class Fp8(NamedTuple):
    """A matrix in fp8, or a stack of matrices.

    Attributes:
        values: The 8-bit values, row-major: [m, k], or [n, m, k] for a stack.
        inverse: The factor that restores the matrix, fp32: [], or [m, 1] with a factor for each
            row, or [n, m, 1] for a stack.
    """

    values: Tensor
    inverse: Tensor

    def dequantized(self) -> Tensor:
        """Return the matrix in fp32."""
        return self.values.float() * self.inverse


def inverses_of(amaxes: Tensor, fp8: torch.dtype) -> Tensor:
    """Return `Fp8.inverse` for casts with one scale, given the amaxes [n]: fp32 [n]."""
    clamped = amaxes.clamp(min=SMALLEST)
    # A GPU divides by a Python number by multiplying by its inverse, which would round twice.
    return clamped / torch.full_like(clamped, torch.finfo(fp8).max)


def choose_fp8_casts(library: KernelLibrary | None, zeros: Zeros | None = None) -> Fp8Casts:
    """Choose the kernels if there is a library, otherwise plain PyTorch.

    Args:
        library: Compiled kernels.
        zeros: The zeroed memory in which kernels store amaxes; `None` creates a new pool.
    """
    return Fp8Casts() if library is None else KernelCasts(library, zeros or Zeros())


class Fp8Casts:
    """Casts to fp8 in plain PyTorch.

    Matrices x are [m, k], contiguous, in bf16, fp16 or fp32; `fp8` is E4M3 or E5M2.

    If the scale comes from earlier tensors, callers pass `running_amax`, fp32 [], which is raised
    to the largest magnitude of x; nan counts as the largest. Values of x that are not finite then
    become nan, because clamping would turn inf into a finite number.
    """

    def amax(self, x: Tensor) -> Tensor:
        """Return the largest magnitude, fp32 []; nan if x contains a nan."""
        return x.abs().amax().float()

    def cast(
        self,
        x: Tensor,
        amax: Tensor,
        fp8: torch.dtype,
        *,
        running_amax: Tensor | None = None,
        into: Tensor | None = None,
    ) -> Fp8:
        """Cast a matrix with one scale.

        Args:
            x: The matrix [m, k]; any m is allowed.
            amax: The amax that determines the scale, fp32 [].
            fp8: The format of the values.
            running_amax: As described in `Fp8Casts`, or `None`.
            into: The memory for the values, [m, k]; `None` allocates it.
        """
        values = torch.empty_like(x, dtype=fp8) if into is None else into
        return Fp8(values, self._cast(x, amax, values, running_amax))

    def _cast(self, x: Tensor, amax: Tensor, values: Tensor, running_amax: Tensor | None) -> Tensor:
        """Write x to `values` in 8 bits and return the inverse scale."""
        largest = torch.finfo(values.dtype).max
        clamped = amax.float().clamp(min=SMALLEST)
        # Dividing a Python number by a tensor would round twice.
        factor = torch.full_like(clamped, largest) / clamped
        scaled = (x.float() * factor).clamp(-largest, largest)
        if running_amax is not None:
            running_amax.copy_(torch.maximum(running_amax, self.amax(x)))
            scaled = scaled.masked_fill(~x.isfinite(), math.nan)
        values.copy_(scaled)
        return clamped / largest

    def cast_transpose(
        self, x: Tensor, amax: Tensor, fp8: torch.dtype, *, running_amax: Tensor | None = None
    ) -> tuple[Fp8, Fp8]:
        """Cast a matrix [m, k] and its transpose [k, m] with the same scale (see `cast`)."""
        whole = self.cast(x, amax, fp8, running_amax=running_amax)
        return whole, self.transpose(whole)

    def forget(self) -> None:
        """Do nothing. Subclasses that keep zeros discard the remaining ones (`Zeros.forget`)."""

    def transpose(self, matrix: Fp8) -> Fp8:
        """Return the transpose [k, m] of a matrix with one scale."""
        return Fp8(matrix.values.t().contiguous(), matrix.inverse)

    def cast_rows(self, x: Tensor, fp8: torch.dtype) -> Fp8:
        """Cast a matrix [m, k] with any m, or a stack [n, m, k], with a scale for each row."""
        return self.cast(x, x.abs().amax(dim=-1, keepdim=True), fp8)

    def cast_transpose_rows(self, x: Tensor, fp8: torch.dtype) -> tuple[Fp8, Fp8]:
        """Cast a matrix and its transpose, each with a scale for each of its own rows.

        Each matrix of a stack [n, m, k] is transposed: [n, k, m].
        """
        return self.cast_rows(x, fp8), self.cast_rows(x.mT.contiguous(), fp8)


class KernelCasts(Fp8Casts):
    """Casts with compiled kernels, which read x once and write each result once."""

    def __init__(self, library: KernelLibrary, zeros: Zeros) -> None:
        """Store the kernels and the zeroed memory for amaxes."""
        self.library, self.zeros = library, zeros

    def forget(self) -> None:
        """Discard the remaining zeros (`Zeros.forget`)."""
        self.zeros.forget()

    def amax(self, x: Tensor) -> Tensor:
        """Return the largest magnitude, computed by a kernel."""
        result = self._zeros(x)
        fp8_amax(self.library, x, result)
        return result

    def _cast(self, x: Tensor, amax: Tensor, values: Tensor, running_amax: Tensor | None) -> Tensor:
        _check(x)
        inverse: Tensor = fp8_cast(self.library, x, amax, values, running_amax)
        return inverse

    def cast_transpose(
        self, x: Tensor, amax: Tensor, fp8: torch.dtype, *, running_amax: Tensor | None = None
    ) -> tuple[Fp8, Fp8]:
        """Cast a matrix and its transpose with the same scale."""
        _check(x, rows=True)
        values, transposed, inverse, _ = fp8_cast_transpose(
            self.library, x, amax, None, fp8, running_amax
        )
        return Fp8(values, inverse), Fp8(transposed, inverse)

    def transpose(self, matrix: Fp8) -> Fp8:
        """Return the transpose of a matrix with one scale."""
        _check(matrix.values, rows=True)
        return Fp8(fp8_transpose(self.library, matrix.values), matrix.inverse)

    def cast_rows(self, x: Tensor, fp8: torch.dtype) -> Fp8:
        """Cast a matrix or a stack with a scale for each row."""
        _check(x)
        return Fp8(*fp8_cast_rows(self.library, x, fp8))

    def cast_transpose_rows(self, x: Tensor, fp8: torch.dtype) -> tuple[Fp8, Fp8]:
        """Cast a matrix and its transpose, each with a scale for each of its own rows."""
        _check(x, rows=True)
        shapes = (*x.shape[:-1], 1), (*x.shape[:-2], x.shape[-1], 1)
        of_rows, of_columns = (self._zeros(x, math.prod(shape)).view(shape) for shape in shapes)
        fp8_amax_both(self.library, x, of_rows, of_columns)
        values, transposed, inverse, inverse_transposed = fp8_cast_transpose(
            self.library, x, of_rows, of_columns, fp8, None
        )
        return Fp8(values, inverse), Fp8(transposed, inverse_transposed)

    def _zeros(self, x: Tensor, size: int | None = None) -> Tensor:
        """Return fp32 zeros, [] or [size], in which a kernel will store amaxes."""
        if is_traced(x):
            return x.new_zeros(() if size is None else (size,), dtype=torch.float32)
        if size is None:
            return self.zeros.new(x.device)
        return self.zeros.new_vector(size, x.device)


def _check(x: Tensor, *, rows: bool = False) -> None:
    """Assert that the width (with `rows` also the height) of the matrices is a multiple of 16."""
    sizes = x.shape[-2:] if rows else x.shape[-1:]
    assert x.dim() in (2, 3) and not any(size % 16 for size in sizes), (
        f"fp8 products need matrices whose sizes are multiples of 16, not {list(x.shape)}"
    )


def _sizes(x: Tensor) -> tuple[int, int, int]:
    """Return the numbers of matrices, rows and columns of a matrix or stack."""
    return math.prod(x.shape[:-2]), x.shape[-2], x.shape[-1]


@operator("result")
def fp8_amax(library: KernelLibrary, x: Tensor, result: Tensor) -> None:
    """Raise `result`, fp32 [], to the largest magnitude of x if it is smaller."""
    library.launch(AMAX, x, result, x.numel(), DTYPE_CODES[x.dtype])


@operator("of_rows", "of_columns")
def fp8_amax_both(library: KernelLibrary, x: Tensor, of_rows: Tensor, of_columns: Tensor) -> None:
    """Raise amaxes to the largest magnitudes in x, by row and by column.

    Args:
        library: Compiled kernels.
        x: The matrix [m, k] or stack [n, m, k].
        of_rows: The amaxes of rows, fp32 [m, 1] or [n, m, 1].
        of_columns: The amaxes of columns, fp32 [k, 1] or [n, k, 1].
    """
    library.launch(AMAX_BOTH, x, of_rows, of_columns, *_sizes(x), DTYPE_CODES[x.dtype])


@operator("values", "running_amax")
def fp8_cast(
    library: KernelLibrary, x: Tensor, amax: Tensor, values: Tensor, running_amax: Tensor | None
) -> Tensor:
    """Write x to `values` in 8 bits and return the inverse scale, fp32 [].

    Args:
        library: Compiled kernels.
        x: The matrix [m, k].
        amax: The amax that determines the scale, fp32 [].
        values: The memory for the result, [m, k] in an 8-bit dtype.
        running_amax: As described in `Fp8Casts`, or `None`.
    """
    inverse = torch.empty_like(amax)
    codes = (x.numel(), DTYPE_CODES[x.dtype], FP8_CODES[values.dtype])
    library.launch(CAST, x, values, amax, inverse, running_amax, *codes)
    return inverse


@operator()
def fp8_cast_rows(library: KernelLibrary, x: Tensor, fp8: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return x [..., m, k] in 8 bits, and the inverse scale of each row, fp32 [..., m, 1]."""
    values = torch.empty_like(x, dtype=fp8)
    inverse = x.new_empty(*x.shape[:-1], 1, dtype=torch.float32)
    codes = (inverse.numel(), x.shape[-1], DTYPE_CODES[x.dtype], FP8_CODES[fp8])
    library.launch(CAST_ROWS, x, values, inverse, *codes)
    return values, inverse


@operator("running_amax")
def fp8_cast_transpose(
    library: KernelLibrary,
    x: Tensor,
    amax: Tensor,
    amax_columns: Tensor | None,
    fp8: torch.dtype,
    running_amax: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return x and its transpose in 8 bits, and their inverse scales.

    Without `amax_columns`, the first scale applies to both results, and the second scale is `None`.

    Args:
        library: Compiled kernels.
        x: The matrix [m, k], or with `amax_columns` also a stack [n, m, k].
        amax: The amax of x, fp32 [], or the amax of each row, fp32 [..., m, 1].
        amax_columns: The amax of each column, fp32 [..., k, 1]; `None` for a single scale.
        fp8: The format of the values.
        running_amax: As described in `Fp8Casts`, or `None`.
    """
    values, transposed = torch.empty_like(x, dtype=fp8), x.new_empty(x.mT.shape, dtype=fp8)
    inverse = torch.empty_like(amax)
    inverse_transposed = None if amax_columns is None else torch.empty_like(amax_columns)
    scales = (inverse, inverse if inverse_transposed is None else inverse_transposed)
    codes = (*_sizes(x), DTYPE_CODES[x.dtype], FP8_CODES[fp8])
    library.launch(
        CAST_TRANSPOSE, x, values, transposed, amax, amax_columns, *scales, running_amax, *codes
    )
    return values, transposed, inverse, inverse_transposed


@operator()
def fp8_transpose(library: KernelLibrary, matrix: Tensor) -> Tensor:
    """Return the transpose of an 8-bit matrix."""
    transposed = matrix.new_empty(matrix.shape[::-1])
    library.launch(TRANSPOSE, matrix, transposed, *matrix.shape)
    return transposed
