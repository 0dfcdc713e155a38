"""Python's garbage collection, on all ranks at the same iteration.

Left alone, every process collects at its own moment and each pause delays all the others at the
next collective.
"""

from __future__ import annotations

import gc

from megatron.training.callbacks.base import Callback, Leave
from megatron.training.run import Run
from megatron.training.step import StepOutcome


class GarbageCollection(Callback):
    """Automatic collection off; one every `--manual-gc-interval` iterations, none if that is 0."""

    def on_start(self, run: Run) -> None:
        gc.collect()
        gc.freeze()  # what exists now stays for the whole run
        gc.disable()

    def after_step(self, run: Run, outcome: StepOutcome, leave: Leave | None) -> None:
        interval = run.config.training.manual_gc_interval
        if interval and run.progress.iteration % interval == 0:
            gc.collect()

    def on_end(self, run: Run, leave: Leave | None) -> None:
        gc.unfreeze()
        gc.enable()


class EmptyCache(Callback):
    """`--empty-unused-memory-level`: unused GPU memory back to the driver after every iteration."""

    def after_step(self, run: Run, outcome: StepOutcome, leave: Leave | None) -> None:
        run.device.empty_cache()
