"""Launch plans of operations: which kernels run, with how many blocks and threads.

The arguments of an operation are a named tuple whose method `plan` returns a list of
`KernelLaunch`. This method is called once for each combination of sizes, types and missing tensors,
and `driver.py` then repeats these launches. Tensors and floating-point numbers may differ between
calls, so `plan` sees only a `Pointer` or a `Number` for them. Integers are passed unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from megatron.kernels.sources import FLOATS, constant, instance

WARP = 32
SIZES = {"float": 4, "Half": 2, "BFloat16": 2}  # bytes per element


class PlanError(RuntimeError):
    """Sizes or types that an operation's kernels do not support, which is a bug in this package."""


@dataclass(frozen=True)
class Pointer:
    """A tensor argument.

    Attributes:
        index: The index of the tensor among the arguments of the operation.
        offset: The number of bytes between the first element of the tensor and the address that is
            passed to the kernel.
    """

    index: int
    offset: int = 0

    def after(self, count: int) -> Pointer:
        """Return a pointer `count` bytes after this one."""
        return replace(self, offset=self.offset + count)


class Strided(Pointer):
    """A tensor argument that need not be contiguous."""


@dataclass(frozen=True)
class Number:
    """A floating-point argument.

    Attributes:
        index: The index of the number among the arguments of the operation.
    """

    index: int


# The letter of an argument in `library.Kernel.kinds`, by the type of its field.
KINDS: dict[type, str] = {Pointer: "p", Strided: "v", int: "i", Number: "d"}

Parameter = Pointer | Number | int | float | None


@dataclass(frozen=True)
class KernelLaunch:
    """A kernel and everything that the driver needs to launch it.

    Attributes:
        kernel: The kernel's C++ name, one of `sources.instances`.
        grid: The number of blocks in up to three dimensions.
        block: The number of threads of a block in up to three dimensions.
        parameters: The kernel's parameters.
        shared: The number of bytes of dynamic shared memory per block.
        early: Whether the kernel may start before the previous kernel in the stream ends, because
            it calls `wait_for_previous` (common.cuh).
    """

    kernel: str
    grid: tuple[int, ...]
    block: tuple[int, ...]
    parameters: Sequence[Parameter]
    shared: int = 0
    early: bool = False


Plan = Callable[..., Sequence[KernelLaunch]]


class Arguments(Protocol):
    """The arguments of an operation, as a named tuple."""

    def plan(self) -> Sequence[KernelLaunch]:
        """Return the kernel launches.

        Raises:
            PlanError: The kernels do not support the sizes or types.
        """
        ...


def divide_up(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return -(-a // b)


def vector_size(kind: str) -> int:
    """Return the number of elements of a C++ type that fit in 16 bytes."""
    return 16 // SIZES[kind]


def stream_types(x_dtype: int, w_dtype: int) -> tuple[str, str]:
    """Return the C++ types of a residual stream and of a layer's weights.

    Args:
        x_dtype: The dtype code of the stream.
        w_dtype: The dtype code of the weights.

    Raises:
        PlanError: The type of the stream is neither that of the weights nor fp32.
    """
    if x_dtype not in {w_dtype, 0}:
        raise PlanError(
            f"a stream with dtype code {x_dtype} is not supported with weights of code {w_dtype}"
        )
    return FLOATS[x_dtype], FLOATS[w_dtype]


@dataclass(frozen=True)
class RowShape:
    """The division of rows among threads (rows.cuh).

    Attributes:
        elements: The number of elements per thread.
        threads: The number of threads per row (x).
        rows: The number of rows per block (y): more than one only if a single warp handles a row.
    """

    elements: int
    threads: int
    rows: int

    @property
    def block(self) -> tuple[int, int]:
        """The dimensions of a block."""
        return self.threads, self.rows


def row_threads(elements: int) -> int:
    """Return the maximum number of threads that share a row, as in rows.cuh.

    Args:
        elements: The number of elements per thread.
    """
    return 256 if elements == 8 else 512


def row_shape(columns: int, weights: str, min_elements: int) -> RowShape:
    """Return the division of rows among threads.

    Args:
        columns: The number of elements in a row.
        weights: The C++ type of the weights.
        min_elements: The preferred number of elements per thread, 8 or 16. Long rows have more
            elements per thread.

    Raises:
        PlanError: The row is too long.
    """
    max_elements = 32 if SIZES[weights] == 2 else 16
    for elements in (8, 16, 32):
        fits = divide_up(columns, elements) <= row_threads(elements)
        if min_elements <= elements <= max_elements and fits and columns > 0:
            threads = divide_up(divide_up(columns, elements), WARP) * WARP
            return RowShape(elements, threads, 4 if threads == WARP else 1)
    raise PlanError(f"rows of {columns} elements of type {weights} are not supported")


@dataclass(frozen=True)
class ColumnShape:
    """The blocks of a kernel that processes a matrix [rows, columns] elementwise.

    A thread keeps its columns, with their biases and gradient sums, and loops over rows. Blocks of
    up to 256 threads in y cover the columns, and each block in x processes a few rows at a time.

    Attributes:
        grid: The number of blocks in x and y.
        threads: The number of threads per block.
    """

    grid: tuple[int, int]
    threads: int


def column_shape(rows: int, vectors: int, at_once: int, row_blocks: int = 0) -> ColumnShape:
    """Return the blocks for a matrix.

    Args:
        rows: The number of rows.
        vectors: The number of 16-byte vectors in a row.
        at_once: The number of rows that a block processes at a time.
        row_blocks: The maximum number of blocks in x, which then loop over rows; 0 means no limit.
    """
    warps = divide_up(vectors, WARP)
    across = divide_up(warps, 8)
    down = divide_up(rows, at_once)
    if row_blocks > 0:
        down = min(down, row_blocks)
    return ColumnShape((down, across), divide_up(warps, across) * WARP)


def summing_blocks(vectors: int, resident: int, capacity: int) -> int:
    """Return the number of blocks in x for a kernel that sums over rows.

    Args:
        vectors: The number of 16-byte vectors in a row.
        resident: The number of blocks that the GPU can run at a time.
        capacity: The number of rows of partial sums, which limits the number of blocks.
    """
    across = divide_up(divide_up(vectors, WARP), 8)
    return min(divide_up(resident, across), capacity)


def column_sums(
    kind: str,
    partial: tuple[Parameter, Parameter],
    out: tuple[Parameter, Parameter],
    count: int,
    columns: int,
) -> KernelLaunch:
    """Return the launch that adds up the partial sums of the previous kernel.

    Args:
        kind: The C++ type of the results.
        partial: One or two matrices of partial sums, fp32 [count, columns].
        out: One or two results [columns].
        count: The number of partial sums.
        columns: The number of columns.
    """
    lanes = constant("column_sums.cu", "kLanes")
    return KernelLaunch(
        instance("column_sums_kernel", kind),
        (divide_up(columns, WARP), 2 if out[1] else 1),
        (WARP, lanes),
        (*partial, *out, count, columns),
        early=True,
    )
