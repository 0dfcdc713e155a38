"""`--log-pipeline-bubble`: how long stages wait for each other, measured and predicted."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.command import say
from megatron.parallel.collectives import all_gather
from megatron.training.callbacks.base import Callback, Leave
from megatron.training.operation_clock import Bubble, OperationClock, compare_with_prediction
from megatron.training.passes import training_schedule
from megatron.training.run import Run
from megatron.training.step import StepOutcome
from megatron.training.writers import Writer


class PipelineBubble(Callback):
    """A line every `--log-interval` iterations, and two scalars an iteration.

    Of the pipeline that the logging rank belongs to; the others do the same work.
    """

    def __init__(self, clock: OperationClock, writers: Sequence[Writer]) -> None:
        self._clock = clock
        self._writers = writers
        self._bubbles: list[Bubble] = []

    def after_step(self, run: Run, outcome: StepOutcome, leave: Leave | None) -> None:
        stages = all_gather(self._clock.read(len(run.parts)).unsqueeze(0), run.layout.pipeline)
        if not run.is_log_rank:
            return
        schedule = training_schedule(run, len(outcome.finite))
        bubble = compare_with_prediction(stages, schedule)
        self._bubbles.append(bubble)
        scalars = {
            "pipeline-bubble": bubble.measured,
            "pipeline-bubble predicted": bubble.predicted,
        }
        for writer in self._writers:
            writer.write(scalars, run.progress.iteration, run.progress.consumed_samples)
        if run.progress.iteration % run.config.logging.log_interval == 0:
            say(bubble_line(self._bubbles))
            self._bubbles = []


def bubble_line(bubbles: Sequence[Bubble]) -> str:
    """Means over some updates."""
    means = [sum(column) / len(bubbles) for column in zip(*bubbles, strict=True)]
    mean = Bubble(*means)
    return (
        f" pipeline bubble | measured: {mean.measured:.2%} of {1000 * mean.seconds:.1f} ms |"
        f" predicted: {mean.predicted:.2%} of {1000 * mean.predicted_seconds:.1f} ms |"
    )
