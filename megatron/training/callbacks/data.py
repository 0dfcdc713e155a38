"""Records of the data that a run has read: sample ids, and skipped lines of text."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from megatron.data.text_stream import count_bad_lines
from megatron.durable import writing_to
from megatron.errors import warn
from megatron.parallel.collectives import all_gather
from megatron.training.callbacks.base import Callback, EarlyExit
from megatron.training.run import Run
from megatron.training.step import StepOutcome


class SampleIds(Callback):
    """A callback that writes each update's sample ids to a file (`--log-sample-ids`).

    The file is `samples.jsonl` in --save or, without that flag, in the current folder. Each line is
    a JSON object with "iteration" and "ids". The ids are sorted, so that files from different
    layouts are equal.
    """

    def after_step(self, run: Run, outcome: StepOutcome, early_exit: EarlyExit | None) -> None:
        """Append the line of this iteration. Collective.

        Raises:
            StorageError: The file cannot be written.
        """
        local_ids = torch.tensor(outcome.sample_ids).reshape(-1, run.batches.micro_batch)
        ids = sorted(all_gather(local_ids, run.layout.data).flatten().tolist())
        if not run.is_log_rank:
            return
        path = Path(run.config.checkpoint.save or ".") / "samples.jsonl"
        line = json.dumps({"iteration": run.progress.iteration, "ids": ids}) + "\n"
        with writing_to("--log-sample-ids", path):
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8") as file:
                file.write(line)


class BadLines(Callback):
    """A callback that reports the number of skipped lines at the end (`--skip-bad-lines`)."""

    def on_end(self, run: Run, early_exit: EarlyExit | None) -> None:
        """Report the number of lines that all processes have skipped since the run began."""
        dataset, consumed = run.datasets.train, run.progress.consumed_samples
        count = count_bad_lines(dataset, consumed, run.layout.world)
        if count and run.is_log_rank:
            warn(
                f"--skip-bad-lines: {count:,} lines without a document were skipped (each pass "
                "over the text counts): tools/preprocess_data.py --on-error skip lists them all"
            )
