"""When this stage computed and when it waited, in one update of a pipeline.

On a GPU the times are those of the device's own queue, so nothing waits for being timed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.device import Device
from megatron.parallel.layout import Layout
from megatron.parallel.pipeline.schedule import COMPUTE, Operation, Schedule
from megatron.parallel.pipeline.simulate import Times, simulate

_KINDS = ("forward", "backward_input", "backward_weight")


class Bubble(NamedTuple):
    """Fraction of all stages' time in which they wait.

    Attributes:
        measured: in one update; from the common start to the end of the last computation.
        predicted: of the same schedule, where every operation takes its mean time measured in
            that update, and messages none.
        seconds: the update's span.
        predicted_seconds: the same in the prediction.
    """

    measured: float
    predicted: float
    seconds: float
    predicted_seconds: float


class OperationClock:
    """Marks the operations of one update as they begin.

    Args:
        device: whose queue is timed.
        layout: of the run; all processes start together.
    """

    def __init__(self, device: Device, layout: Layout) -> None:
        self._device = device
        self._layout = layout
        self._begun: list[tuple[Operation, Any]] = []
        self._start: Any = None
        self._end: Any = None

    def start(self) -> None:
        """Before the first operation. Collective over the world."""
        self._begun.clear()
        self._device.synchronize()
        self._layout.wait_for_all()
        self._start = self._device.mark()

    def before(self, operation: Operation) -> None:
        """`operation` begins, and the one before it has been queued whole."""
        self._begun.append((operation, self._device.mark()))

    def stop(self) -> None:
        """After the last operation."""
        self._end = self._device.mark()

    def read(self, chunks: int) -> Tensor:
        """This stage's times: fp64 [1 + 3 * chunks * 2].

        From the start to the end of the last computation, then of forward, backward (of inputs)
        and backward of weights, chunk by chunk, how often and how many seconds in all.
        """
        self._device.synchronize()
        sums = torch.zeros(len(_KINDS), chunks, 2, dtype=torch.float64)
        span = 0.0
        ends = [mark for _, mark in self._begun[1:]] + [self._end]
        for (operation, begin), end in zip(self._begun, ends, strict=True):
            if operation.kind not in COMPUTE:
                continue
            kind = "backward_input" if operation.kind == "backward" else operation.kind
            seconds = self._device.seconds_between(begin, end)
            sums[_KINDS.index(kind), operation.chunk] += torch.tensor([1.0, seconds])
            span = self._device.seconds_between(self._start, end)
        return torch.cat([torch.tensor([span], dtype=torch.float64), sums.flatten()])


def compare_with_prediction(stages: Tensor, schedule: Schedule) -> Bubble:
    """What was measured beside what the simulator says.

    Args:
        stages: [p, 1 + 3 * chunks * 2], a row of `OperationClock.read` for every stage.
        schedule: that the stages carried out.
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
