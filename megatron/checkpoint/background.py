"""Save while training continues, from a copy in host memory.

Training waits only for the copies of tensors that its next passes may change. The other tensors are
copied during these passes, and the next update waits for them. A thread then writes, hashes,
flushes and publishes the copies following the protocol of `store`. It communicates with the threads
of the other processes over a separate process group. File operations and hashing release the GIL.
If the process is killed, the thread ends too, and leaves the same files behind as any other
interrupted save.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torch import Tensor

from megatron.checkpoint.entries import DTYPES, Json, State
from megatron.checkpoint.exchange import JsonExchange
from megatron.checkpoint.plan import describe, share_of
from megatron.checkpoint.retention import RetentionPolicy
from megatron.checkpoint.shard import plan_shard
from megatron.checkpoint.store import Snapshot, plan_save, write_checkpoint
from megatron.device import CopyStream, Device, QueuedCopy
from megatron.errors import CheckpointError, UserError
from megatron.parallel.layout import Layout

_NICENESS = 5  # training's own threads have priority


@dataclass(frozen=True)
class SavedCheckpoint:
    """A published checkpoint.

    Attributes:
        iteration: Training steps taken.
        path: The checkpoint's folder.
        size: Size of all tensors in bytes.
        seconds: Seconds until the checkpoint was published, counted from the beginning of the save
            or, if it ran in the background, from the end of the pause.
        pause: Seconds for which training was paused, on the rank with the longest pause.
    """

    iteration: int
    path: Path
    size: int
    seconds: float
    pause: float


class HostBuffer:
    """Host memory for copies of one set of tensors, reused by every copy.

    Attributes:
        size: Size of the memory in bytes.
    """

    def __init__(self, tensors: Mapping[str, Tensor], device: Device) -> None:
        """Allocate memory for copies of tensors with these names, dtypes and shapes.

        Raises:
            MemoryError: There is not enough memory.
        """
        _, placements = plan_shard(tensors)
        ends = (placement.start + placement.size for placement in placements.values())
        self._buffer = device.host_buffer(max(ends, default=0))
        self.size = self._buffer.numel()
        self._copies = {  # built once: training would wait for thousands of views at every save
            name: self._buffer[placement.start : placement.start + placement.size]
            .view(DTYPES[placement.dtype])
            .view(placement.shape)
            for name, placement in placements.items()
        }
        self._device, self._stream = device, CopyStream(device.torch_device, is_timed=True)

    def copy_from(
        self, tensors: Mapping[str, Tensor], *, stable: Collection[str]
    ) -> tuple[dict[str, Tensor], QueuedCopy]:
        """Copy the tensors to host memory.

        Args:
            tensors: The tensors by name.
            stable: Names of tensors whose copies are only queued. The caller must neither free nor
                change these tensors until the returned operation is done.

        Returns:
            The copies by name, which are valid until the next call; and the last queued operation,
            after which all copies are complete.
        """
        copies = self._copies
        assert tensors.keys() == copies.keys()
        for name in copies.keys() - set(stable):
            copies[name].copy_(tensors[name].detach(), non_blocking=True)
        self._device.synchronize()
        names = [name for name in copies if name in stable]
        queued = self._stream.copy_all(
            [copies[name] for name in names], [tensors[name].detach() for name in names]
        )
        return dict(copies), queued


class BackgroundSaver:
    """A saver that writes a run's checkpoints in the background, one at a time.

    Every rank constructs one, and all ranks call `start` together. Each save must be followed by
    `wait` before the next `start`, even if it has already ended.
    """

    def __init__(
        self,
        root: Path | str,
        entries: State,
        layout: Layout,
        thread_layout: Layout,
        device: Device,
        *,
        keep: RetentionPolicy | None,
        write: Callable[..., Path] = write_checkpoint,
        report: Callable[[int, SavedCheckpoint | Exception], None],
    ) -> None:
        """Plan the saves and allocate memory for the copies.

        Args:
            root: Folder of checkpoints.
            entries: This rank's tensors. A save with other names, dtypes or boxes is replanned.
            layout: The layout of the ranks that take part.
            thread_layout: The same ranks with process groups for the thread (`Layout.for_thread`).
            device: Device of the tensors.
            keep: Which older checkpoints to keep. None keeps all of them.
            write: `write_checkpoint`, or a function with the same arguments that writes another
                format.
            report: Function that rank 0's thread calls with the iteration, and the published
                checkpoint or the error.

        Raises:
            MemoryError: Raised on every rank if any rank lacks host memory for its copies.
        """
        self._root = Path(root).absolute()  # before the process changes its working folder
        self._planning_layout, self._layout, self._device = layout, thread_layout, device
        self._plan_for(entries)
        self._write = partial(write, keep=keep)
        self._report = report
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None

    def _plan_for(self, entries: State) -> None:
        """Plan saves of these tensors, and allocate memory for the copies. Collective.

        Raises:
            MemoryError: Raised on every rank if any rank lacks host memory for its copies.
        """
        layout, error = self._planning_layout, None
        self._description = describe(entries)
        self._plan = plan_save(entries, layout)
        self._copy: HostBuffer | None = None  # frees the memory of earlier copies first
        try:
            self._copy = HostBuffer(share_of(self._plan, entries, layout.world.rank), self._device)
        except MemoryError as shortage:
            error = str(shortage)
        errors = [text for text in JsonExchange(layout.world).gather(error) if text is not None]
        if errors:
            raise MemoryError(errors[0])

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that this process reserves for copies."""
        return 0 if self._copy is None else self._copy.size

    def start(
        self,
        iteration: int,
        entries: State,
        meta: Json,
        *,
        since: float,
        stable: Collection[str] = (),
    ) -> QueuedCopy:
        """Copy the tensors to host memory, and start writing the copies in the background.

        Args:
            iteration: Training steps taken.
            entries: This rank's tensors.
            meta: A JSON value; rank 0's is saved.
            since: The `time.perf_counter` time at which training stopped for this save.
            stable: Names of entries that the caller neither frees nor changes until the returned
                operation is done.

        Returns:
            The operation that copies the stable entries. All others have been copied.

        Raises:
            MemoryError: The entries have changed, and a rank lacks host memory for their copies.
        """
        assert self._thread is None, "one save at a time"
        has_changed = describe(entries) != self._description  # weight averaging may begin later
        if any(JsonExchange(self._planning_layout.world).gather(has_changed)):
            self._plan_for(entries)
        assert self._copy is not None
        rank = self._layout.world.rank
        tensors, queued = self._copy.copy_from(
            share_of(self._plan, entries, rank),
            stable={key for name, key, _ in self._plan.written_by(rank) if name in stable},
        )
        waited = time.perf_counter() - since
        snapshot = Snapshot(iteration, self._plan, tensors, meta, self._layout)
        self._thread = threading.Thread(
            target=self._work,
            args=(snapshot, queued, waited),
            name="background save",
            daemon=True,  # a failing process does not wait for the thread to finish
        )
        self._thread.start()
        return queued

    @property
    def is_busy(self) -> bool:
        """Whether a save is under way in this process. Other ranks may see it finish later."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> None:
        """Wait for the save under way, if any, to be published or to fail.

        Raises:
            StorageError: Raised on every rank: the save failed, but the next one may succeed.
            CheckpointError: Raised on every rank: the save failed, and so will the next one.
        """
        if self._thread is not None:
            self._thread.join()
        self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _work(self, snapshot: Snapshot, queued: QueuedCopy, waited: float) -> None:
        with suppress(OSError):  # affects only this thread and those that it starts
            thread = threading.get_native_id()
            niceness = max(_NICENESS, os.getpriority(os.PRIO_PROCESS, thread))
            os.setpriority(os.PRIO_PROCESS, thread, niceness)
        self._device.activate()  # otherwise, this thread would create a context on GPU 0
        exchange, started = JsonExchange(snapshot.layout.world), time.perf_counter()
        iteration = snapshot.iteration
        outcome: SavedCheckpoint | Exception
        try:
            queued.wait()
            path = self._write(self._root, snapshot)
            seconds = time.perf_counter() - started
            pause = max(exchange.gather(waited + queued.delay))
            outcome = SavedCheckpoint(iteration, path, snapshot.plan.total_bytes, seconds, pause)
        except UserError as error:
            outcome = self._failure = error
        except Exception as error:
            failure = f"the save of iteration {iteration} failed in the background"
            outcome = CheckpointError(f"{failure}: {type(error).__name__}: {error}")
            outcome.__cause__ = error
            self._failure = outcome
        if exchange.is_main:
            self._report(iteration, outcome)
