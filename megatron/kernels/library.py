"""The compiled CUDA kernels, loaded through ctypes: found or built once, called from operations.

An operation's module declares the C functions that it calls as `Kernel` constants, and takes a
`KernelLibrary` as an argument. Whether there is one is decided once, when a model is built:

    choice = find_library(device)
    norm = choose_add_norm(choice.library)  # None: the plain PyTorch form
    print(choice)
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.device import Device, current_gpu, stream_handle
from megatron.environment import cache_folder, read_launch
from megatron.errors import say_on_stderr
from megatron.kernels.build import (
    PREBUILT,
    BuildError,
    build,
    find_built,
    name_of,
    say_nothing,
)

OLDEST_CAPABILITY = (8, 0)  # bf16 and asynchronous copies
DTYPE_CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}  # common.cuh has the same
VECTOR_BYTES = 16  # kernels read and write this much at once

Argument = Tensor | int | float | None
_KINDS: dict[str, type[ctypes._SimpleCData]] = {
    "p": ctypes.c_void_p,
    "v": ctypes.c_void_p,
    "i": ctypes.c_int64,
    "d": ctypes.c_double,
}


class KernelError(RuntimeError):
    """A kernel was called wrongly, or CUDA refused the launch: our mistake, not the user's."""


@dataclass(frozen=True)
class Kernel:
    """A C function of the library.

    Args:
        name: of the function.
        kinds: a letter an argument: p contiguous tensor or None, v tensor of any strides (which
            are arguments too), i whole number or dtype code, d number. The stream comes after them.
    """

    name: str
    kinds: str


class _Thread(threading.local):
    """Each thread's current GPU for the library, whose CUDA runtime is not PyTorch's."""

    gpu = -1


class KernelLibrary:
    """Compiled kernels for one GPU architecture."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._loaded = ctypes.CDLL(str(path))
        self._thread = _Thread()
        self._functions: dict[str, ctypes._NamedFuncPointer] = {}
        for name in ("error_name", "error_text"):
            function = getattr(self._loaded, name)  # which the object keeps, unlike self[name]
            function.argtypes, function.restype = [ctypes.c_int64], ctypes.c_char_p
        self._loaded.set_device.argtypes = [ctypes.c_int64]

    def check(self, gpu: int) -> None:
        """Whether the GPU's driver takes the library: one of an older CUDA may not.

        Raises:
            KernelError: it does not.
        """
        self._expect_success("set_device", self._loaded.set_device(gpu))

    def launch(self, kernel: Kernel, *arguments: Argument) -> None:
        """Run a kernel on PyTorch's current stream of the device of the first tensor.

        Raises:
            KernelError: an argument does not fit, or CUDA reports an error.
        """
        values, tensor = _values(kernel, arguments)
        function = self._functions.get(kernel.name) or self._find(kernel)
        gpu = tensor.get_device()
        if gpu < 0:  # an emulator's
            error = function(*values, 0)
        elif gpu == self._thread.gpu == current_gpu():
            error = function(*values, stream_handle(gpu))
        else:
            with Device(tensor.device).as_current():
                error = self._loaded.set_device(gpu) or function(*values, stream_handle(gpu))
            self._thread.gpu = gpu
        self._expect_success(kernel.name, error)

    def _expect_success(self, function: str, error: int) -> None:
        if error:
            name = self._loaded.error_name(error).decode()
            text = self._loaded.error_text(error).decode()
            raise KernelError(f"{function}: {name} ({text})")

    def _find(self, kernel: Kernel) -> ctypes._NamedFuncPointer:
        function = self._loaded[kernel.name]
        function.argtypes = [*(_KINDS[kind] for kind in kernel.kinds), ctypes.c_void_p]
        function.restype = ctypes.c_int
        self._functions[kernel.name] = function
        return function


def _values(kernel: Kernel, arguments: Sequence[Argument]) -> tuple[list[Any], Tensor]:
    """What the C function takes, and the first tensor. Called a thousand times a step."""
    if len(arguments) != len(kernel.kinds):
        raise KernelError(f"{kernel.name} takes {len(kernel.kinds)} arguments")
    values: list[Any] = []
    first, gpu = None, -1
    for kind, value in zip(kernel.kinds, arguments, strict=True):
        if value is None or kind in "id":
            values.append(value)  # ctypes refuses what is no number
            continue
        if not isinstance(value, Tensor):
            raise KernelError(f"{kernel.name} takes a tensor, not {value}")
        if first is None:
            first, gpu = value, value.get_device()
        elif value.get_device() != gpu:
            raise KernelError(f"{kernel.name}: tensors of {first.device} and {value.device}")
        if kind == "p" and not value.is_contiguous():
            raise KernelError(f"{kernel.name}: a tensor {list(value.shape)} is not contiguous")
        values.append(value.data_ptr())
    if first is None:
        raise KernelError(f"{kernel.name} takes tensors")
    return values, first


def aligned(*tensors: Tensor | None) -> bool:
    """Whether 16-byte accesses may start at each tensor's first element."""
    return all(x is None or x.data_ptr() % VECTOR_BYTES == 0 for x in tensors)


@dataclass(frozen=True)
class LibraryChoice:
    """The library, or None for the plain PyTorch forms; and why."""

    library: KernelLibrary | None
    reason: str

    def __str__(self) -> str:
        return f"{'fused' if self.library else 'plain PyTorch'} ({self.reason})"


@cache
def find_library(device: torch.device) -> LibraryChoice:
    """The library for this device, compiled now if it is not there, so ask for it before processes
    wait for each other. On a GPU that must do without, one line says why.

    Never raises: without a library everything runs, slower, on PyTorch's operations.
    """
    ours = Device(device)
    if not ours.is_gpu:
        return LibraryChoice(None, f"no kernels for {ours.type}")
    if ours.capability < OLDEST_CAPABILITY:
        reason = f"{ours.name} is older than compute capability 8.0"
    else:
        architecture = name_of(*ours.capability)
        try:
            return LibraryChoice(_load(find_or_build(architecture), ours), architecture)
        except (BuildError, OSError) as error:  # OSError: of a file system that has gone
            reason = str(error)
    if read_launch().local_rank == 0:
        say_on_stderr(f"fused kernels: off, plain PyTorch runs instead: {reason}")
    return LibraryChoice(None, reason)


def _load(path: Path, device: Device) -> KernelLibrary:
    """The library, tried on the device.

    Raises:
        BuildError: it cannot be loaded, or the driver does not take it.
    """
    try:
        with device.as_current():
            library = KernelLibrary(path)
            library.check(current_gpu())
    except (OSError, AttributeError, KernelError) as error:
        raise BuildError(
            f"{path} does not run here ({error}): update the driver or delete the file, or set "
            "MEGATRON_CACHE to another folder"
        ) from None
    return library


def find_or_build(architecture: str) -> Path:
    """A library for "sm_90a" and the like: installed, cached, or compiled now.

    Raises:
        BuildError: it is not there and cannot be compiled.
    """
    installed = find_built(architecture, PREBUILT)
    if installed is not None:
        return installed
    try:
        folder = cache_folder() / "kernels"
    except RuntimeError:  # in a container, perhaps, that knows nothing of its user
        raise BuildError("this user has no home folder: set MEGATRON_CACHE to a folder") from None
    say_waiting = say_on_stderr if read_launch().local_rank == 0 else say_nothing
    return find_built(architecture, folder) or build(
        architecture, folder, say_on_stderr, say_waiting
    )
