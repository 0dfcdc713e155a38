"""Launches of compiled kernels through the CUDA driver.

The launches of a `Plan` are prepared once, as driver structures with all constant values filled in.
A call then only writes the tensors' addresses into these structures and calls the driver. This
takes less time than converting the arguments of a C function.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron.kernels.plans import KernelLaunch, Number, PlanError, Pointer

_EARLY = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
# By default, a block gets 48 KiB of shared memory, including static memory (at most 16 KiB here).
_DEFAULT_SHARED = 32 * 1024


class DriverError(RuntimeError):
    """An error that the driver reports."""


class LaunchConfig(ctypes.Structure):
    """The driver's `CUlaunchConfig`."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("attribute_count", ctypes.c_uint),
    )


class LaunchAttribute(ctypes.Structure):
    """The driver's `CUlaunchAttribute`."""

    _fields_ = (
        ("id", ctypes.c_int),
        ("padding", ctypes.c_int),
        ("value", ctypes.c_int),
        ("rest", ctypes.c_char * 60),
    )


_EARLY_ATTRIBUTE = LaunchAttribute(id=_EARLY, value=1)


class Driver:
    """The functions of the CUDA driver that this package calls."""

    def __init__(self, loaded: Any) -> None:
        """Look up the functions, and initialize the driver.

        Args:
            loaded: libcuda, or an emulator with the same functions.

        Raises:
            AttributeError: The driver is older than CUDA 12.
            DriverError: The driver cannot be initialized.
        """
        self._loaded = loaded
        self.launch = loaded.cuLaunchKernelEx
        self.launch.argtypes = [ctypes.c_void_p] * 4
        self.launch.restype = ctypes.c_int
        self._contexts: dict[int, ctypes.c_void_p] = {}
        self._shared: dict[tuple[int, int], int] = {}
        # Without this lock, the smaller of two threads' requests could come last.
        self._lock = threading.Lock()
        for name in ("cuLibraryLoadData", "cuLibraryGetKernel"):
            getattr(loaded, name).restype = ctypes.c_int
        self.call("cuInit", 0)

    def call(self, function: str, *arguments: Any) -> None:
        """Call a function of the driver.

        Raises:
            DriverError: The function reports an error.
        """
        if error := getattr(self._loaded, function)(*arguments):
            raise DriverError(f"{function}: {self.error(error)}")

    def error(self, code: int) -> str:
        """Return the name and the description of an error code."""
        texts = []
        for function in ("cuGetErrorName", "cuGetErrorString"):
            text = ctypes.c_char_p()
            getattr(self._loaded, function)(code, ctypes.byref(text))
            texts.append((text.value or b"unknown").decode())
        return f"{texts[0]} ({texts[1]})"

    def load(self, code: bytes) -> ctypes.c_void_p:
        """Load compiled code, and return its handle.

        Raises:
            DriverError: The driver rejects the code, for example because the driver is for an older
                CUDA version.
        """
        library = ctypes.c_void_p()
        no_options = (None, None, 0) * 2
        self.call("cuLibraryLoadData", ctypes.byref(library), code, *no_options)
        return library

    def find(self, library: ctypes.c_void_p, name: str) -> int:
        """Return the handle of a kernel, which is valid for every GPU.

        Raises:
            DriverError: There is no such kernel.
        """
        kernel = ctypes.c_void_p()
        self.call("cuLibraryGetKernel", ctypes.byref(kernel), library, name.encode())
        return kernel.value or 0

    def make_current(self, gpu: int) -> None:
        """Make PyTorch's context of the GPU current in the calling thread.

        Raises:
            DriverError: The driver reports an error.
        """
        context = self._contexts.get(gpu)
        if context is None:
            context = ctypes.c_void_p()
            self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), gpu)
            self._contexts[gpu] = context
        self.call("cuCtxSetCurrent", context)

    def allow_shared_memory(self, kernel: int, gpu: int, count: int) -> None:
        """Allow the blocks of a kernel to use dynamic shared memory.

        Args:
            kernel: The handle of the kernel.
            gpu: The index of the GPU.
            count: The number of bytes per block.

        Raises:
            DriverError: The GPU has less shared memory.
        """
        if count <= _DEFAULT_SHARED:
            return
        with self._lock:
            if count > self._shared.get((kernel, gpu), 0):
                handle = ctypes.c_void_p(kernel)
                self.call("cuKernelSetAttribute", _MAX_DYNAMIC_SHARED, count, handle, gpu)
                self._shared[kernel, gpu] = count


@dataclass(frozen=True)
class PreparedLaunches:
    """A plan's launches in the driver's structures.

    Calls change the structures, so only one thread may use them.

    Attributes:
        packer: The packer that writes the values of a call into `values`.
        values: The memory of the values that differ between calls, followed by constants.
        picks: For each packed value, its index among the values of the call, and an offset to add;
            `None` if the values are packed unchanged.
        calls: The arguments of the driver's launch function, for each launch.
        keep_alive: The objects to which these arguments point.
    """

    packer: struct.Struct
    values: ctypes.Array[ctypes.c_char]
    picks: Sequence[tuple[int, int]] | None
    calls: Sequence[tuple[Any, ...]]
    keep_alive: Sequence[Any]

    def write(self, values: Sequence[Any]) -> None:
        """Write the tensors' addresses and the numbers of a call into `values`."""
        if self.picks is not None:
            values = [values[i] + offset if offset else values[i] for i, offset in self.picks]
        self.packer.pack_into(self.values, 0, *values)


@dataclass(frozen=True)
class LaunchTarget:
    """The GPU and stream on which a plan will run.

    Attributes:
        gpu: The index of the GPU, or -1 for the emulator.
        stream: The stream's handle.
        overlaps: Whether a kernel may start before the previous kernel has ended.
    """

    gpu: int
    stream: int
    overlaps: bool


def prepare(
    launches: Sequence[KernelLaunch],
    handles: Sequence[int],
    letters: Sequence[str],
    indices: Sequence[int],
    target: LaunchTarget,
) -> PreparedLaunches:
    """Prepare a plan's launches, so that calls only have to write values and launch.

    Args:
        launches: The launches that a plan has returned.
        handles: The handle of each launch's kernel.
        letters: The letters of each kernel's parameters (`sources.parameters`).
        indices: The indices, among the arguments of the operation, of the values that calls will
            provide.
        target: The GPU and stream on which the plan will run.

    Raises:
        PlanError: The parameters of a launch do not match those of its kernel.
    """
    slots: dict[tuple[int, int, str], int] = {}
    constants: list[bytes] = []
    parameter_slots: list[list[int]] = []  # per launch: slots, or constants as negative numbers
    for launch, kinds in zip(launches, letters, strict=True):
        if len(kinds) != len(launch.parameters):
            raise PlanError(f"{launch.kernel} takes {len(kinds)} parameters")
        row = []
        for letter, parameter in zip(kinds, launch.parameters, strict=True):
            if isinstance(parameter, Pointer | Number):
                if isinstance(parameter, Pointer) != (letter == "P"):
                    raise PlanError(f"{launch.kernel}: {parameter} for a parameter {letter!r}")
                offset = parameter.offset if isinstance(parameter, Pointer) else 0
                slot = (indices.index(parameter.index), offset, letter)
                row.append(slots.setdefault(slot, len(slots)))
            else:
                constants.append(_constant(launch.kernel, letter, parameter))
                row.append(-len(constants))
        parameter_slots.append(row)
    packer = struct.Struct("=" + "".join({"P": "Q", "f": "f4x"}.get(s[2], s[2]) for s in slots))
    # One allocation for the values and then the constants. With expert parallelism the number of
    # rows changes in every pass, and with an allocation for each constant, preparing took twice as
    # long.
    values = ctypes.create_string_buffer(bytes(packer.size) + b"".join(constants))
    start = ctypes.addressof(values)
    constants_start = start + packer.size
    keep_alive: list[Any] = []
    calls = []
    for launch, handle, row in zip(launches, handles, parameter_slots, strict=True):
        parameters = (ctypes.c_void_p * len(row))(
            *(start + 8 * i if i >= 0 else constants_start + 8 * (-i - 1) for i in row)
        )
        early = launch.early and target.overlaps
        config = LaunchConfig(
            grid=_three(launch.grid),
            block=_three(launch.block),
            shared=launch.shared,
            stream=target.stream,
            attributes=ctypes.addressof(_EARLY_ATTRIBUTE) if early else None,
            attribute_count=int(early),
        )
        keep_alive += (parameters, config)
        calls.append((ctypes.addressof(config), handle, ctypes.addressof(parameters), None))
    picks = [(index, offset) for index, offset, _ in slots]
    is_identity = picks == [(i, 0) for i in range(len(indices))]
    return PreparedLaunches(packer, values, None if is_identity else picks, calls, keep_alive)


def _constant(kernel: str, letter: str, value: int | float | None) -> bytes:
    """Return the 8 bytes of a constant parameter."""
    try:
        content = struct.pack("Q" if letter == "P" else letter, 0 if value is None else value)
    except struct.error as error:
        raise PlanError(f"{kernel}: {value} for a parameter {letter!r}: {error}") from None
    return content.ljust(8, b"\0")


def _three(sizes: tuple[int, ...]) -> tuple[int, int, int]:
    """Return the sizes of three dimensions, padded with 1."""
    x, y, z = (*sizes, 1, 1, 1)[:3]
    return x, y, z
