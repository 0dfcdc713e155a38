"""Small callbacks: garbage collection, unused memory, bad lines, sample ids, health, progress."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import torch

from megatron.command import print_line
from megatron.data.text_stream import count_bad_lines
from megatron.errors import warn
from megatron.parallel.collectives import all_gather
from megatron.training.callbacks.base import Callback, EarlyExit
from megatron.training.health import check_health, health_table, problems_of
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


class BadLines(Callback):
    """A callback that reports the number of skipped lines at the end (`--skip-bad-lines`)."""

    def on_end(self, run: Run, early_exit: EarlyExit | None) -> None:
        """Report the number of lines that all processes have skipped since the run began."""
        dataset, consumed = run.datasets[0], run.progress.consumed_samples
        count = count_bad_lines(dataset, consumed, run.layout.world)
        if count and run.is_log_rank:
            warn(
                f"--skip-bad-lines: {count:,} lines without a document were skipped (each pass "
                "over the text counts): tools/preprocess_data.py --on-error skip lists them all"
            )


class SampleIds(Callback):
    """A callback that writes each iteration's sample ids to a file (`--log-sample-ids`).

    Each line is a JSON object with "iteration" and "ids". The ids are sorted, so that files from
    different layouts are equal.
    """

    def after_step(self, run: Run, outcome: StepOutcome, early_exit: EarlyExit | None) -> None:
        """Append the line of this iteration."""
        local_ids = torch.tensor(outcome.sample_ids).reshape(-1, run.batches.micro_batch)
        ids = sorted(all_gather(local_ids, run.layout.data).flatten().tolist())
        if not run.is_log_rank:
            return
        path = Path(run.config.checkpoint.save or ".") / "samples.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"iteration": run.progress.iteration, "ids": ids}) + "\n")


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
