"""Callbacks that reclaim memory: garbage collection, and unused GPU memory."""

from __future__ import annotations

import gc

from megatron.training.callbacks.base import Callback, EarlyExit
from megatron.training.run import Run
from megatron.training.step import StepOutcome


class GarbageCollection(Callback):
    """A callback that collects garbage on all ranks at the same iteration (`--manual-gc`).

    By default every process collects at a different time, and each pause delays all other processes
    at the next collective. With an interval of 0 there is no collection during training.
    """

    def on_start(self, run: Run) -> None:
        """Collect garbage once, and turn off automatic collection."""
        gc.collect()
        gc.freeze()  # the objects that exist now stay for the whole run
        gc.disable()

    def after_step(self, run: Run, outcome: StepOutcome, early_exit: EarlyExit | None) -> None:
        """Collect garbage every `--manual-gc-interval` iterations."""
        interval = run.config.training.manual_gc_interval
        if interval and run.progress.iteration % interval == 0:
            gc.collect()

    def on_end(self, run: Run, early_exit: EarlyExit | None) -> None:
        """Turn automatic garbage collection on again."""
        gc.unfreeze()
        gc.enable()


class EmptyCache(Callback):
    """A callback that returns unused GPU memory to the driver (`--empty-unused-memory-level`)."""

    def after_step(self, run: Run, outcome: StepOutcome, early_exit: EarlyExit | None) -> None:
        """Empty the cache after every iteration."""
        run.device.empty_cache()
