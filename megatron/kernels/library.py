"""Compiled CUDA kernels, loaded by the CUDA driver and registered as PyTorch operators.

The library is found or built once, when a model is built, and then passed to the functions that
launch its kernels:

    choice = find_library(device)
    norm = choose_add_norm(choice.library)  # without a library: plain PyTorch
    print(choice)

The module of an operation declares in `Kernel` constants which kernels the operation launches, and
how. It registers each function that launches kernels as an `operator`, so that compilers and
exporters can trace the function.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, get_args, get_type_hints

import torch
from torch import Tensor

from megatron.device import Device, cuda_release, current_gpu, stream_handle
from megatron.environment import local_rank, private_cache
from megatron.errors import print_to_stderr
from megatron.kernels.build import (
    PREBUILT,
    BuildError,
    build,
    discard_line,
    find_built,
    name_of,
    read_built,
    split,
)
from megatron.kernels.driver import Driver, DriverError, LaunchTarget, PreparedLaunches, prepare
from megatron.kernels.plans import KINDS, Arguments, Number, Plan, PlanError, Pointer
from megatron.kernels.sources import parameters

OLDEST_CAPABILITY = (8, 0)  # the first GPUs with bf16 and asynchronous copies
DTYPE_CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}  # as in common.cuh
VECTOR_BYTES = 16  # the size of a kernel's reads and writes

MAX_PLANS = 4096  # the number of prepared plans per thread; every new size adds one
EARLY_CAPABILITY = (9, 0)  # the first GPUs with programmatic dependent launch

Argument = Tensor | int | float | None


class KernelError(RuntimeError):
    """An invalid kernel call, or a launch that CUDA rejected, which is a bug in this package."""


@dataclass(frozen=True)
class Kernel:
    """An operation of the library, which launches one or more kernels.

    Attributes:
        name: The name of the operation.
        kinds: A letter for each argument: p for a contiguous tensor or `None`, v for a tensor with
            any strides (which are also arguments), i for an integer or a dtype code, d for a float.
        plan: A function that returns the launches, given the arguments.
    """

    name: str
    kinds: str
    plan: Plan

    @classmethod
    def of(cls, name: str, arguments: Callable[..., Arguments]) -> Kernel:
        """Return the operation whose arguments are the fields of a named tuple.

        Args:
            name: The name of the operation.
            arguments: A named tuple with a method `plan` that returns the launches. The types of
                its fields are in `KINDS`, optionally with `None`.
        """
        types = [get_args(hint) or (hint,) for hint in get_type_hints(arguments).values()]
        kinds = "".join(KINDS[hint] for union in types for hint in union if hint in KINDS)
        assert len(kinds) == len(types), f"{name}: {types}"
        return cls(name, kinds, lambda *values: arguments(*values).plan())


class _Thread(threading.local):
    """The state of a thread: the GPU whose context is current, and prepared plans."""

    gpu = -1

    def __init__(self) -> None:
        self.plans: dict[tuple[Any, ...], PreparedLaunches] = {}


class KernelLibrary:
    """Compiled kernels for one GPU architecture.

    Args:
        path: The file of the library, as `build` names it.
        driver: The driver that loads the code; `None` means this machine's driver.

    Raises:
        OSError: The file is unsafe or damaged (`read_built`), or there is no driver.
        AttributeError: The driver is older than CUDA 12.
        DriverError: The driver rejects the code, for example because the driver is for an older
            CUDA version.
    """

    def __init__(self, path: Path | str, driver: Driver | None = None) -> None:
        """Read the file and load its code."""
        self.path = str(path)
        codes, self._kernels = split(read_built(Path(path)))
        self._driver = driver or Driver(system_library("libcuda.so.1"))
        self._loaded = [self._driver.load(code) for code in codes]
        self._launch = self._driver.launch
        self._thread = _Thread()
        self._handles: dict[str, int] = {}

    def check(self, gpu: int) -> None:
        """Check that the GPU has a context and that the driver finds all kernels.

        Raises:
            DriverError: The driver reports an error.
        """
        self._driver.make_current(gpu)
        for name in self._kernels:
            self._handle_of(name)

    def launch(self, kernel: Kernel, *arguments: Argument) -> None:
        """Launch an operation's kernels on the current stream of the first tensor's device.

        Args:
            kernel: The operation.
            arguments: The arguments of the operation, as described by `kernel.kinds`.

        Raises:
            KernelError: An argument does not match the operation, or CUDA reports an error.
        """
        values, shape, tensor = _read(kernel, arguments)
        gpu = tensor.get_device()
        if gpu < 0:  # a CPU tensor, for the emulator
            error = self._run(kernel, arguments, values, shape, tensor, 0)
        elif gpu == self._thread.gpu == current_gpu():
            error = self._run(kernel, arguments, values, shape, tensor, stream_handle(gpu))
        else:
            with Device(tensor.device).as_current():
                self._driver.make_current(gpu)
                error = self._run(kernel, arguments, values, shape, tensor, stream_handle(gpu))
            self._thread.gpu = gpu
        if error:
            raise KernelError(f"{kernel.name}: {self._driver.error(error)}")

    def _run(
        self,
        kernel: Kernel,
        arguments: Sequence[Argument],
        values: Sequence[Any],
        shape: Sequence[Any],
        tensor: Tensor,
        stream: int,
    ) -> int:
        """Run the launches of an operation, and return the driver's error code, or 0."""
        plans = self._thread.plans
        key = (kernel.name, tensor.get_device(), stream, *shape)
        prepared = plans.get(key)
        if prepared is None:
            prepared = self._prepare(kernel, arguments, tensor, stream)
            if len(plans) >= MAX_PLANS:
                plans.clear()
            plans[key] = prepared
        prepared.write(values)
        launch = self._launch
        for call in prepared.calls:
            if error := launch(*call):
                return int(error)
        return 0

    def _prepare(
        self, kernel: Kernel, arguments: Sequence[Argument], tensor: Tensor, stream: int
    ) -> PreparedLaunches:
        """Return the prepared launches of an operation's plan.

        Raises:
            KernelError: The operation does not support the arguments, or the driver reports an
                error.
        """
        plan_arguments: list[Pointer | Number | int | None] = []
        for index, (kind, value) in enumerate(zip(kernel.kinds, arguments, strict=True)):
            if kind == "i":
                if not isinstance(value, int):
                    raise KernelError(f"{kernel.name} takes an integer, not {type(value).__name__}")
                plan_arguments.append(value)
            elif kind == "d":
                plan_arguments.append(Number(index))
            else:
                plan_arguments.append(None if value is None else Pointer(index))
        indices = [
            index for index, x in enumerate(plan_arguments) if isinstance(x, Pointer | Number)
        ]
        device = Device(tensor.device)
        overlaps = device.is_gpu and device.capability >= EARLY_CAPABILITY
        target = LaunchTarget(tensor.get_device(), stream, overlaps)
        try:
            launches = kernel.plan(*plan_arguments)
            handles = [self._handle_of(launch.kernel) for launch in launches]
            for launch, handle in zip(launches, handles, strict=True):
                self._driver.allow_shared_memory(handle, target.gpu, launch.shared)
            letters = [parameters()[launch.kernel.partition("<")[0]] for launch in launches]
            return prepare(launches, handles, letters, indices, target)
        except (PlanError, DriverError) as error:
            raise KernelError(f"{kernel.name}: {error}") from None

    def _handle_of(self, name: str) -> int:
        handle = self._handles.get(name)
        if handle is None:
            if name not in self._kernels:
                raise PlanError(f"{name} is not among the compiled kernels")
            binary, compiled = self._kernels[name]
            handle = self._handles[name] = self._driver.find(self._loaded[binary], compiled)
        return handle


def _read(kernel: Kernel, arguments: Sequence[Argument]) -> tuple[list[Any], list[Any], Tensor]:
    """Return a call's addresses and numbers, the values its plan depends on, and its first tensor.

    This function runs about a thousand times per training step.

    Raises:
        KernelError: An argument does not match the operation.
    """
    if len(arguments) != len(kernel.kinds):
        raise KernelError(f"{kernel.name} takes {len(kernel.kinds)} arguments")
    values: list[Any] = []
    shape: list[Any] = []
    first, gpu = None, -1
    for kind, value in zip(kernel.kinds, arguments, strict=True):
        if kind == "i" or value is None:
            shape.append(value)
            continue
        if kind == "d":
            values.append(value)
            continue
        if not isinstance(value, Tensor):
            raise KernelError(f"{kernel.name} takes a tensor, not {value}")
        if first is None:
            first, gpu = value, value.get_device()
        elif value.get_device() != gpu:
            raise KernelError(f"{kernel.name}: tensors are on {first.device} and {value.device}")
        if kind == "p" and not value.is_contiguous():
            raise KernelError(
                f"{kernel.name}: a tensor of shape {list(value.shape)} is not contiguous"
            )
        values.append(value.data_ptr())
        shape.append(True)
    if first is None:
        raise KernelError(f"{kernel.name} takes tensors")
    return values, shape, first


def system_library(name: str) -> ctypes.CDLL:
    """Load a library that the dynamic linker finds by name, for example one loaded by PyTorch.

    Raises:
        OSError: There is no such library.
    """
    return ctypes.CDLL(name)


@cache
def open_library(path: str) -> KernelLibrary:
    """Load the library at a path, once per process."""
    return KernelLibrary(path)


class _ShapesOnly(KernelLibrary):
    """A stand-in for a library. It launches nothing, so functions compute only shapes."""

    def __init__(self) -> None:
        """Load nothing."""

    def launch(self, kernel: Kernel, *arguments: Argument) -> None:
        """Do nothing."""


_SHAPES_ONLY = _ShapesOnly()

_REGISTRY = torch.library.Library("megatron", "FRAGMENT")
# Other type names are the same in a schema.
_SCHEMA_TYPES = {"Tensor | None": "Tensor?", "torch.dtype": "ScalarType"}
_REAL_TYPES = (Tensor, torch.nn.Parameter)


def is_traced(x: Tensor) -> bool:
    """Return whether a compiler or exporter is tracing operations on `x`."""
    return torch.compiler.is_compiling() or type(x) not in _REAL_TYPES


def supports(x: Tensor, *more: Tensor | None) -> bool:
    """Return whether kernels support these tensors: non-empty, aligned, of one supported dtype."""
    return (
        x.dtype in DTYPE_CODES
        and x.numel() > 0
        and all(y is None or y.dtype == x.dtype for y in more)
        and aligned(x, *more)
    )


def aligned(x: Tensor, *more: Tensor | None) -> bool:
    """Return whether the first element of each tensor is aligned to 16 bytes.

    Traced tensors have no address. They count as aligned, because an `Operator` copies unaligned
    tensors.
    """
    if is_traced(x):
        return True
    return not (x.data_ptr() % VECTOR_BYTES) and all(
        y is None or not y.data_ptr() % VECTOR_BYTES for y in more
    )


class Operator:
    """A function that launches kernels, registered as the operator `torch.ops.megatron.NAME`.

    While a compiler or exporter traces the model, a call becomes this operator in the graph.
    Otherwise the function runs directly. A direct call with autograd takes 7.5 us of host time. The
    dispatcher would add 2 to 3 us, and the wrapper of `torch.library.custom_op` 10 to 15 us. In
    small models, GPUs wait for the host.

    The operator takes the library's path instead of the library, and has no parameters with
    defaults. It returns empty tensors for results that are `None`.

    Args:
        function: A function of a `KernelLibrary`, a tensor and other arguments. Its name and
            annotations define the schema. It allocates the results, which may not share memory with
            arguments, and launches kernels.
        changes: The names of the arguments that the function changes in place.
    """

    def __init__(self, function: Callable[..., Any], changes: Sequence[str] = ()) -> None:
        """Register the function."""
        self.function = function
        self.name = f"megatron::{function.__name__}"
        _REGISTRY.define(_schema(function, changes), tags=[torch.Tag.pt2_compliant_tag])
        operators: Any = torch.ops.megatron
        self.overload = getattr(operators, function.__name__).default
        for backend in ("CPU", "CUDA"):
            _REGISTRY.impl(function.__name__, self._run, backend)
        # `register_fake` would search all modules for the caller, which takes 9 ms for all
        # operators.
        _REGISTRY.impl(function.__name__, self._shape, "Meta")

    def __call__(self, library: KernelLibrary | str, x: Tensor, *rest: Any, **direct: Any) -> Any:
        """Call the operator if `x` is traced, otherwise the function.

        Args:
            library: The library or its path.
            x: The first tensor.
            rest: The other arguments.
            direct: Keyword arguments that only the function takes. They are ignored while tracing.
        """
        if is_traced(x):
            return self.overload(library if isinstance(library, str) else library.path, x, *rest)
        if isinstance(library, str):
            library = open_library(library)
        return self.function(library, x, *rest, **direct)

    def differentiate(
        self,
        backward: Callable[..., Any],
        keep: Callable[..., None],
        forward: Callable[..., Any] | None = None,
    ) -> Callable[..., Any]:
        """Return the function with a backward pass. All of its arguments are positional.

        Args:
            backward: A function of ctx and the gradients of the results. It returns the gradients
                of the arguments.
            keep: A function of ctx, inputs and output. It saves in ctx what `backward` needs.
            forward: A function of ctx and the inputs that replaces the function and `keep` if the
                inputs are not traced. Its results may be views of its arguments. `None` runs the
                function and `keep`.
        """
        torch.library.register_autograd(self.name, backward, setup_context=keep, lib=_REGISTRY)

        def keeping(ctx: Any, *inputs: Any) -> Any:
            output = self.function(*inputs)
            keep(ctx, inputs, output)
            return output

        methods = {"forward": forward or keeping, "backward": backward}
        static = {name: staticmethod(method) for name, method in methods.items()}
        eager: Any = type(self.function.__name__, (torch.autograd.Function,), static)
        count = len(self.overload._schema.arguments) - 1

        def call(library: KernelLibrary, x: Tensor, *rest: Any) -> Any:
            if is_traced(x):
                return self.overload(library.path, x, *rest[: count - 1])
            return eager.apply(library, x, *rest)

        return call

    def _run(self, path: str, *arguments: Any) -> Any:
        if not self.overload._schema.is_mutable:  # compiled code may pass views of its buffers
            arguments = tuple(
                x.clone() if isinstance(x, Tensor) and x.data_ptr() % VECTOR_BYTES else x
                for x in arguments
            )
        return _without_none(self.function(open_library(path), *arguments), arguments[0])

    def _shape(self, _: str, x: Tensor, *rest: Any) -> Any:
        return _without_none(self.function(_SHAPES_ONLY, x, *rest), x)


def operator(*changes: str) -> Callable[[Callable[..., Any]], Operator]:
    """Return a decorator that creates an `Operator`.

    Args:
        changes: The names of the arguments that the decorated function changes in place.
    """
    return partial(Operator, changes=changes)


def _schema(function: Callable[..., Any], changes: Sequence[str]) -> str:
    """Return a function's schema, "name(str library, Tensor x, Tensor(b!) out, ...) -> ..."."""
    types = dict(function.__annotations__)  # as text; `inspect.signature` takes 1 ms for all
    count = types.pop("return").count("Tensor")
    required = list(types.items())[1 : len(types) - len(function.__defaults__ or ())]
    arguments = ["str library"]
    for index, (name, annotation) in enumerate(required):
        kind = _SCHEMA_TYPES.get(annotation, annotation)
        if name in changes:
            kind = kind.replace("Tensor", f"Tensor({chr(ord('a') + index)}!)")
        arguments.append(f"{kind} {name}")
    results = "Tensor" if count == 1 else f"({', '.join(['Tensor'] * count)})"
    return f"{function.__name__}({', '.join(arguments)}) -> {results}"


def _without_none(results: Any, like: Tensor) -> Any:
    if not isinstance(results, tuple):
        return results
    return tuple(like.new_empty(0) if x is None else x for x in results)


@dataclass(frozen=True)
class LibraryChoice:
    """The chosen library, and the reason for the choice.

    Attributes:
        library: The library; `None` for plain PyTorch.
        reason: The GPU architecture, or the reason for using plain PyTorch.
    """

    library: KernelLibrary | None
    reason: str

    def __str__(self) -> str:
        """Return the text for the start-up panel."""
        return f"{'fused' if self.library else 'plain PyTorch'} ({self.reason})"


@cache
def find_library(device: torch.device) -> LibraryChoice:
    """Return the library for a device, compiling it first if necessary.

    Compilation takes a while, so call this function before processes wait for each other. It never
    raises an error. Without a library, PyTorch's slower operations are used, and on GPUs the first
    process of each machine prints a line with the reason.
    """
    gpu_device = Device(device)
    if not gpu_device.is_gpu:
        return LibraryChoice(None, f"no kernels for {gpu_device.type}")
    if gpu_device.capability < OLDEST_CAPABILITY:
        reason = f"{gpu_device.name} is older than compute capability 8.0"
    else:
        architecture = name_of(*gpu_device.capability)
        try:
            return LibraryChoice(_load(find_or_build(architecture), gpu_device), architecture)
        except (BuildError, OSError) as error:  # OSError: the file system has failed
            reason = str(error)
    if local_rank() == 0:
        print_to_stderr(f"fused kernels: off, using plain PyTorch: {reason}")
    return LibraryChoice(None, reason)


def _load(path: Path, device: Device) -> KernelLibrary:
    """Load the library and check it on the device.

    Raises:
        BuildError: The library cannot be loaded, or the driver rejects it.
    """
    try:
        with device.as_current():
            library = open_library(str(path))
            library.check(current_gpu())
    except (OSError, AttributeError, ValueError, KernelError, DriverError, PlanError) as error:
        raise BuildError(
            f"{path} does not run here ({error}): update the driver or delete the file, or set "
            "MEGATRON_CACHE to another folder"
        ) from None
    return library


def find_or_build(architecture: str) -> Path:
    """Return the path of the library for an architecture: installed, cached, or compiled now.

    Raises:
        BuildError: There is no library, and it cannot be compiled.
    """
    report = print_to_stderr if local_rank() == 0 else discard_line
    installed = find_built(architecture, PREBUILT, report)
    if installed is not None:
        return installed
    try:
        folder = private_cache("kernels")
    except RuntimeError:  # for example in a container without this user
        raise BuildError("this user has no home folder: set MEGATRON_CACHE to a folder") from None
    except OSError as error:
        raise BuildError(
            f"{error.filename} cannot hold compiled kernels ({error.strerror}): set MEGATRON_CACHE "
            "to another folder"
        ) from None
    return find_built(architecture, folder, report) or build(
        architecture, folder, print_to_stderr, report, cuda_release()
    )
