"""A process's journal: its iteration, its operation, and the collective or message it waits for.

Training updates the journal with a few assignments. The watchdog reads it from another thread and,
when a run hangs, reports which ranks are missing from which operation.

On a GPU, the process runs ahead of its device. It does not wait for every collective and
message, but only when it needs the device's results. The journal therefore also sends marks through
the device's queue. The last mark that the device has reached shows which operation the device is
in.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from megatron.device import StreamMarks

# The number of waits for collectives and messages between two marks. Half of the kernels that fit
# into a device's queue (about 1,000) must contain more waits than this. A process that fills the
# queue has then sent marks that its device has not yet reached.
_WAITS_PER_MARK = 8
_RECORDED_POSITIONS = 4096  # a process is never this far ahead of its device


class Position(NamedTuple):
    """A position in the journal: its number, the iteration, and the operation."""

    number: int
    iteration: int
    operation: object  # formatted as text only when requested


class WaitClock(Protocol):
    """A clock that is notified when the process, or its device, waits for other processes."""

    def begin_wait(self, transfer: Transfer) -> None:
        """Record that a wait for a collective or message begins."""

    def end_wait(self) -> None:
        """Record that the wait has ended."""


class Transfer:
    """A collective or message in progress: a `torch.distributed.Work` with its name and ranks.

    Attributes:
        kind: The kind of collective or message, such as "all-reduce" or "receive".
        ranks: The global ranks of the group, including this rank. For a message, only the rank of
            the peer.
        number: The number of collectives that the process has started with these ranks so far,
            including this one; `None` for a message.
    """

    def __init__(
        self, journal: Journal, kind: str, ranks: tuple[int, ...], number: int | None, work: Any
    ) -> None:
        """Store the work and its name."""
        self.kind, self.ranks, self.number = kind, ranks, number
        self._journal, self._work = journal, work

    def wait(self) -> None:
        """Wait for the data. On a GPU, later kernels wait for it; the calling process does not."""
        self._journal.begin_wait(self)
        self._work.wait()
        self._journal.end_wait()  # skipped after an error, so that this wait is still reported

    def is_completed(self) -> bool:
        """Return whether the work is done, without waiting for it."""
        return bool(self._work.is_completed())

    def future(self) -> Any:
        """Return the PyTorch future that completes when the work does."""
        return self._work.get_future()


class Journal:
    """A record that the training thread and autograd's threads write, and any thread may read.

    Args:
        marks: The marks that track a GPU's progress; `None` on a CPU.

    Attributes:
        iteration: The current update, counted from 1; 0 before the first.
        waits_for: The collective or message that the process is waiting for, if any.
        started: The number of collectives started so far, by the global ranks that take part.
        clock: A clock to which waits are reported, if they are timed.
    """

    def __init__(self, marks: StreamMarks | None = None) -> None:
        """Create the journal of a process that is starting up."""
        self.iteration = 0
        self.waits_for: Transfer | None = None
        self.started: dict[tuple[int, ...], int] = {}
        self.clock: WaitClock | None = None
        self._marks = marks
        self._waits = 0
        self._moved = time.monotonic()
        self._position = Position(0, 0, "start-up")
        self._positions = deque(
            [self._position], maxlen=_RECORDED_POSITIONS if marks is not None else 1
        )

    def enter(self, operation: object) -> None:
        """Record that the process enters `operation`. Reports show `str(operation)`."""
        self._moved = time.monotonic()
        number = self._position.number + 1
        self._position = Position(number, self.iteration, operation)
        self._positions.append(self._position)
        if self._marks is not None:
            self._marks.put(number)

    @contextmanager
    def inside(self, operation: object) -> Iterator[None]:
        """Enter `operation` for the duration of the block, and then return to the previous one.

        After an error the journal stays at the operation of the error, for reports.
        """
        outer = self._position.operation
        self.enter(operation)
        yield
        self.enter(outer)

    @contextmanager
    def without_marks(self) -> Iterator[None]:
        """Suppress marks and reports of waits inside the block, in which a device records a pass.

        Otherwise each replay of the recording would send the marks again.
        """
        marks, self._marks = self._marks, None
        clock, self.clock = self.clock, None
        try:
            yield
        finally:
            self._marks, self.clock = marks, clock

    def transfer(self, kind: str, ranks: tuple[int, ...], work: Any) -> Transfer:
        """Record that a collective has been started, and return it as a `Transfer`.

        Args:
            kind: The name of the collective, such as "all-reduce".
            ranks: The global ranks of the group.
            work: The `torch.distributed.Work` of the collective.
        """
        number = self.started[ranks] = self.started.get(ranks, 0) + 1
        return Transfer(self, kind, ranks, number, work)

    @contextmanager
    def external_collective(self, kind: str, ranks: tuple[int, ...]) -> Iterator[None]:
        """Return a context manager that records a collective run by another library.

        On a GPU, the library only queues the collective, in its own stream. No mark is sent,
        because a mark would be out of order there.

        Args:
            kind: The name of the collective.
            ranks: The global ranks of the group.
        """
        self.begin_wait(self.transfer(kind, ranks, None))
        yield
        self.waits_for = None  # skipped after an error, as in `Transfer.wait`
        self._moved = time.monotonic()
        if self.clock is not None:
            self.clock.end_wait()

    def message(self, kind: str, peer: int, work: Any) -> Transfer:
        """Record that a message has been started, and return it as a `Transfer`.

        Args:
            kind: The kind of message, such as "send" or "receive".
            peer: The global rank at the other end.
            work: The `torch.distributed.Work` of the message.
        """
        return Transfer(self, kind, (peer,), None, work)

    def begin_wait(self, transfer: Transfer) -> None:
        """Record that the process is waiting for a collective or message."""
        self._moved = time.monotonic()
        self.waits_for = transfer
        if self.clock is not None:
            self.clock.begin_wait(transfer)

    def end_wait(self) -> None:
        """Record that the process is no longer waiting."""
        self.waits_for = None
        self._moved = time.monotonic()
        if self.clock is not None:
            self.clock.end_wait()
        if self._marks is not None:
            self._waits += 1
            if self._waits % _WAITS_PER_MARK == 0:
                self.enter(self._position.operation)

    @property
    def position(self) -> Position:
        """The latest position that the process or, if there are marks, its device has reached."""
        if self._marks is None:
            return self._position
        behind = self._marks.lag(self._position.number)
        positions = list(self._positions)
        return positions[max(0, len(positions) - 1 - behind)]

    @property
    def device_is_behind(self) -> bool:
        """Whether the device still has work that the process has queued."""
        return self._marks is not None and self._marks.lag(self._position.number) > 0

    @property
    def progress(self) -> tuple[float, int]:
        """A value that changes whenever the process or its device makes progress."""
        return self._moved, self.position.number
