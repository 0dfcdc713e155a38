"""How operations are launched: which kernels run, with how many blocks and threads.

A plan is a function of an operation's arguments that returns a list of `KernelLaunch`. It is asked
once for each combination of sizes, types and missing tensors; `driver.py` then repeats what it
said. Tensors and floating-point numbers may differ from call to call, so a plan sees them as a
`Pointer` and a `Number`, while integers are themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from megatron.kernels.sources import FLOATS, constant, instance

WARP = 32
SIZES = {"float": 4, "Half": 2, "BFloat16": 2}  # bytes of an element


class PlanError(RuntimeError):
    """An error for sizes or types that an operation's kernels do not take: a bug in our code."""


@dataclass(frozen=True)
class Pointer:
    """A tensor argument.

    Attributes:
        place: Its place among the operation's arguments.
        offset: The bytes from the tensor's first element to where a kernel begins.
    """

    place: int
    offset: int = 0

    def after(self, count: int) -> Pointer:
        """Return the pointer to the byte `count` bytes later."""
        return replace(self, offset=self.offset + count)


@dataclass(frozen=True)
class Number:
    """A floating-point argument, by its place among the operation's arguments."""

    place: int


Parameter = Pointer | Number | int | float | None


@dataclass(frozen=True)
class KernelLaunch:
    """One kernel, with everything that the driver needs to know.

    Attributes:
        kernel: The kernel's C++ name, one of `sources.instances`.
        grid: The number of blocks in up to three dimensions.
        block: The number of threads of a block in up to three dimensions.
        parameters: The kernel's parameters.
        shared: The bytes of dynamic shared memory of a block.
        early: Whether the kernel may start before the one ahead of it in the stream ends, because
            it calls `wait_for_previous` (common.cuh).
    """

    kernel: str
    grid: tuple[int, ...]
    block: tuple[int, ...]
    parameters: Sequence[Parameter]
    shared: int = 0
    early: bool = False


Plan = Callable[..., Sequence[KernelLaunch]]


def divide_up(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return -(-a // b)


def vector_size(kind: str) -> int:
    """Return the number of elements in 16 bytes."""
    return 16 // SIZES[kind]


def stream_types(x_dtype: int, w_dtype: int) -> tuple[str, str]:
    """Return the C++ types of a residual stream and of the weights beside it.

    Raises:
        PlanError: The stream has neither the weights' type nor fp32.
    """
    if x_dtype not in {w_dtype, 0}:
        raise PlanError(f"a stream of type {x_dtype} beside weights of type {w_dtype}")
    return FLOATS[x_dtype], FLOATS[w_dtype]


@dataclass(frozen=True)
class RowShape:
    """How a row is shared (rows.cuh).

    Attributes:
        elements: The elements of a thread.
        threads: The threads of a row (x).
        rows: The rows of a block (y): more than one only if a single warp has the row.
    """

    elements: int
    threads: int
    rows: int

    @property
    def block(self) -> tuple[int, int]:
        """The threads of a block."""
        return self.threads, self.rows


def row_threads(elements: int) -> int:
    """Return the most threads that share a row, as rows.cuh has it."""
    return 256 if elements == 8 else 512


def row_shape(columns: int, weights: str, fewest: int) -> RowShape:
    """Return how a row is shared.

    Args:
        columns: The number of elements in a row.
        weights: The weights' type.
        fewest: The elements of a thread while the threads suffice, 8 or 16.

    Raises:
        PlanError: The row is too long.
    """
    most = 32 if SIZES[weights] == 2 else 16
    for elements in (8, 16, 32):
        fits = divide_up(columns, elements) <= row_threads(elements)
        if fewest <= elements <= most and fits and columns > 0:
            threads = divide_up(divide_up(columns, elements), WARP) * WARP
            return RowShape(elements, threads, 4 if threads == WARP else 1)
    raise PlanError(f"rows of {columns} elements of type {weights}")


@dataclass(frozen=True)
class ColumnShape:
    """Blocks for kernels that treat [rows, columns] elementwise.

    A thread keeps its columns, to which a bias and the sum of its gradient belong, and goes through
    rows. Blocks of up to 256 threads in y cover the columns; blocks in x take some rows at a time.
    """

    grid: tuple[int, int]
    threads: int


def column_shape(rows: int, vectors: int, at_once: int, row_blocks: int = 0) -> ColumnShape:
    """Return the blocks.

    Args:
        rows: The number of rows.
        vectors: The number of 16-byte vectors in a row.
        at_once: The number of rows that a block takes at a time.
        row_blocks: The most blocks in x, which then loop. 0: as many as there are rows for.
    """
    warps = divide_up(vectors, WARP)
    across = divide_up(warps, 8)
    down = divide_up(rows, at_once)
    if row_blocks > 0:
        down = min(down, row_blocks)
    return ColumnShape((down, across), divide_up(warps, across) * WARP)


def summing_blocks(vectors: int, resident: int, capacity: int) -> int:
    """Return the blocks in x of a kernel that sums over rows.

    They are all that the GPU holds at a time (`resident`), and no more than there are rows of
    partial sums (`capacity`).
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
    """Return the launch that adds up partial sums that the kernel before it has left.

    Args:
        kind: The type of the results.
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
