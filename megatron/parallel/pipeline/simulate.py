"""Prediction of a schedule's timing from the duration of each operation.

Messages take time but do not occupy a stage, which computes while they are in flight.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import add
from typing import NamedTuple

from megatron.errors import ConfigError
from megatron.parallel.pipeline.check import replay
from megatron.parallel.pipeline.schedule import SENDS, Operation, Schedule

Table = tuple[tuple[float, ...], ...]  # [stage][chunk]


@dataclass(frozen=True)
class Times:
    """Durations for one micro-batch, in any unit. Tables are indexed [stage][chunk].

    Attributes:
        forward: The duration of the forward pass of each chunk.
        backward_input: The duration of the input gradients of each chunk.
        backward_weight: The duration of the weight gradients of each chunk. An operation that
            computes both takes the sum of the two durations.
        communication: The time from sending a message to its arrival.
    """

    forward: Table
    backward_input: Table
    backward_weight: Table
    communication: float = 0.0

    def by_kind(self, stage: int) -> dict[str, tuple[float, ...]]:
        """Return the durations of a stage's computations by kind of operation, one per chunk."""
        inputs, weights = self.backward_input[stage], self.backward_weight[stage]
        return {
            "forward": self.forward[stage],
            "backward_input": inputs,
            "backward_weight": weights,
            "backward": tuple(map(add, inputs, weights)),
        }


def time_table(flag: str, values: Sequence[float], stages: int, chunks: int) -> Table:
    """Return a table of times [stage][chunk].

    The time of a stage is divided evenly among its chunks.

    Args:
        flag: The name of the source of the values, for error messages.
        values: One time for all stages, one per stage, or one per model part in order.
        stages: The number of stages.
        chunks: The number of chunks per stage.

    Raises:
        ConfigError: The number of values is wrong, or a value is not a valid time.
    """
    if len(values) not in {1, stages, stages * chunks}:
        counts = " or ".join(str(n) for n in sorted({1, stages, stages * chunks}))
        raise ConfigError(f"{flag}: {len(values)} values; give {counts}")
    check_times(flag, values)
    if len(values) == stages * chunks:
        return tuple(tuple(values[stage::stages]) for stage in range(stages))
    per_stage = [values[0]] * stages if len(values) == 1 else values
    return tuple((value / chunks,) * chunks for value in per_stage)


def check_times(flag: str, values: Sequence[float]) -> None:
    """Check that all values are valid times.

    Args:
        flag: The name of the source of the values, for error messages.
        values: The times to check.

    Raises:
        ConfigError: A value is negative, infinite or not a number.
    """
    for value in values:
        if not 0 <= value < math.inf:
            raise ConfigError(f"{flag} {value:g}: must be a number of at least 0")


class Interval(NamedTuple):
    """A computation, and the interval [start, end) in which it runs."""

    start: float
    end: float
    operation: Operation


@dataclass(frozen=True)
class Timeline:
    """The timing of a schedule.

    Attributes:
        spans: The computations of each stage, in order.
    """

    spans: tuple[tuple[Interval, ...], ...]

    @property
    def total(self) -> float:
        """The time from the start of the first operation to the end of the last one."""
        return max((spans[-1].end for spans in self.spans if spans), default=0.0)

    @property
    def busy(self) -> tuple[float, ...]:
        """The total time that each stage spends computing."""
        return tuple(sum(span.end - span.start for span in spans) for spans in self.spans)

    @property
    def bubble(self) -> float:
        """The fraction of the stages' total time in which they wait."""
        available = len(self.spans) * self.total
        return 1 - sum(self.busy) / available if available else 0.0


class RunnableSchedule:
    """A schedule in a runnable order, which can be timed repeatedly with different durations.

    Args:
        schedule: The operations of every stage.

    Raises:
        ScheduleError: The schedule cannot run.
    """

    def __init__(self, schedule: Schedule) -> None:
        """Number the steps and their messages."""
        self._stages = len(schedule)
        self._steps: list[tuple[int, Operation, int]] = []  # stage, operation, message
        in_transit: dict[tuple[int, int, str], deque[int]] = {}  # messages, by edge
        sent = 0
        for stage, operation in replay(schedule):
            message = -1
            if operation.peer is not None:
                direction = operation.kind.partition("_")[2]
                if operation.kind in SENDS:
                    message, sent = sent, sent + 1
                    edge = (stage, operation.peer, direction)
                    in_transit.setdefault(edge, deque()).append(message)
                else:
                    message = in_transit[operation.peer, stage, direction].popleft()
            self._steps.append((stage, operation, message))
        self._messages = sent

    def total(self, times: Times) -> float:
        """Return the time from the start of the first operation to the end of the last one."""
        return max((end for _, _, end in self._timed(times)), default=0.0)

    def timeline(self, times: Times) -> Timeline:
        """Return the timing of all computations, each started as soon as possible."""
        spans: list[list[Interval]] = [[] for _ in range(self._stages)]
        for (stage, operation), start, end in self._timed(times):
            spans[stage].append(Interval(start, end, operation))
        return Timeline(tuple(tuple(line) for line in spans))

    def _timed(self, times: Times) -> Iterator[tuple[tuple[int, Operation], float, float]]:
        """Yield every computation with its stage, start and end."""
        clocks = [0.0] * self._stages
        arrivals = [0.0] * self._messages
        durations = [times.by_kind(stage) for stage in range(self._stages)]
        for stage, operation, message in self._steps:
            clock = clocks[stage]
            if message < 0:
                end = clock + durations[stage][operation.kind][operation.chunk]
                clocks[stage] = end
                yield (stage, operation), clock, end
            elif operation.kind in SENDS:
                arrivals[message] = clock + times.communication
            elif arrivals[message] > clock:
                clocks[stage] = arrivals[message]


def simulate(schedule: Schedule, times: Times) -> Timeline:
    """Return the timing of every stage's computations.

    Args:
        schedule: The operations of every stage.
        times: The duration of each kind of operation.

    Raises:
        ScheduleError: The schedule cannot run.
    """
    return RunnableSchedule(schedule).timeline(times)
