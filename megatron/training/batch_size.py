"""Batch arithmetic: how many samples an update takes, how many micro-batches, how many updates."""

from __future__ import annotations

import bisect
from dataclasses import dataclass

from megatron.config.training import TrainingConfig


@dataclass(frozen=True)
class Rampup:
    """The global batch grows from `start` by `increment` in even steps over `samples` samples."""

    start: int
    increment: int
    samples: int


@dataclass(frozen=True)
class BatchPlan:
    """The batch of every update of a run, as a function of the samples consumed before it.

    Attributes:
        micro_batch: samples of one forward pass of one process.
        global_batch: samples of one update over all processes, after any ramp-up.
        rampup: how it starts smaller; None where it does not.
        data_parallel: processes that take different samples. Every batch divides into micro-batches
            of all of them.
    """

    micro_batch: int
    global_batch: int
    rampup: Rampup | None = None
    data_parallel: int = 1

    def __post_init__(self) -> None:
        assert self.global_batch % self.samples_per_pass == 0, self

    @classmethod
    def from_config(cls, training: TrainingConfig, data_parallel: int) -> BatchPlan:
        """What the flags ask for; rules have found them to fit together."""
        ramp = training.rampup_batch_size
        return cls(
            training.micro_batch_size,
            training.global_batch_size,
            Rampup(*ramp) if ramp is not None else None,
            data_parallel,
        )

    @property
    def samples_per_pass(self) -> int:
        """Samples of one micro-batch over all data-parallel processes."""
        return self.micro_batch * self.data_parallel

    def global_batch_at(self, consumed_samples: int) -> int:
        """Samples of the update that follows `consumed_samples`."""
        ramp = self.rampup
        if ramp is None or ramp.start == self.global_batch or consumed_samples > ramp.samples:
            return self.global_batch
        steps = (self.global_batch - ramp.start) // ramp.increment
        # In floating point as Megatron does it, so that every step falls on the same update.
        return ramp.start + int(consumed_samples / (ramp.samples / steps)) * ramp.increment

    def micro_batches_at(self, consumed_samples: int) -> int:
        """Forward passes of each process in the update that follows `consumed_samples`."""
        return self.global_batch_at(consumed_samples) // self.samples_per_pass

    def iterations_for(self, train_samples: int) -> int:
        """Whole updates in a run of `train_samples`; a last partial one is left out."""
        iterations, consumed = self._through_rampup(train_samples)
        if self._is_ramping(consumed):
            return iterations  # the run ends inside the ramp-up
        return iterations + (train_samples - consumed) // self.global_batch

    def _is_ramping(self, consumed_samples: int) -> bool:
        return self.rampup is not None and consumed_samples <= self.rampup.samples

    def _through_rampup(self, max_samples: int) -> tuple[int, int]:
        """(updates, samples) of the ramp-up, or of as much of it as fits the limit."""
        iterations = consumed = 0
        while self._is_ramping(consumed):
            batch = self.global_batch_at(consumed)
            count = min(self._updates_of(batch, consumed), (max_samples - consumed) // batch)
            if count <= 0:
                break
            iterations, consumed = iterations + count, consumed + count * batch
        return iterations, consumed

    def _updates_of(self, batch: int, consumed: int) -> int:
        """Updates of the ramp-up, from `consumed` samples on, that take `batch` each.

        Found by halving, for the ramp-up may be of very many updates, and rounds as
        `global_batch_at` does.
        """
        assert self.rampup is not None
        updates = range(1, (self.rampup.samples - consumed) // batch + 1)
        return 1 + bisect.bisect_left(
            updates, True, key=lambda n: self.global_batch_at(consumed + n * batch) != batch
        )
