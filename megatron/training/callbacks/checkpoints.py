"""When a run saves, and what becomes of a save in the background."""

from __future__ import annotations

import time
from datetime import timedelta

from megatron.checkpoint.background import BackgroundSaver, Saved
from megatron.command import say
from megatron.errors import ConfigError, StorageError
from megatron.training.callbacks.base import Callback, Leave
from megatron.training.checkpointing import (
    keep_of,
    meta_of,
    report_saved,
    save_run,
    state_of,
    writer_of,
)
from megatron.training.run import Run
from megatron.training.save_interval import advice
from megatron.training.step import StepOutcome


class Checkpoints(Callback):
    """Saves when it is due, when leaving and at the end; before evaluation.

    With `--async-save` one save may be under way while training goes on; the next waits for it. One
    that fails publishes nothing and says so at once; the next is then not made in the background,
    so that a second failure ends the run. Saves on leaving and at the end are never in the
    background.
    """

    def __init__(self) -> None:
        self._background: BackgroundSaver | None = None
        self._step_began = 0.0
        self._is_advised = False

    def on_start(self, run: Run) -> None:
        if run.config.checkpoint.async_save:
            self._background = _background_saver(run)
        run.save_clock.restart()

    def interrupts(self, run: Run) -> bool:
        """A forward pass that has begun would be waited for."""
        return _is_due(run, run.progress.iteration + 1)

    def before_step(self, run: Run) -> None:
        self._step_began = time.perf_counter()

    def after_step(self, run: Run, outcome: StepOutcome, leave: Leave | None) -> None:
        by_count = _is_due(run, run.progress.iteration)
        is_last = leave is not None or run.finished
        if by_count or outcome.save_due or is_last:
            self._save(run, is_last=is_last)

    def after_left_out(self, run: Run) -> None:
        """Nothing is due then, but a run that ends so is saved too."""
        if run.finished:
            self._save(run, is_last=True)

    def _save(self, run: Run, *, is_last: bool) -> None:
        since = time.perf_counter()
        run.save_clock.restart()
        run.layout.journal.enter("saving a checkpoint")
        with run.timers.measure("save-checkpoint"):
            if not self._settle(run) or is_last or self._background is None:
                save_run(run)
            else:
                self._background.start(
                    run.progress.iteration, state_of(run), meta_of(run), since=since
                )
        if not self._is_advised and not is_last and run.layout.world.rank == 0:
            self._is_advised = True
            self._advise(run, cost=time.perf_counter() - since, step=since - self._step_began)

    def _settle(self, run: Run) -> bool:
        """Wait for the save under way; whether saves in the background work."""
        if self._background is None:
            return True
        if self._background.is_busy and run.layout.world.rank == 0:
            say("  waiting for the checkpoint in the background: one at a time")
        try:
            self._background.wait()
        except StorageError:
            return False  # `_report` has said why
        return True

    def _advise(self, run: Run, *, cost: float, step: float) -> None:
        hours = run.config.checkpoint.mean_hours_between_failures
        left = run.train_iterations - run.progress.iteration
        processes = run.layout.world.size
        line = advice(cost=cost, step=step, processes=processes, hours=hours, left=left)
        if line is not None:
            say(line)

    def on_failure(self, run: Run) -> None:
        """A save under way is of a sound state: it is worth waiting for."""
        if self._background is None:
            return
        try:
            self._settle(run)
        except Exception as error:  # what ended the training comes first
            say(f"WARNING: {error}")


def _is_due(run: Run, iteration: int) -> bool:
    interval = run.config.checkpoint.save_interval
    return iteration in run.save_at or (interval is not None and iteration % interval == 0)


def _background_saver(run: Run) -> BackgroundSaver:
    """Its host memory in place. Collective."""
    options, started = run.config.checkpoint, time.perf_counter()
    assert options.save
    timeout = timedelta(minutes=run.config.parallel.distributed_timeout_minutes)
    try:
        saver = BackgroundSaver(
            options.save,
            state_of(run),
            run.layout,
            run.layout.beside(timeout),
            run.device,
            keep=keep_of(options),
            write=writer_of(run),
            report=_report,
        )
    except MemoryError as error:
        raise ConfigError(
            f"--async-save keeps a copy of what a process saves in host memory: {error}: drop the "
            "flag"
        ) from error
    if run.layout.world.rank == 0:
        size, seconds = saver.host_bytes / 1e9, time.perf_counter() - started
        say(f"  --async-save: {size:.3g} GB of host memory a process, ready in {seconds:.2f} s")
    return saver


def _report(iteration: int, outcome: Saved | Exception) -> None:
    """From the thread that saves, on rank 0."""
    if isinstance(outcome, Saved):
        report_saved(outcome)
    else:
        say(
            f"WARNING: the checkpoint of iteration {iteration} could not be written: {outcome}. "
            "Nothing was published, the one before stands. The next save is not made in the "
            "background, and ends the run if it fails too"
        )
