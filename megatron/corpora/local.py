"""datatrove's local executor, running on this package's worker processes."""

from __future__ import annotations

from collections import deque
from copy import deepcopy
from typing import Any

from megatron.data.preprocess import map_in_order
from megatron.durable import writing_to
from megatron.extras import packages_of

with packages_of("corpora"):
    from datatrove.executor.local import LocalPipelineExecutor

_REMEDY = "To reduce memory, use fewer --workers"


class LocalExecutor(LocalPipelineExecutor):
    """A local executor that leaves no processes behind and reports killed workers.

    datatrove's own executor starts a manager process, which outlives a killed run and costs 0.1 s
    per stage. That executor also waits forever for a worker that the system has killed for lack of
    memory.
    """

    pipeline: Any

    def run(self) -> None:
        """Run all tasks that have not been completed yet.

        Raises:
            UserError: A task failed for a reason that the user can fix.
            ShortageError: A worker was killed or ran out of memory.
        """
        ranks = self.get_incomplete_ranks()
        if not ranks:
            return
        with writing_to("--output", self.logging_dir.path):
            self.save_executor_as_json()
        workers = min(self.workers, len(ranks)) if self.workers > 1 else 0
        with map_in_order(self._run, lambda: ranks, workers, _REMEDY) as done:
            deque(done, maxlen=0)

    def _run(self, rank: int) -> None:
        blocks = self.pipeline
        self.pipeline = deepcopy(blocks)  # each task has its own statistics
        try:
            with writing_to("--output", self.logging_dir.path):
                self._run_for_rank(rank)
        finally:
            self.pipeline = blocks
