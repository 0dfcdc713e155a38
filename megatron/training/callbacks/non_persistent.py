"""Non-persistent checkpoints during a run, and its goodput."""

from __future__ import annotations

import time

from megatron.checkpoint.non_persistent import NonPersistentStore
from megatron.checkpoint.reader import NativeReader
from megatron.checkpoint.store import Snapshot
from megatron.command import print_line
from megatron.errors import StorageError
from megatron.training import checkpointing
from megatron.training.callbacks.base import Callback, EarlyExit
from megatron.training.callbacks.checkpoints import is_scheduled
from megatron.training.callbacks.scalars import Scalars
from megatron.training.run import Run
from megatron.training.run_record import store_of
from megatron.training.step import StepOutcome


class NonPersistentCheckpoints(Callback):
    """A callback that saves non-persistent checkpoints at `--non-persistent-save-interval`.

    It skips iterations that have a durable checkpoint. A failed save is reported and training
    continues, because a durable checkpoint will follow.

    Args:
        scalars: The callback that records events.
    """

    def __init__(self, scalars: Scalars) -> None:
        """Create the callback, which opens its folders when training starts."""
        self._scalars = scalars
        self._store: NonPersistentStore | None = None
        self._min_iteration = 0  # checkpoints up to this iteration may hold another run's weights
        self._has_reported = False

    def on_start(self, run: Run) -> None:
        """Open the folders, and delete checkpoints of later iterations. Collective."""
        self._store = store_of(run.config, run.layout)
        assert self._store is not None
        self._store.delete_after(run.progress.iteration)
        self._min_iteration = run.progress.iteration - (1 if run.was_resumed else 0)

    def open_newest(self, after: int) -> NativeReader | None:
        """Open the newest intact checkpoint that the run has saved or resumed from. Collective.

        The result is `None` if there is none.

        Args:
            after: Only checkpoints of later iterations are considered.
        """
        assert self._store is not None, "on_start has opened it"
        return self._store.open_newest(after=max(after, self._min_iteration))

    def interrupts(self, run: Run) -> bool:
        """Return whether a save follows the next update. An early forward pass would delay it."""
        return _is_due(run, run.progress.iteration + 1)

    def after_step(self, run: Run, outcome: StepOutcome, early_exit: EarlyExit | None) -> None:
        """Save if a checkpoint is due and no durable one has just been written."""
        is_last = early_exit is not None or run.finished
        if outcome.save_due or is_last or not _is_due(run, run.progress.iteration):
            return
        assert self._store is not None
        start_time = time.perf_counter()
        run.layout.journal.enter("saving a non-persistent checkpoint")
        with run.timers.measure("save-checkpoint"):
            meta, state = checkpointing.meta_of(run), checkpointing.state_of(run)
            snapshot = Snapshot.take(run.progress.iteration, state, meta, run.layout)
            try:
                path = self._store.save(snapshot)
            except StorageError as error:  # on all ranks
                self._scalars.event(run, "failed non-persistent checkpoint", str(error))
                if run.layout.world.rank == 0:
                    print_line(f"WARNING: no non-persistent checkpoint was written: {error}")
                return
        seconds = time.perf_counter() - start_time
        self._scalars.event(run, "non-persistent checkpoint", f"saved in {seconds:.2f} s")
        if not self._has_reported and run.layout.world.rank == 0:
            self._has_reported = True
            size = snapshot.plan.total_bytes / 1e9
            print_line(
                f"  first non-persistent checkpoint: {path} ({size:.3g} GB in {seconds:.2f} s)"
            )


def _is_due(run: Run, iteration: int) -> bool:
    interval = run.config.checkpoint.non_persistent_save_interval
    return interval is not None and iteration % interval == 0 and not is_scheduled(run, iteration)


class Goodput(Callback):
    """A callback that reports goodput: the fraction of time since the first start spent in steps.

    Checkpoints store the time spent in steps, so a step that is repeated after a restart counts
    once.
    """

    def __init__(self) -> None:
        """Create the callback, whose clock runs during steps."""
        self._start = 0.0

    def before_step(self, run: Run) -> None:
        """Start the step's clock."""
        self._start = time.perf_counter()

    def after_step(self, run: Run, outcome: StepOutcome, early_exit: EarlyExit | None) -> None:
        """Add the step's time, before a checkpoint is written."""
        run.useful_seconds += time.perf_counter() - self._start

    def on_end(self, run: Run, early_exit: EarlyExit | None) -> None:
        """Report the goodput if the run was, or may have been, restarted."""
        share, record = run.goodput, run.record
        saves_non_persistent = run.config.checkpoint.non_persistent_save_interval is not None
        if (
            share is None
            or record is None
            or not run.is_log_rank
            or not (saves_non_persistent or run.was_resumed)
        ):
            return
        seconds = time.time() - record.began
        print_line(
            f"  goodput: {share:.1%} of the {seconds:,.0f} s since the run was first started were "
            "spent in steps whose results were kept"
        )
