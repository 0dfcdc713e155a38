"""Where a process is, by its own count and by the marks that its device has reached."""

from __future__ import annotations

import torch

from megatron.device import StreamMarks
from megatron.parallel.journal import Journal


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
