"""Tests of the machines, before training and at an interval."""

from __future__ import annotations

from pathlib import Path

from megatron.command import print_line
from megatron.training.callbacks.base import Callback, EarlyExit
from megatron.training.health import check_health, health_table, problems_of
from megatron.training.run import Run
from megatron.training.step import StepOutcome


class HealthCheck(Callback):
    """A callback that tests the machines (`--health-check`, `--gpu-sniff-test-interval`).

    The first test runs before training, and the others at the interval.
    """

    def on_start(self, run: Run) -> None:
        """Test the machines before the first step. Collective."""
        self._check(run)

    def interrupts(self, run: Run) -> bool:
        """Return whether a test follows the next update. An early forward pass would distort it."""
        return self._is_due(run, run.progress.iteration + 1)

    def after_step(self, run: Run, outcome: StepOutcome, early_exit: EarlyExit | None) -> None:
        """Run the test if it is due. Collective."""
        if self._is_due(run, run.progress.iteration) and early_exit is None:
            self._check(run)

    @staticmethod
    def _is_due(run: Run, iteration: int) -> bool:
        interval = run.config.reliability.gpu_sniff_test_interval
        return interval is not None and iteration % interval == 0

    @staticmethod
    def _check(run: Run) -> None:
        save = run.config.checkpoint.save
        rows = check_health(run.layout, run.device, None if save is None else Path(save))
        if run.layout.world.is_first:
            print_line(health_table(rows))
            for problem in problems_of(rows):
                print_line(f"WARNING: {problem}")
