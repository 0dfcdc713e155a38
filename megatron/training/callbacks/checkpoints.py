"""When a run saves."""

from __future__ import annotations

from megatron.training.callbacks.base import Callback, Leave
from megatron.training.checkpointing import save_run
from megatron.training.run import Run
from megatron.training.step import StepOutcome


class Checkpoints(Callback):
    """Saves every `--save-interval` iterations, when leaving and at the end; before evaluation."""

    def after_step(self, run: Run, outcome: StepOutcome, leave: Leave | None) -> None:
        interval = run.config.checkpoint.save_interval
        due = interval is not None and run.progress.iteration % interval == 0
        if due or leave is not None or run.finished:
            with run.timers.measure("save-checkpoint"):
                save_run(run)
