"""Saves during a run, in the foreground or background, and advice on how often to save."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path

from megatron.checkpoint.background import BackgroundSaver, SavedCheckpoint
from megatron.checkpoint.exchange import JsonExchange
from megatron.checkpoint.find import scan
from megatron.command import print_line
from megatron.errors import ConfigError, StorageError
from megatron.training import checkpointing
from megatron.training.callbacks.base import Callback, EarlyExit
from megatron.training.callbacks.scalars import Scalars
from megatron.training.run import Run
from megatron.training.step import StepOutcome

# Llama 3 (arXiv 2407.21783): 419 unexpected interruptions in 54 days on 16,384 GPUs.
PROCESS_HOURS_BETWEEN_FAILURES = 50_000.0
_HOUR = 3600.0


class Checkpoints(Callback):
    """A callback that saves at the requested intervals, on an early exit, and after training.

    With `--async-save` one save may run in the background while training continues, and the next
    save waits for it. A failed save publishes nothing and is reported immediately. The next save is
    not made in the background, so that a second failure ends the run. Saves on an early exit and at
    the end are never in the background. Saves precede evaluation.
    """

    def __init__(self, scalars: Scalars) -> None:
        """Create the callback without a background save.

        Args:
            scalars: The callback that records events.
        """
        self._scalars = scalars
        self._background: BackgroundSaver | None = None
        self._newest: tuple[Path, int] | None = None  # the newest published checkpoint
        # The iteration of the background save, until it is waited for.
        self._saving: int | None = None
        self._step_start, self._step_seconds = 0.0, 0.0
        self._is_advised = False

    def on_start(self, run: Run) -> None:
        """Prepare to save in the background with --async-save, and start the clock. Collective.

        Raises:
            ConfigError: There is not enough host memory for --async-save.
        """
        self._newest = _continued(run)
        if run.config.checkpoint.async_save:
            self._background = _background_saver(run, partial(self._report, run))
        run.save_clock.restart()

    def interrupts(self, run: Run) -> bool:
        """Return whether a save follows the next update. An early forward pass would delay it."""
        return is_scheduled(run, run.progress.iteration + 1)

    def before_step(self, run: Run) -> None:
        """Start timing the step, for the advice on how often to save."""
        self._step_start = time.perf_counter()

    def after_step(self, run: Run, outcome: StepOutcome, early_exit: EarlyExit | None) -> None:
        """Save if a checkpoint is due or the run ends."""
        if is_save_due(run, outcome, early_exit):
            self._save(run, is_last=early_exit is not None or run.finished)

    def after_skipped(self, run: Run) -> None:
        """Save if the run ends here. No other skipped iteration triggers a save."""
        if run.finished:
            self._save(run, is_last=True)

    def _save(self, run: Run, *, is_last: bool) -> None:
        start_time = time.perf_counter()
        self._step_seconds = start_time - self._step_start
        run.save_clock.restart()
        run.layout.journal.enter("saving a checkpoint")
        with run.timers.measure("save-checkpoint"):
            if self._settle(run) and not is_last and self._start_in_background(run, start_time):
                self._saving = run.progress.iteration
                status = "saving in the background"
            else:
                checkpointing.save_run(run)
                self._newest = Path(str(run.config.checkpoint.save)), run.progress.iteration
                status = f"saved in {time.perf_counter() - start_time:.2f} s"
        self._scalars.event(run, "checkpoint", status)
        if self._saving is None and not is_last and run.layout.world.rank == 0:
            self._advise(run, time.perf_counter() - start_time)

    def _start_in_background(self, run: Run, start_time: float) -> bool:
        """Start a background save if the run uses them, and return whether it has started."""
        if self._background is None:
            return False
        state, meta = checkpointing.state_of(run), checkpointing.meta_of(run)
        stable = checkpointing.stable_names(run)
        try:
            queued = self._background.start(
                run.progress.iteration, state, meta, since=start_time, stable=stable
            )
        except MemoryError as error:  # on all ranks
            if run.layout.world.rank == 0:
                print_line(
                    "WARNING: the average of the weights needs more host memory for --async-save "
                    f"than there is: {error}. From now on training waits for saves"
                )
            self._background = None
            return False
        run.optimizer.delay_changes(queued)
        return True

    def _advise(self, run: Run, cost: float) -> None:
        """Recommend how often to save, after the first save, which paused training for `cost` s."""
        if self._is_advised:
            return
        self._is_advised = True
        line = advice(
            cost=cost,
            step=self._step_seconds,
            processes=run.layout.world.size,
            hours=run.config.checkpoint.mean_hours_between_failures,
            remaining=run.train_iterations - run.progress.iteration,
        )
        if line is not None:
            print_line(line)

    def _report(self, run: Run, iteration: int, outcome: SavedCheckpoint | Exception) -> None:
        """Report the result of a background save. Called by the saving thread, on rank 0."""
        if isinstance(outcome, SavedCheckpoint):
            checkpointing.report_saved(outcome)
            self._advise(run, outcome.pause)
        else:
            print_line(
                f"WARNING: the checkpoint of iteration {iteration} could not be written: {outcome}."
                " Nothing was published; the previous checkpoint remains the newest. The next save "
                "is not made in the background and ends the run if it fails too"
            )

    def _settle(self, run: Run) -> bool:
        """Wait for any background save. Return False if it has failed."""
        if self._background is None:
            return True
        if self._background.is_busy and run.layout.world.rank == 0:
            print_line("  waiting for the previous background save: only one can run at a time")
        try:
            self._background.wait()
        except StorageError:  # `_report` has printed the reason
            self._scalars.event(run, "failed checkpoint", "the previous one remains the newest")
            self._saving = None
            return False
        if self._saving is not None:
            self._newest, self._saving = (Path(str(run.config.checkpoint.save)), self._saving), None
        return True

    def newest(self, run: Run) -> tuple[Path, int] | None:
        """Wait for any background save, and return the newest checkpoint of this run.

        Collective. The result is a folder of checkpoints and an iteration, or `None` if the run has
        neither saved nor loaded a checkpoint with an optimizer state.
        """
        self._settle(run)
        return self._newest

    def on_failure(self, run: Run) -> None:
        """Wait for any background save: its state predates the error and is worth keeping."""
        try:
            self._settle(run)
        except Exception as error:  # the error that ended training must be the one that is reported
            print_line(f"WARNING: {error}")


def _continued(run: Run) -> tuple[Path, int] | None:
    """Return the folder and the iteration of the durable checkpoint from which a run continues.

    Collective. The result is `None` if the run, or only its optimizer, starts fresh.
    """
    options, start = run.config.checkpoint, run.progress.iteration
    if options.load is None or options.finetune or options.no_load_optim or not start:
        return None
    root = Path(options.load)
    # The run may continue from a newer checkpoint that is not durable.
    newest = JsonExchange(run.layout.world).on_main(
        lambda: max(
            (saved.iteration for saved in scan(root)[0] if saved.iteration <= start),
            default=start,
        )
    )
    return root, newest


def is_save_due(run: Run, outcome: StepOutcome, early_exit: EarlyExit | None) -> bool:
    """Return whether a run with --save saves now, because a checkpoint is due or the run ends."""
    is_last = early_exit is not None or run.finished
    is_due = is_scheduled(run, run.progress.iteration) or outcome.save_due or is_last
    return is_due and run.config.checkpoint.save is not None


def is_scheduled(run: Run, iteration: int) -> bool:
    """Return whether a checkpoint is due after an iteration: at the interval, or after an epoch."""
    interval = run.config.checkpoint.save_interval
    return iteration in run.save_at or (interval is not None and iteration % interval == 0)


def _background_saver(
    run: Run, report: Callable[[int, SavedCheckpoint | Exception], None]
) -> BackgroundSaver:
    """Return a background saver with its host memory allocated. Collective."""
    options, start_time = run.config.checkpoint, time.perf_counter()
    assert options.save
    timeout = timedelta(minutes=run.config.parallel.distributed_timeout_minutes)
    try:
        saver = BackgroundSaver(
            options.save,
            checkpointing.state_of(run),
            run.layout,
            run.layout.for_thread(timeout),
            run.device,
            keep=checkpointing.keep_of(options),
            write=checkpointing.writer_of(run),
            report=report,
        )
    except MemoryError as error:
        raise ConfigError(
            f"--async-save needs host memory for a copy of what each process saves: {error}: drop "
            "the flag"
        ) from error
    if run.layout.world.rank == 0:
        size, seconds = saver.host_bytes / 1e9, time.perf_counter() - start_time
        print_line(
            f"  --async-save: {size:.3g} GB of host memory per process, ready in {seconds:.2f} s"
        )
    return saver


def best_interval(cost: float, between_failures: float) -> float:
    """Return the interval between saves, in seconds, that loses the least time (Young, Daly).

    Args:
        cost: The cost of a save in seconds.
        between_failures: The mean time between failures in seconds. Each failure loses half an
            interval.
    """
    return math.sqrt(2.0 * cost * between_failures)


def advice(
    *, cost: float, step: float, processes: int, hours: float | None, remaining: int
) -> str | None:
    """Return a one-line recommendation on how often to save.

    It is `None` if the run ends before the first such save.

    Args:
        cost: The time in seconds for which training waits during a save.
        step: The time per iteration in seconds.
        processes: The number of processes of the job.
        hours: The mean time between failures of the job in hours, or `None` if unknown.
        remaining: The number of iterations left in the run.
    """
    source = "--mean-hours-between-failures"
    if hours is None:
        hours = PROCESS_HOURS_BETWEEN_FAILURES / processes
        source = f"as in Llama 3's training; set {source} to change it"
    interval = best_interval(cost, hours * _HOUR)
    iterations = max(1, round(interval / step))
    if iterations > remaining:
        return None
    return (
        f"  training waits {cost:.2f} s for a save: with a failure every {hours:,.0f} h "
        f"({source}), saving every {interval / 60:,.1f} minutes (about --save-interval "
        f"{iterations}) loses the least time"
    )
