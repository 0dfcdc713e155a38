"""The terminal: the log line, timers, a memory report and a progress bar."""

from __future__ import annotations

import math
import time
from typing import Any

from megatron.command import print_line
from megatron.training.callbacks.base import Callback, EarlyExit
from megatron.training.log_line import training_line, update_figures
from megatron.training.run import Run
from megatron.training.step import StepOutcome
from megatron.training.timers import format_timers

_MIB = 1024 * 1024


class LogLine(Callback):
    """A callback that prints a line every `--log-interval` iterations, on the last rank.

    In models with mixtures of experts, it also prints lines about the load of the experts.

    The reported time includes steps, data loading and the callbacks before this one, such as the
    one that writes scalars, but not checkpoints or evaluations.
    """

    def __init__(self) -> None:
        """Create the callback, which counts nothing until training starts."""
        self._memory_reported = False
        self._start = 0.0

    def on_start(self, run: Run) -> None:
        """Reset the counts, before the first step and after each log line."""
        self._seconds = 0.0
        self._sums: dict[str, float] = {}
        self._iterations = self._counted = self._skipped = self._nan = self._tokens = 0
        self._flops = 0.0

    def before_step(self, run: Run) -> None:
        """Start the clock."""
        self._start = time.perf_counter()

    def after_step(self, run: Run, outcome: StepOutcome, early_exit: EarlyExit | None) -> None:
        """Count the step, and print the log line, timers and memory if they are due."""
        self._seconds += time.perf_counter() - self._start
        self._add(outcome)
        options = run.config.logging
        if run.progress.iteration % options.log_interval:
            return
        norm = run.parameters_norm() if options.log_params_norm else None
        if run.is_log_rank:
            print_line(self._line(run, outcome, norm))
            if outcome.expert_load is not None:
                print_line(outcome.expert_load.line())
                warning = outcome.expert_load.warning()
                if warning is not None:
                    print_line(warning)
        if options.timing_log_level > 0:
            over_ranks = run.timers.over_ranks()
            run.timers.reset()
            if run.is_log_rank:
                print_line(format_timers(over_ranks, options.timing_log_option, self._iterations))
        self._report_memory(run)
        self.on_start(run)

    def _add(self, outcome: StepOutcome) -> None:
        self._iterations += 1
        self._tokens += outcome.tokens
        self._flops += outcome.flops
        self._nan += not all(map(math.isfinite, outcome.losses.values()))
        if not outcome.applied:
            self._skipped += 1
            return
        self._counted += 1
        for name, value in outcome.losses.items():
            self._sums[name] = self._sums.get(name, 0.0) + value

    def _line(self, run: Run, outcome: StepOutcome, params_norm: float | None) -> str:
        seconds, peak = self._seconds * run.layout.world.size, run.device.peak_flops
        losses = {name: total / self._counted for name, total in self._sums.items()}
        figures = {
            **update_figures(run, outcome, params_norm),
            "consumed-samples": run.progress.consumed_samples,
            "milliseconds": 1000.0 * self._seconds / self._iterations,
            "skipped-iterations": self._skipped,
            "nan-iterations": self._nan,
            "tokens-per-second-per-gpu": self._tokens / seconds,
            "mfu": None if peak is None else self._flops / seconds / peak,
        }
        return training_line(run.progress.iteration, run.train_iterations, losses, figures)

    def _report_memory(self, run: Run) -> None:
        """Print memory use once, after the first logged iterations, when every buffer exists."""
        if self._memory_reported or run.layout.data.rank:
            return
        self._memory_reported = True
        memory = run.device.memory()
        print_line(
            f"[Rank {run.layout.world.rank}] (after {run.progress.iteration} iterations) "
            f"memory (MB) | allocated: {memory.allocated / _MIB:.1f} | "
            f"max allocated: {memory.peak_allocated / _MIB:.1f} | "
            f"reserved: {memory.reserved / _MIB:.1f} | "
            f"max reserved: {memory.peak_reserved / _MIB:.1f}"
        )


class ProgressBar(Callback):
    """A callback that shows a progress bar with losses, speed and remaining time on stderr."""

    def on_start(self, run: Run) -> None:
        """Draw the bar."""
        from tqdm import tqdm

        start, total = run.progress.iteration, run.train_iterations
        self._bar: Any = tqdm(
            total=total, initial=start, unit="it", dynamic_ncols=True, desc="training"
        )

    def after_step(self, run: Run, outcome: StepOutcome, early_exit: EarlyExit | None) -> None:
        """Show the losses and advance the bar."""
        losses = {name: f"{value:.4f}" for name, value in outcome.losses.items()}
        self._bar.set_postfix(losses, refresh=False)
        self._bar.update(1)

    def after_skipped(self, run: Run) -> None:
        """Advance the bar without losses."""
        self._bar.update(1)

    def on_end(self, run: Run, early_exit: EarlyExit | None) -> None:
        """Close the bar."""
        self._bar.close()
