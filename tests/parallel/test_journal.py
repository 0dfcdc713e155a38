"""Where a process is, by its own count and by the marks that its device has reached."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.device import StreamMarks
from megatron.parallel import journal as module
from megatron.parallel.journal import Journal, Transfer


class _Marks:
    """A device queue that has executed nothing yet."""

    def __init__(self) -> None:
        self.sent: list[int] = []

    def put(self, number: int) -> None:
        self.sent.append(number)

    def behind(self, number: int) -> int:
        return number


class _Work:
    def wait(self) -> None:
        pass


class _Clock:
    """A clock that notes what it is told, together with the work itself."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def begin_wait(self, transfer: Transfer) -> None:
        self.told.append(f"begin {transfer.kind}")

    def end_wait(self) -> None:
        self.told.append("end")

    def wait(self) -> None:
        self.told.append("work")


def test_positions_are_numbered_and_a_block_returns_to_the_one_around_it() -> None:
    journal = Journal()
    assert journal.position == (0, 0, "start-up")
    journal.iteration = 3
    journal.enter("forward")
    with journal.inside("loading"):
        assert journal.position == (2, 3, "loading")
        assert journal.progress[1] == 2
    assert journal.position == (3, 3, "forward")
    assert not journal.device_is_behind


def test_waits_are_noted_and_numbered_by_group(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [5.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    journal, clock = Journal(), _Clock()
    journal.clock = clock
    first, second = (journal.transfer("all-reduce", (0, 1), clock) for _ in range(2))
    other, message = journal.transfer("barrier", (0, 2), clock), journal.message("send", 7, clock)
    transfers = (first, second, other, message)
    assert [one.number for one in transfers] == [1, 2, 1, None]
    assert [one.ranks for one in transfers] == [(0, 1), (0, 1), (0, 2), (7,)]
    assert journal.progress == (5.0, 0)
    for one in (second, message):
        now[0] += 1.0
        one.wait()
        assert journal.waits_for is None
    assert journal.progress == (7.0, 0)
    now[0] += 1.0
    with journal.external_collective("all-gather", (0, 1)):
        now[0] += 1.0
        assert journal.waits_for is not None
        assert (journal.waits_for.kind, journal.waits_for.number) == ("all-gather", 3)
        assert journal.progress == (8.0, 0)
    assert journal.waits_for is None
    assert journal.progress == (9.0, 0)
    assert clock.told == [
        *("begin all-reduce", "work", "end"), *("begin send", "work", "end"),
        *("begin all-gather", "end"),
    ]  # fmt: skip


def test_a_wait_that_fails_is_still_reported() -> None:
    def fail() -> None:
        raise RuntimeError("a peer is gone")

    journal = Journal()
    transfer = journal.transfer("all-reduce", (0, 1), SimpleNamespace(wait=fail))
    with pytest.raises(RuntimeError, match="a peer is gone"):
        transfer.wait()
    assert journal.waits_for is transfer


def test_a_device_that_is_behind_shows_where_it_is() -> None:
    marks: Any = SimpleNamespace(put=lambda number: None, lag=lambda number: marks.behind)
    marks.behind = 0
    journal = Journal(marks)
    for operation in "abcde":
        journal.enter(operation)
    for behind, operation in ((0, "e"), (1, "d"), (4, "a"), (5, "start-up"), (9, "start-up")):
        marks.behind = behind
        assert journal.position.operation == operation
        assert journal.device_is_behind == (behind > 0)


def test_a_mark_follows_every_eighth_wait() -> None:
    marks = _Marks()
    journal = Journal(marks)  # type: ignore[arg-type]
    counts = []
    for _ in range(17):
        journal.transfer("all-reduce", (0, 1), _Work()).wait()
        counts.append(len(marks.sent))
    assert counts == [0] * 7 + [1] * 8 + [2] * 2


def test_work_that_is_only_recorded_sends_no_marks() -> None:
    marks = _Marks()
    journal = Journal(marks)
    journal.enter("forward")
    with journal.without_marks():
        for _ in range(100):
            journal.transfer("all-reduce", (0, 1), _Work()).wait()
    assert marks.sent == [1]
    assert journal.started == {(0, 1): 100}
    for _ in range(100):
        journal.transfer("all-reduce", (0, 1), _Work()).wait()
    assert len(marks.sent) > 10


def test_marks_tell_how_far_behind_a_device_is() -> None:
    marks = StreamMarks(torch.device("cpu"))
    assert marks.lag(2) == 2
    for number in (3, 2**16, 2**16 + 1):  # more numbers than there are marks
        marks.put(number)
        assert marks.lag(number) == 0
        assert marks.lag(number + 5) == 5  # queued, but not reached
