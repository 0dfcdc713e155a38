"""`--log-sample-ids`: which samples each iteration consumed."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from megatron.parallel.collectives import all_gather
from megatron.training.callbacks.base import Callback, Leave
from megatron.training.run import Run
from megatron.training.step import StepOutcome


class SampleIds(Callback):
    """Appends {"iteration", "ids"} to a JSON lines file; ids sorted, so layouts compare equal."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def after_step(self, run: Run, outcome: StepOutcome, leave: Leave | None) -> None:
        mine = torch.tensor(outcome.sample_ids).reshape(-1, run.batches.micro_batch)
        ids = sorted(all_gather(mine, run.layout.data).flatten().tolist())
        if not run.is_log_rank:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"iteration": run.progress.iteration, "ids": ids}) + "\n")
