"""Clocks: named timers, times of update sections and pipeline operations, and save intervals.

Level 0 times the iteration, level 1 its parts, and level 2 the parts of those. Timers above the
requested level do not wait for the device. All timers appear as named ranges in a profile.
"""

from __future__ import annotations

import itertools
import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor
from torch.autograd.profiler import record_function  # torch.profiler is slow to import

from megatron.device import Device
from megatron.parallel.collectives import all_gather
from megatron.parallel.journal import Transfer
from megatron.parallel.layout import Axis, Layout
from megatron.parallel.pipeline.schedule import COMPUTE, Operation, Schedule
from megatron.parallel.pipeline.simulate import Times, simulate

_KINDS = ("forward", "backward_input", "backward_weight")
# The section of an update that each timer encloses. "rest" is the reduction of the gradients and
# the optimizer's step, without the communication.
_SECTION_OF = {
    "forward-backward": "compute",
    "batch-generator": "loading",
    "all-grads-sync": "rest",
    "optimizer": "rest",
}
SECTIONS = ("compute", "loading", "rest")


class Timers:
    """Accumulated seconds by name since the last `reset`.

    Args:
        level: The highest level that is timed.
        device: The device to synchronize at the beginning and end of every timed block.
        world: The ranks whose times are compared.
        barrier: Whether level-1 timers of all ranks start and stop together.
        sections: The clock of --log-straggler, which is notified when a section of an update
            begins, at any level; `None` without the flag.
    """

    def __init__(
        self,
        level: int,
        device: Device,
        world: Axis,
        *,
        barrier: bool = False,
        sections: SectionClock | None = None,
    ) -> None:
        """Start with all timers at zero."""
        self._level, self._device, self._world = level, device, world
        self.sections = sections
        self._barrier = barrier
        self._seconds: dict[str, float] = {}
        self.resets = 0

    @contextmanager
    def measure(self, name: str, level: int = 1) -> Iterator[None]:
        """Add the seconds spent in the block to a timer.

        Args:
            name: The name of the timer, and of the range in a profile.
            level: The level of the timer. Above the requested level, nothing is timed.
        """
        is_timed = level <= self._level  # a block that is not timed does not synchronize either
        start = self._now(level) if is_timed else 0.0
        outer = None if self.sections is None else self.sections.enter(name)
        with record_function(name):
            yield
        if self.sections is not None:
            self.sections.resume(outer)
        if is_timed:
            self._seconds[name] = self._seconds.get(name, 0.0) + self._now(level) - start

    def _now(self, level: int) -> float:
        """Return the time once the device and, with a barrier, all ranks have finished."""
        self._device.synchronize()
        if self._barrier and level == 1:
            self._world.barrier()
        return time.perf_counter()

    def reset(self) -> None:
        """Reset all timers to zero."""
        self._seconds.clear()
        self.resets += 1

    def over_ranks(self) -> dict[str, list[float]]:
        """Return every rank's seconds by name. Collective. All ranks have the same timers."""
        names = sorted(self._seconds)
        if not names:
            return {}
        local_seconds = torch.tensor([[self._seconds[name] for name in names]], dtype=torch.float64)
        return dict(zip(names, all_gather(local_seconds, self._world).T.tolist(), strict=True))


def format_timers(over_ranks: dict[str, list[float]], option: str, iterations: int) -> str:
    """Return the `time (ms)` block of the log.

    Args:
        over_ranks: Every rank's seconds by name.
        option: "max", "minmax" or "all".
        iterations: The number of iterations over which the seconds were added up.
    """
    titles = {"max": "max time", "minmax": "(min, max) time", "all": "times"}
    lines = [f"{titles[option]} across ranks (ms):"]
    for name, values in over_ranks.items():
        times = [1000.0 * value / iterations for value in values]
        values_of_option = {"max": [max(times)], "minmax": [min(times), max(times)], "all": times}[
            option
        ]
        text = ", ".join(f"{milliseconds:.2f}" for milliseconds in values_of_option)
        text = f"({text})" if option == "minmax" else text
        lines.append(f"    {(name + ' ').ljust(40, '.')}: {text}")
    return "\n".join(lines)


class SectionClock:
    """A clock that times this process's own work in one update, without its waits for others.

    This distinguishes a slow process from those that wait for it. On a GPU, events in the device's
    own queue give the times, so timing does not synchronize. On a CPU, time during which the
    process was ready but other processes had the cores does not count either.

    Args:
        device: The device whose queue is timed.
        layout: The run's layout.

    Attributes:
        axes: The axes whose collectives are timed, by name. They are the same on all ranks.
    """

    def __init__(self, device: Device, layout: Layout) -> None:
        """Create the clock, outside all sections."""
        self._device, self._stream = device, device.stream
        self._ready = None if device.is_gpu else ReadyClock()
        self.axes = {
            name: axis
            for name in ("tensor", "context", "data", "replica", "expert", "expert_replica")
            if (axis := getattr(layout, name)).size > 1
        }
        self._waits = {axis.ranks: name for name, axis in reversed(self.axes.items())}
        self._section: str | None = None
        self._spans: list[tuple[Any, str | None]] = []  # each mark with the section that follows it
        self._last_spans: list[tuple[Any, str | None]] = []  # those of the last update

    def _mark(self) -> Any:
        mark = self._device.mark()
        return mark if self._ready is None else mark - self._ready.seconds()

    @property
    def columns(self) -> list[str]:
        """The names of the values that `read` returns."""
        return [*SECTIONS, *self.axes, "update"]

    def enter(self, timer: str) -> str | None:
        """Begin the section of a timer, if it has one, and return the section to resume later."""
        outer, section = self._section, _SECTION_OF.get(timer)
        # Evaluation also loads data, outside an update's passes.
        if section is not None and (outer is not None or section != "loading"):
            self.resume(section)
        return outer

    def resume(self, section: str | None) -> None:
        """Attribute the time from now on to a section."""
        if section != self._section:
            self._section = section
            self._spans.append((self._mark(), section))

    def begin_wait(self, transfer: Transfer) -> None:
        """Attribute the time from now on to communication, unless only another stream waits."""
        if self._section is not None and self._device.stream == self._stream:
            waits = self._waits.get(transfer.ranks) if transfer.number is not None else None
            self._spans.append((self._mark(), waits))

    def end_wait(self) -> None:
        """Attribute the time from now on to the section in which the wait began."""
        if self._section is not None and self._device.stream == self._stream:
            self._spans.append((self._mark(), self._section))

    def cut(self) -> None:
        """End the update. The time that follows belongs to the next update."""
        mark = self._mark()
        self._last_spans, self._spans = [*self._spans, (mark, None)], [(mark, self._section)]

    def read(self) -> list[float]:
        """Return the seconds of the last update, in the order of `columns`.

        The device must have reached the end of the update.
        """
        sums = dict.fromkeys(self.columns, 0.0)
        for (begin, section), (end, _) in itertools.pairwise(self._last_spans):
            if section is not None:
                sums[section] += self._device.seconds_between(begin, end)
        if self._last_spans:
            sums["update"] = self._device.seconds_between(
                self._last_spans[0][0], self._last_spans[-1][0]
            )
        return list(sums.values())


class ReadyClock:
    """A clock that measures how long this thread was ready but had no core, as counted by Linux."""

    def __init__(self) -> None:
        """Open the thread's counters, if the system has them."""
        self._file: BinaryIO | None = None
        with suppress(OSError):
            self._file = open("/proc/thread-self/schedstat", "rb", buffering=0)  # noqa: SIM115

    def seconds(self) -> float:
        """Return the seconds so far; always 0 if the system does not count them."""
        if self._file is None:
            return 0.0
        return int(os.pread(self._file.fileno(), 64, 0).split()[1]) * 1e-9


class SaveClock:
    """A clock for `--save-interval-in-mins`, counting from the beginning of the last save.

    The clocks of processes differ slightly, so all ranks decide together (`StepOutcome.save_due`).
    """

    def __init__(self, minutes: float | None) -> None:
        """Start the clock."""
        self._seconds = math.inf if minutes is None else 60.0 * minutes
        self.restart()

    def restart(self) -> None:
        """Restart the clock when training or a save begins."""
        self._since = time.monotonic()

    @property
    def is_due(self) -> bool:
        """Whether the next checkpoint is due."""
        return time.monotonic() - self._since >= self._seconds


class Bubble(NamedTuple):
    """The fraction of time that pipeline stages spend waiting.

    Attributes:
        measured: The fraction measured in one update, from the common start to the end of the last
            computation.
        predicted: The fraction for the same schedule if every operation takes its mean time
            measured in that update, and messages take no time.
        seconds: The measured duration of the update.
        predicted_seconds: The predicted duration of the update.
    """

    measured: float
    predicted: float
    seconds: float
    predicted_seconds: float


class OperationClock:
    """A clock that measures when this pipeline stage computes, and when it waits, in one update.

    On a GPU, events in the device's own queue give the times, so timing does not synchronize.

    Args:
        device: The device whose queue is timed.
        layout: The run's layout. All of its processes wait for each other before an update.
    """

    def __init__(self, device: Device, layout: Layout) -> None:
        """Create the clock, with no operations recorded."""
        self._device, self._layout = device, layout
        self._started: list[tuple[Operation, Any]] = []
        self._start: Any = None
        self._end: Any = None

    def start(self) -> None:
        """Begin an update, before its first operation. Collective over the world."""
        self._started.clear()
        self._device.synchronize()
        self._layout.world.barrier()
        self._start = self._device.mark()

    def before(self, operation: Operation) -> None:
        """Mark the beginning of `operation`, after the previous one has been queued completely."""
        self._started.append((operation, self._device.mark()))

    def stop(self) -> None:
        """Mark the end of the last operation."""
        self._end = self._device.mark()

    def read(self, chunks: int) -> Tensor:
        """Wait for the device, and return this stage's times: fp64 [1 + 3 * chunks * 2].

        The first number is the time from the start to the end of the last computation. It is
        followed by the number of operations and their total seconds, chunk by chunk, for the
        forward pass, the backward pass (of inputs) and the backward pass of weights.
        """
        self._device.synchronize()
        sums = torch.zeros(len(_KINDS), chunks, 2, dtype=torch.float64)
        span = 0.0
        ends = [mark for _, mark in self._started[1:]] + [self._end]
        for (operation, begin), end in zip(self._started, ends, strict=True):
            if operation.kind not in COMPUTE:
                continue
            kind = "backward_input" if operation.kind == "backward" else operation.kind
            seconds = self._device.seconds_between(begin, end)
            sums[_KINDS.index(kind), operation.chunk] += torch.tensor([1.0, seconds])
            span = self._device.seconds_between(self._start, end)
        return torch.cat([torch.tensor([span], dtype=torch.float64), sums.flatten()])


def compare_with_prediction(stages: Tensor, schedule: Schedule) -> Bubble:
    """Return the measured bubble together with the simulator's prediction.

    Args:
        stages: The results of `OperationClock.read`, one row per stage: [p, 1 + 3 * chunks * 2].
        schedule: The schedule that the stages executed.
    """
    sums = stages[:, 1:].reshape(len(stages), len(_KINDS), -1, 2)
    seconds = float(stages[:, 0].max())
    measured = 1.0 - float(sums[..., 1].sum()) / (len(stages) * seconds)
    means = sums[..., 1] / sums[..., 0].clamp(min=1.0)  # [p, kind, chunk]
    forward, inputs, weights = (
        tuple(tuple(row) for row in means[:, kind].tolist()) for kind in range(len(_KINDS))
    )
    timeline = simulate(schedule, Times(forward, inputs, weights))
    return Bubble(measured, timeline.bubble, seconds, timeline.total)
