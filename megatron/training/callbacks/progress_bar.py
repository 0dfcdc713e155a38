"""The progress bar of a terminal."""

from __future__ import annotations

import sys
from typing import Any

from megatron.training.callbacks.base import Callback, Leave
from megatron.training.run import Run
from megatron.training.step import StepOutcome


class ProgressBar(Callback):
    """A live bar with loss, speed and time left, where the error stream is a terminal."""

    def __init__(self) -> None:
        self._bar: Any = None

    def on_start(self, run: Run) -> None:
        if not (run.is_log_rank and sys.stderr.isatty()):
            return
        from tqdm import tqdm

        self._bar = tqdm(
            total=run.train_iterations,
            initial=run.progress.iteration,
            unit="it",
            dynamic_ncols=True,
            desc="training",
        )

    def after_step(self, run: Run, outcome: StepOutcome, leave: Leave | None) -> None:
        if self._bar is None:
            return
        losses = {name: f"{value:.4f}" for name, value in outcome.losses.items()}
        self._bar.set_postfix(losses, refresh=False)
        self._bar.update(1)

    def after_left_out(self, run: Run) -> None:
        if self._bar is not None:
            self._bar.update(1)

    def on_end(self, run: Run, leave: Leave | None) -> None:
        if self._bar is not None:
            self._bar.close()
