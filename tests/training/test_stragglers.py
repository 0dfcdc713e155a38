"""Slow ranks: their times without waits, and when one is reported."""

from __future__ import annotations

import os
import signal
import time
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.device import Device
from megatron.parallel.journal import Journal
from megatron.parallel.layout import Axis, Layout
from megatron.training.callbacks.stragglers import (
    Straggler,
    Stragglers,
    StragglerWatch,
    times_line,
)
from megatron.training.timers import ReadyClock, SectionClock, Timers
from tests.distributed import run_distributed
from tests.reliability.scoreboard.numbers import straggler_events

_TENSOR, _WORLD = (0, 1), (0, 1, 2, 3)


class _Clocked:
    """A device whose marks are times set by the test."""

    stream = 0
    is_gpu = True

    def __init__(self) -> None:
        self.now = 0.0

    def mark(self) -> float:
        return self.now

    def seconds_between(self, start: float, end: float) -> float:
        return end - start


def _clock() -> tuple[Any, SectionClock, Journal, Timers]:
    device: Any = _Clocked()
    axes = {"tensor": Axis(2, 0, _TENSOR), "world": Axis(4, 0, _WORLD)}
    others = ("context", "data", "replica", "expert", "expert_replica")
    layout: Any = SimpleNamespace(**axes, **dict.fromkeys(others, Axis()))
    clock, journal = SectionClock(device, layout), Journal()
    journal.clock = clock
    return device, clock, journal, Timers(0, Device.cpu(), Axis(), sections=clock)


def _wait(journal: Journal, device: Any, ranks: tuple[int, ...] | None, seconds: float) -> None:
    work = SimpleNamespace(wait=lambda: setattr(device, "now", device.now + seconds))
    if ranks is None:
        journal.message("receive", 1, work).wait()
    else:
        journal.transfer("all-reduce", ranks, work).wait()


def _update(device: Any, journal: Journal, timers: Timers) -> None:
    with timers.measure("forward-backward"):
        device.now += 1.0
        with timers.measure("batch-generator", level=2):
            device.now += 2.0
        device.now += 4.0
        _wait(journal, device, _TENSOR, 100.0)
        _wait(journal, device, None, 200.0)  # a message: the other stage may be the slow one
    device.now += 400.0  # between the sections
    with timers.measure("all-grads-sync"):
        _wait(journal, device, _WORLD, 800.0)  # no other group to compare with
        device.now += 8.0
    with timers.measure("optimizer"):
        device.now += 16.0


def test_a_section_has_the_time_of_this_rank_alone() -> None:
    device, clock, journal, timers = _clock()
    assert clock.columns == ["compute", "loading", "rest", "tensor", "update"]
    _update(device, journal, timers)
    device.now += 0.5
    clock.cut()
    assert clock.read() == [5.0, 2.0, 24.0, 100.0, 1531.5]
    with timers.measure("batch-generator", level=2):  # evaluation
        device.now += 32.0
        _wait(journal, device, _TENSOR, 64.0)
    _update(device, journal, timers)
    clock.cut()
    assert clock.read() == [5.0, 2.0, 24.0, 100.0, 1627.0]


def test_a_cpu_without_a_core_does_not_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    device, _, _, _ = _clock()
    device.is_gpu = False
    ready = SimpleNamespace(seconds=lambda: 0.25 * device.now)  # a quarter of the time
    monkeypatch.setattr("megatron.training.timers.ReadyClock", lambda: ready)
    clock = SectionClock(device, Layout.single())
    timers = Timers(0, Device.cpu(), Axis(), sections=clock)
    with timers.measure("optimizer"):
        device.now += 8.0
    clock.cut()
    assert clock.read() == [0.0, 0.0, 6.0, 6.0]


def test_what_another_stream_waits_for_is_no_wait() -> None:
    device, clock, journal, timers = _clock()
    with timers.measure("forward-backward"):
        device.stream = 1
        _wait(journal, device, _TENSOR, 3.0)
        device.stream = 0
        with journal.without_marks():
            _wait(journal, device, _TENSOR, 4.0)
    clock.cut()
    assert clock.read() == [7.0, 0.0, 0.0, 0.0, 7.0]


def _times(compute: list[float], **others: list[float]) -> dict[str, list[float]]:
    nothing = [0.0] * len(compute)
    return {"compute": compute, "loading": nothing, "rest": nothing, "update": [10.0] * 4, **others}


def _found(watch: StragglerWatch, *times: dict[str, list[float]]) -> list[Any]:
    return [watch.compare(each) for each in times]


def test_a_rank_is_named_the_third_time_and_once() -> None:
    watch = StragglerWatch([0, 0, 0, 0], {})
    calm, slow = _times([5.0, 6.0, 5.0, 6.0]), _times([5.0, 9.0, 5.0, 6.0])
    told = ([Straggler((1,), "compute", 9.0, 5.5)], [])
    assert _found(watch, slow, slow, calm, slow, slow) == [([], [])] * 5
    assert _found(watch, slow, slow, calm, calm) == [
        told,
        ([], []),
        ([], ["rank 1 in the forward and backward passes"]),
        ([], []),
    ]


@pytest.mark.parametrize(
    ("compute", "is_slow"),
    [
        ([5.0, 5.0, 5.0, 7.2], True),
        ([5.0, 5.0, 5.0, 7.1], False),  # 5 is more than 0.7 times that
        ([0.2, 0.2, 0.2, 0.69], False),  # less than 5% of the update is lost
        ([0.2, 0.2, 0.2, 0.71], True),
        ([5.0, 5.0, 9.0, 9.0], False),  # no majority
    ],
)
def test_how_slow_a_rank_must_be(compute: list[float], is_slow: bool) -> None:
    watch = StragglerWatch([0, 0, 0, 0], {})
    found = _found(watch, *[_times(compute)] * 3)[-1][0]
    assert [one.ranks for one in found] == [(3,)] * is_slow


def test_stages_are_compared_with_themselves() -> None:
    """The last stage has more work; the slower of its two replicas is reported."""
    found = _found(StragglerWatch([0, 0, 1, 1], {}), *[_times([5.0, 5.0, 16.0, 8.0])] * 3)[-1][0]
    assert found == [Straggler((2,), "compute", 16.0, 8.0)]


def test_a_rank_without_peers_is_compared_with_its_past() -> None:
    watch = StragglerWatch([0, 1, 2, 3], {})
    calm, longer = _times([4.0, 5.0, 6.0, 7.0]), _times([8.0, 10.0, 12.0, 14.0])  # more tokens
    slow = _times([8.0, 10.0, 24.0, 14.0])
    assert not any(found for found, _ in _found(watch, calm, calm, calm, *[longer] * 5))
    assert _found(watch, *[slow] * 3)[-1][0] == [Straggler((2,), "compute", 24.0, 12.0)]


def test_a_slow_connection_is_that_of_a_group() -> None:
    """All ranks of a group wait for it; the rank that joins last waits for nothing else."""
    watch = StragglerWatch([0, 0, 0, 0], {"tensor": [(0, 1), (2, 3)]})
    calm = _times([5.0] * 4, tensor=[1.0, 3.0, 4.0, 1.2])
    slow = _times([5.0] * 4, tensor=[1.0, 3.0, 4.0, 2.6])
    found = _found(watch, calm, slow, slow, slow)[-1][0]
    assert found == [Straggler((2, 3), "tensor", 2.6, 1.0)]


def test_the_log_line_names_the_ends() -> None:
    line = times_line(_times([0.005, 0.009, 0.004, 0.006]), 2)
    assert line.startswith(
        " stragglers (ms) | compute: median 5.5, slowest 9.0 (rank 1), 6.0 (rank 3), "
        "fastest 4.0 (rank 2), 5.0 (rank 0) | loading: median 0.0, "
    )


def test_whole_windows_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    """A run that continues from iteration 5 first compares iterations 11 to 20.

    The lower quartile of a window counts, so three fast updates of ten are enough to be fast.
    """
    progress = SimpleNamespace(iteration=5)
    logging = SimpleNamespace(log_interval=1, straggler_minmax_count=1)
    run: Any = SimpleNamespace(
        layout=Layout.single(),
        progress=progress,
        is_log_rank=True,
        config=SimpleNamespace(logging=logging),
    )

    def read() -> list[float]:
        fast = 2 if progress.iteration > 20 else 3
        return [5.0 if progress.iteration % 10 < fast else 9.0, 0.0, 0.0, 10.0]

    columns = ["compute", "loading", "rest", "update"]
    clock: Any = SimpleNamespace(axes={}, columns=columns, read=read)
    outcome: Any = None
    callback = Stragglers(clock, outcome)
    callback.on_start(run)
    assert "there is only one rank, so nothing is compared" in capsys.readouterr().out
    told = {}
    for iteration in range(6, 42):
        progress.iteration = iteration
        callback.after_step(run, outcome, None)
        if "stragglers (ms) | compute: median " in (text := capsys.readouterr().out):
            told[iteration] = text.split("median ")[1].split(",")[0]
    assert told == {20: "5000.0", 30: "9000.0", 40: "9000.0"}


def test_the_groups_of_a_run() -> None:
    layout = Layout.at(5, 8, tensor=2, pipeline=2)
    watch = StragglerWatch.of(layout, ["tensor", "data"])
    assert watch._stages == [0, 0, 0, 0, 1, 1, 1, 1]
    assert watch._groups == {
        "tensor": [(0, 1), (2, 3), (4, 5), (6, 7)],
        "data": [(0, 2), (1, 3), (4, 6), (5, 7)],
    }


def test_a_rank_that_takes_twice_as_long_is_named() -> None:
    """All four wait for it, in backward passes and in the gradient reduction."""
    words = ["--tensor-model-parallel-size", "2", "--train-iters", "60"]
    told = run_distributed(4, straggler_events, words, {"tensor": 2}, "step:2:15:slow=2x")
    for events in told:
        assert len({text.partition(" (on ")[0] for _, text in events}) == 1, events
        iteration, text = events[0]
        assert text.startswith("slow: rank 2 (on ")
        assert "in the forward and backward passes" in text
        assert iteration <= 60


def test_time_without_a_core_is_counted() -> None:
    """Spinning forks share this thread's core, so it is often ready but not running."""
    clock, core = ReadyClock(), {min(os.sched_getaffinity(0))}
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, core)
    children = []
    try:
        for _ in range(2):
            if (pid := os.fork()) == 0:
                while True:
                    pass
            children.append(pid)
        begun, waited = time.perf_counter(), clock.seconds()
        while clock.seconds() < waited + 0.1 and time.perf_counter() < begun + 60:
            pass
        waited = clock.seconds() - waited
        assert 0.1 <= waited < time.perf_counter() - begun
    finally:
        for pid in children:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        os.sched_setaffinity(0, before)
