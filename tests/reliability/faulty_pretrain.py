"""`pretrain_gpt.py` with a fault, given by FAULT=kind:rank:iteration (iterations from 1).

The fault happens only before the first restart. Kinds: lose (a sample that kills the worker that
loads it), skip (skips the gradient reduction), mistake (a UserError), bug (another exception) and
none. `--fault-inject` injects the others.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron.data.datasets import Datasets
from megatron.errors import DataError
from megatron.training import step
from megatron.training.pretrain import main
from megatron.training.run import Run
from pretrain_gpt import GPTRecipe


class Fault:
    """The fault in this process, and when it happens."""

    def __init__(self, kind: str, rank: int, iteration: int) -> None:
        restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        is_target = int(os.environ.get("RANK", "0")) == rank and restarts == 0
        self.kind = kind if is_target else "none"
        self.iteration = iteration

    def inject(self, iteration: int) -> None:
        """Cause the fault if it is due."""
        if iteration != self.iteration or self.kind not in ("mistake", "bug"):
            return
        Path(os.environ["FAULT_LOG"]).write_text(str(time.time()))
        if self.kind == "mistake":
            raise DataError("--data-path corpus: sample 17 is damaged: build the corpus again")
        raise KeyError("a bug of ours")


class DeadlyDataset:
    """A dataset whose sample `index` kills the process that loads it."""

    def __init__(self, dataset: Any, index: int) -> None:
        self._dataset, self._index = dataset, index

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        if index >= self._index:
            Path(os.environ["FAULT_LOG"]).write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
        return self._dataset[index]


class FaultyRecipe(GPTRecipe):
    """The toy with a fault."""

    def __init__(self, fault: Fault) -> None:
        self._fault = fault

    def build_datasets(self, *arguments: Any) -> Any:
        train, *rest = super().build_datasets(*arguments)
        if self._fault.kind == "lose":
            index = arguments[0].training.global_batch_size * (self._fault.iteration - 1)
            train = DeadlyDataset(train, index)
        return Datasets(train, *rest)

    def forward(self, part: Any, *arguments: Any) -> Tensor | Mapping[str, Tensor]:
        layout = arguments[-1]
        if part.training:
            self._fault.inject(layout.journal.iteration)
        return super().forward(part, *arguments)


def skip_reduction(fault: Fault) -> None:
    """Let this process skip one gradient reduction."""
    original = step.reduce_gradients

    def reduce_or_not(run: Run) -> None:
        if run.progress.iteration + 1 == fault.iteration:
            Path(os.environ["FAULT_LOG"]).write_text(str(time.time()))
        else:
            original(run)

    step.reduce_gradients = reduce_or_not


def wait_for_others() -> None:
    """Wait until every rank has come this far, so that only what follows counts as waiting.

    On a busy machine, a rank may otherwise start after the others stop waiting for it (TIMEOUT).
    """
    if "READY" not in os.environ:
        return
    count = int(os.environ["WORLD_SIZE"])
    ready = [Path(os.environ["READY"], f"ready{rank}") for rank in range(count)]
    ready[int(os.environ["RANK"])].touch()
    deadline = time.monotonic() + 120
    while not all(file.exists() for file in ready) and time.monotonic() < deadline:
        time.sleep(0.02)


if __name__ == "__main__":
    wait_for_others()
    kind, rank, iteration = os.environ["FAULT"].split(":")
    planned = Fault(kind, int(rank), int(iteration))
    if planned.kind == "skip":
        skip_reduction(planned)
    sys.exit(main(FaultyRecipe(planned)))
