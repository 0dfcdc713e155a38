"""The device of a process (GPU or CPU): properties, memory, streams, copies and CUDA graphs."""

from __future__ import annotations

import mmap
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

# Peak dense bf16/fp16 FLOP/s from datasheets. The first pattern found in a device's name applies.
_PEAK_FLOPS = (
    ("H100 PCIe", 756e12),
    ("H100|H200|H800", 989e12),
    ("GB200", 2500e12),
    ("B200", 2250e12),
    ("A100|A800", 312e12),
    ("L40S", 362e12),
    ("A10|V100", 125e12),
    ("T4", 65e12),
)


def datasheet_flops(name: str) -> float | None:
    """Return the peak dense 16-bit FLOP/s of a device by its name, or `None` if unknown."""
    return next((flops for names, flops in _PEAK_FLOPS if re.search(names, name)), None)


Result = TypeVar("Result")
Work = Callable[[], Result]
_properties = cache(torch.cuda.get_device_properties)


@dataclass(frozen=True)
class MemoryStats:
    """Bytes allocated and reserved, currently and at the peak, and the number of allocations.

    On a CPU, allocated and reserved both mean resident memory, and allocations are not counted.
    """

    allocated: int
    peak_allocated: int
    reserved: int
    peak_reserved: int
    allocations: int | None = None


@dataclass(frozen=True)
class Device:
    """The device of this process."""

    torch_device: torch.device

    @classmethod
    def pick(cls, local_rank: int = 0) -> Device:
        """Return this process's GPU if there is one, otherwise the CPU."""
        if torch.cuda.is_available():
            return cls(torch.device("cuda", local_rank % torch.cuda.device_count()))
        return cls.cpu()

    @classmethod
    def cpu(cls) -> Device:
        """Return the CPU."""
        return cls(torch.device("cpu"))

    @property
    def is_gpu(self) -> bool:
        """Whether this is a GPU."""
        return self.torch_device.type == "cuda"

    @property
    def type(self) -> str:
        """PyTorch's device type: "cuda" or "cpu"."""
        return self.torch_device.type

    @property
    def name(self) -> str:
        """The product name, or "CPU"."""
        return torch.cuda.get_device_name(self.torch_device) if self.is_gpu else "CPU"

    @property
    def description(self) -> str:
        """The device and the version of PyTorch, for start-up panels."""
        return f"{self.name}, torch {torch.__version__}"

    @property
    def capability(self) -> tuple[int, int]:
        """The compute capability of a GPU, such as (9, 0) for Hopper, or (0, 0) for a CPU."""
        return torch.cuda.get_device_capability(self.torch_device) if self.is_gpu else (0, 0)

    @property
    def multiprocessors(self) -> int:
        """The number of multiprocessors of a GPU, or 1 for a CPU."""
        return _properties(self.torch_device).multi_processor_count if self.is_gpu else 1

    @property
    def block_memory(self) -> int:
        """The shared memory available to a thread block, in bytes.

        On a CPU, this is the value of a Hopper GPU.
        """
        if not self.is_gpu:
            return 227 * 1024
        properties: Any = _properties(self.torch_device)  # the type stub lacks this property
        return int(properties.shared_memory_per_block_optin)

    @property
    def has_flash(self) -> bool:
        """Whether PyTorch's flash attention kernels run here. They need Ampere or newer."""
        return self.capability >= (8, 0)

    @property
    def peak_flops(self) -> float | None:
        """The peak dense 16-bit FLOP/s from the datasheet, or `None` if unknown."""
        return datasheet_flops(self.name)

    def as_current(self) -> AbstractContextManager[object]:
        """Return a context in which this is the calling thread's current device."""
        return torch.cuda.device(self.torch_device) if self.is_gpu else nullcontext()

    def activate(self) -> None:
        """Make this the calling thread's current device."""
        if self.is_gpu:
            torch.cuda.set_device(self.torch_device)

    def recorder(self) -> GraphRecorder:
        """Return a recorder of CUDA graphs for this GPU."""
        return GraphRecorder(self.torch_device)

    def synchronize(self) -> None:
        """Wait until all queued work is done."""
        if self.is_gpu:
            torch.cuda.synchronize(self.torch_device)

    def mark(self) -> Any:
        """Return a mark at the end of the work queued so far, without waiting.

        Pass two marks to `seconds_between` to measure the time between them.
        """
        if not self.is_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        return torch.cuda.current_stream(self.torch_device).record_event(event)

    @property
    def stream(self) -> int:
        """The handle of the GPU stream to which this thread submits work, or 0 on a CPU."""
        return stream_handle(self.torch_device.index or 0) if self.is_gpu else 0

    def seconds_between(self, start: Any, end: Any) -> float:
        """Return the seconds between two marks. The device must have reached the later one."""
        return start.elapsed_time(end) / 1000.0 if self.is_gpu else end - start

    def send(self, array: np.ndarray) -> Tensor:
        """Return the array on the device. Copying to a GPU is asynchronous."""
        tensor = torch.from_numpy(array)
        if not self.is_gpu:
            return tensor
        return tensor.pin_memory().to(self.torch_device, non_blocking=True)

    def empty_cache(self) -> None:
        """Return cached, unused GPU memory to the driver."""
        torch.cuda.empty_cache()

    def seed(self, seed: int) -> None:
        """Seed this process's default generators (CPU and this device)."""
        torch.random.default_generator.manual_seed(seed)
        if self.is_gpu:
            with self.as_current():
                torch.cuda.manual_seed(seed)

    def host_buffer(self, size: int) -> torch.Tensor:
        """Return a resident host buffer of `size` bytes, pinned if this is a GPU.

        The memory stays pinned as long as the result itself is referenced; references to views do
        not suffice. Forked processes do not inherit the memory, because they would copy every page
        that is written to.

        Raises:
            MemoryError: There is not enough memory.
        """
        try:
            memory = mmap.mmap(-1, max(1, size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise MemoryError(f"{size:,} bytes of memory: {error.strerror}") from error
        for advice in ("MADV_DONTFORK", "MADV_HUGEPAGE"):
            with suppress(AttributeError, OSError):  # available on Linux, if the kernel supports it
                memory.madvise(getattr(mmap, advice))
        buffer = torch.frombuffer(memory, dtype=torch.uint8)
        if not self.is_gpu:
            return buffer.zero_()
        runtime, address = torch.cuda.cudart(), buffer.data_ptr()
        if int(runtime.cudaHostRegister(address, buffer.numel(), 0)):
            raise MemoryError(f"the driver cannot pin {size:,} bytes of memory")
        # The finalizer's reference to `memory` keeps the pages mapped until they are unpinned.
        unpin = weakref.finalize(buffer, lambda _: runtime.cudaHostUnregister(address), memory)
        unpin.atexit = False
        return buffer

    @property
    def default_generator(self) -> torch.Generator:
        """The default random generator of operations on this device."""
        if not self.is_gpu:
            return torch.random.default_generator
        index = self.torch_device.index
        index = torch.cuda.current_device() if index is None else index
        return torch.cuda.default_generators[index]

    def free_memory(self) -> int:
        """Empty PyTorch's cache, and return the number of free bytes of GPU memory."""
        self.empty_cache()
        return torch.cuda.mem_get_info(self.torch_device)[0]

    def total_memory(self) -> int | None:
        """Return the size of the GPU's memory in bytes, or `None` for a CPU."""
        return torch.cuda.mem_get_info(self.torch_device)[1] if self.is_gpu else None

    def memory(self) -> MemoryStats:
        """Return the memory that the process uses: GPU memory, or resident memory on a CPU."""
        if self.is_gpu:
            stats = torch.cuda.memory_stats(self.torch_device)
            return MemoryStats(
                allocated=stats.get("allocated_bytes.all.current", 0),
                peak_allocated=stats.get("allocated_bytes.all.peak", 0),
                reserved=stats.get("reserved_bytes.all.current", 0),
                peak_reserved=stats.get("reserved_bytes.all.peak", 0),
                allocations=stats.get("allocation.all.current", 0),
            )
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        resident, pages = peak, Path("/proc/self/statm")
        if pages.exists():  # on Linux only
            resident = int(pages.read_text().split()[1]) * resource.getpagesize()
            peak = max(peak, resident)  # the system's count of the peak is coarser
        return MemoryStats(resident, peak, resident, peak)


class CopyStream:
    """A queue of copies between a device and pinned host memory that overlap with other work.

    On a CPU, which has no queues, each copy is done immediately.

    Args:
        device: The device.
        is_timed: Whether to measure how long the device waits for copies (`QueuedCopy.delay`).
    """

    def __init__(self, device: torch.device, *, is_timed: bool = False) -> None:
        """Create the queue."""
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._is_timed = is_timed

    def wait_for_device(self) -> None:
        """Make later copies wait for the work queued on the device so far."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))

    def copy(self, target: Tensor, source: Tensor) -> QueuedCopy:
        """Queue a copy into `target`. Do not free or write to either tensor before it is done."""
        return self.copy_all([target], [source])

    @torch.no_grad()
    def copy_all(self, targets: list[Tensor], sources: list[Tensor]) -> QueuedCopy:
        """Queue a copy of each source into its target, in one call that is cheap for the host.

        Do not free or write to any of the tensors before the copies are done.
        """
        if self._stream is None or not targets:
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source)
            return QueuedCopy(None)
        with torch.cuda.stream(self._stream):
            torch._foreach_copy_(targets, sources, non_blocking=True)
            # A blocking event does not keep a core busy while the host waits for it.
            event = torch.cuda.Event(enable_timing=self._is_timed, blocking=True)
            return QueuedCopy(self._stream.record_event(event), is_timed=self._is_timed)


class QueuedCopy:
    """A queued copy that the host or the device can wait for.

    Args:
        event: The event that the queue has recorded; `None` if the copy is done.
        is_timed: Whether the event was created with timing enabled.
    """

    def __init__(self, event: torch.cuda.Event | None, *, is_timed: bool = False) -> None:
        """Store the event."""
        self._event, self._is_timed = event, is_timed
        self._delayed: torch.cuda.Event | None = None

    def wait(self) -> None:
        """Make the host wait for the copy."""
        if self._event is not None:
            self._event.synchronize()

    def delay_device(self) -> None:
        """Make work that is queued on the device from now on wait for the copy."""
        if self._event is not None:
            stream = torch.cuda.current_stream()
            if self._is_timed:
                self._delayed = stream.record_event(torch.cuda.Event(enable_timing=True))
            stream.wait_event(self._event)

    @property
    def delay(self) -> float:
        """Seconds for which the device has waited because of `delay_device`, if copies are timed.

        Read this after the copy is done. It is 0 if the device has not reached the wait.
        """
        if self._event is None or self._delayed is None or not self._delayed.query():
            return 0.0
        return max(0.0, self._delayed.elapsed_time(self._event) / 1000)


class StagingBuffer:
    """Double-buffered copying between a GPU and the host for one thread, through pinned memory.

    While the thread uses one chunk, the next one is copied.

    Args:
        device: The GPU, which becomes the thread's current device. Otherwise, the thread would also
            create a context on the first GPU.
        size: The number of bytes in a chunk. Twice this many stay pinned while the buffer exists.

    Raises:
        MemoryError: There is not enough host memory.
    """

    def __init__(self, device: Device, size: int) -> None:
        """Pin the memory and make the device current."""
        device.activate()
        self._memory, self._size = device.host_buffer(2 * size), size
        self._stream = torch.cuda.Stream(device.torch_device)
        self._arrived = torch.cuda.Event(), torch.cuda.Event()

    def download(self, data: Tensor) -> Iterator[memoryview]:
        """Yield all bytes in order, in chunks. Each is valid until the next one is requested.

        Args:
            data: A 1-D uint8 tensor on the device. It is read after the work already queued there,
                and must not change before the last chunk is yielded.
        """
        chunks, slots = data.split(self._size), self._memory.split(self._size)
        self._stream.wait_stream(torch.cuda.default_stream(self._stream.device))
        try:
            for index in range(len(chunks) + 1):
                if index < len(chunks):  # begin to copy this chunk
                    with torch.cuda.stream(self._stream):
                        slot = slots[index % 2][: len(chunks[index])]
                        slot.copy_(chunks[index], non_blocking=True)
                        self._arrived[index % 2].record(self._stream)
                if index > 0:  # meanwhile, the caller uses the previous one
                    self._arrived[(index - 1) % 2].synchronize()
                    yield slots[(index - 1) % 2][: len(chunks[index - 1])].numpy().data
        finally:  # even on an early exit, because the target of an ongoing copy must not be freed
            self._stream.synchronize()

    def upload(self, data: Tensor, target: Tensor) -> None:
        """Copy bytes from any host memory to the device, and wait until they have arrived.

        The driver does the same for unpinned memory, but only for one thread at a time.

        Args:
            data: A 1-D uint8 tensor on the CPU.
            target: A tensor of the same size on the device.
        """
        slots = self._memory.split(self._size)
        self._stream.wait_stream(torch.cuda.default_stream(self._stream.device))
        pairs = zip(data.split(self._size), target.split(self._size), strict=True)
        for index, (source, destination) in enumerate(pairs):
            slot, copied = slots[index % 2][: len(source)], self._arrived[index % 2]
            copied.synchronize()
            np.copyto(slot.numpy(), source.numpy())  # runs in this thread only, unlike torch's copy
            with torch.cuda.stream(self._stream):
                destination.copy_(slot, non_blocking=True)
                copied.record(self._stream)
        self._stream.synchronize()


class StagingBuffers(threading.local):
    """One staging buffer per thread, created on first use and kept for the life of the thread.

    Args:
        size: The number of bytes in a chunk (see `StagingBuffer`).
    """

    def __init__(self, size: int) -> None:
        """Create the object without any buffer."""
        self._size = size
        self._buffer: StagingBuffer | None = None

    def for_device(self, device: torch.device) -> StagingBuffer:
        """Return this thread's buffer for copies between the host and this device.

        The device must be the same in every call from a thread.

        Raises:
            MemoryError: There is not enough host memory.
        """
        if self._buffer is None:
            self._buffer = StagingBuffer(Device(device), self._size)
        return self._buffer


class GraphRecorder:
    """A recorder of the kernels that a function launches on a GPU (a CUDA graph), for replay.

    A replay reads and writes the same memory each time and returns the same tensors. The recorded
    function must not wait for the device, and only its kernels are repeated. Recordings share
    memory: results that one recording leaves for another must be read before a third one runs.

    Args:
        device: The GPU.
    """

    def __init__(self, device: torch.device) -> None:
        """Create the recorder without any recording."""
        self._device = device
        # PyTorch's default is one stream for all recordings, on the first recording's GPU.
        self._stream = torch.cuda.Stream(device)
        # The last recording frees the pool, so this object must be its only owner.
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()

    def record(self, work: Work[Result]) -> tuple[Result, Callable[[], None]]:
        """Record the work without running its kernels.

        The same work must have run once before, because libraries initialize on their first call.

        Returns:
            The result of the work, and a function that runs the kernels.

        Raises:
            RuntimeError: The work cannot be recorded, for example because it waits for the device.
        """
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads (data loading, saving) may continue to run operations that are forbidden
            # during a recording.
            options: Any = {"stream": self._stream, "capture_error_mode": "thread_local"}
            with (
                torch.cuda.device(self._device),
                torch.cuda.graph(graph, pool=self._pool, **options),
            ):
                result = work()
        except RuntimeError:
            # PyTorch 2.11 leaves the random generator in the state of a recording.
            generator = torch.cuda.default_generators[self._device.index or 0]
            generator.graphsafe_set_state(generator.clone_state())
            raise
        self._graphs.add(graph)
        return result, graph.replay

    def release(self) -> None:
        """Free all recordings. None of them may be replayed afterwards.

        Call this before process groups are destroyed: NCCL cannot destroy a group whose kernels are
        recorded.
        """
        for graph in self._graphs:
            graph.reset()

    def __call__(self, work: Work[Result]) -> Work[Result]:
        """Run the work once, record it, and return a function that repeats it."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            work()
        current.wait_stream(self._stream)
        result, replay = self.record(work)

        def repeat() -> Result:
            replay()
            return result

        return repeat


class AsyncRead:
    """An ongoing copy of values from a device to the host.

    Args:
        values: The values to copy, 1-D, on any device.
    """

    def __init__(self, values: Tensor) -> None:
        """Begin the copy."""
        self._copy, self._arrived = values, None
        if values.is_cuda:
            host = torch.empty_like(values, device="cpu", pin_memory=True)
            self._copy = host.copy_(values, non_blocking=True)
            self._arrived = torch.cuda.current_stream(values.device).record_event()

    def wait(self) -> list[float]:
        """Wait for the copy, and return the values."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._copy.tolist()


class StreamMarks:
    """Increasing numbers in a device's queue, which show how far the device is behind the host.

    When the device reaches a number, it copies the number (4 bytes) to the host. Reading the latest
    number involves no driver call: the driver blocks all threads while one of them waits for space
    in a full queue.

    Args:
        device: The device.
    """

    _NUMBERS = 2**16  # more than the queue ever holds

    def __init__(self, device: torch.device) -> None:
        """Create the numbers on the device."""
        self._numbers = torch.arange(self._NUMBERS, dtype=torch.int32, device=device)
        self._arrived = torch.zeros(1, dtype=torch.int32, pin_memory=device.type != "cpu")

    def put(self, number: int) -> None:
        """Queue a number, which must increase from call to call."""
        index = number % self._NUMBERS
        self._arrived.copy_(self._numbers[index : index + 1], non_blocking=True)

    def lag(self, number: int) -> int:
        """Return how many marks the device is behind `number`, the last one queued."""
        return (number - int(self._arrived.item())) % self._NUMBERS


def current_gpu() -> int:
    """Return the index of the current GPU. This is fast once there is a tensor on a GPU."""
    return torch._C._cuda_getDevice()


def stream_handle(gpu: int) -> int:
    """Return the handle of PyTorch's current stream on a GPU, without creating a Stream object."""
    return torch._C._cuda_getCurrentRawStream(gpu)


def cuda_release() -> str:
    """Return the major version of the CUDA release that PyTorch was built with, or "" for none."""
    return (torch.version.cuda or "").split(".")[0]


def library_versions() -> dict[str, str]:
    """Return the versions of PyTorch and, with a GPU, of CUDA, its driver and NCCL."""
    versions = {"torch": str(torch.__version__)}
    if torch.cuda.is_available():
        versions["CUDA"] = torch.version.cuda or ""
        versions["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
        with suppress(OSError):
            match = re.search(r"Module\s+(\S+)", Path("/proc/driver/nvidia/version").read_text())
            versions["driver"] = match[1] if match else ""
    return versions


def gpu_count() -> int:
    """Return the number of GPUs that this process sees."""
    return torch.cuda.device_count()
