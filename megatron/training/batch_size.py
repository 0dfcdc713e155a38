"""Batch arithmetic: how many samples an update takes, how many micro-batches, how many updates."""

from __future__ import annotations

import bisect
from dataclasses import dataclass

from megatron.config.training import TrainingConfig
from megatron.errors import ConfigError


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
        data_parallel: processes that take different samples.

    Raises:
        ConfigError: some batch of the plan does not divide into micro-batches, or the ramp-up
            does not end at `global_batch`.
    """

    micro_batch: int
    global_batch: int
    rampup: Rampup | None = None
    data_parallel: int = 1

    def __post_init__(self) -> None:
        problems = _problems(self)
        if problems:
            raise ConfigError(problems)

    @classmethod
    def from_config(cls, training: TrainingConfig, data_parallel: int) -> BatchPlan:
        """What the flags ask for.

        Raises:
            ConfigError: as the class, or --micro-batch-size is missing, or --rampup-batch-size is
                not three numbers.
        """
        micro_batch, ramp = training.micro_batch_size, training.rampup_batch_size
        if micro_batch is None:
            raise ConfigError("--micro-batch-size is not given: give the samples of one pass")
        if ramp is not None and len(ramp) != 3:
            raise ConfigError(
                f"--rampup-batch-size {' '.join(map(str, ramp))}: needs three numbers, the first "
                "global batch, its increment and the samples of the ramp-up"
            )
        return cls(
            micro_batch,
            training.global_batch_size or micro_batch * data_parallel,
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


def _problems(plan: BatchPlan) -> list[str]:
    """Everything that keeps the numbers from being a plan."""
    unit = plan.samples_per_pass
    arithmetic = f"--micro-batch-size {plan.micro_batch} x {plan.data_parallel} data-parallel"
    if plan.micro_batch < 1 or plan.global_batch < 1:
        return [
            f"--micro-batch-size {plan.micro_batch} and --global-batch-size {plan.global_batch}: "
            "both must be at least 1"
        ]
    if plan.global_batch % unit:
        return [
            f"--global-batch-size {plan.global_batch} is not a multiple of {arithmetic} = {unit}: "
            f"use {_near_multiples(plan.global_batch, unit)}"
        ]
    if plan.rampup is None:
        return []
    problem = _rampup_problem(plan.rampup, plan.global_batch, unit, arithmetic)
    return [problem] if problem else []


def _rampup_problem(ramp: Rampup, global_batch: int, unit: int, arithmetic: str) -> str | None:
    """What keeps the ramp from reaching `global_batch` in whole passes of `unit` samples."""
    flag = f"--rampup-batch-size {ramp.start} {ramp.increment} {ramp.samples}"
    if min(ramp.start, ramp.increment, ramp.samples) < 1:
        return f"{flag}: batch, increment and samples must be at least 1"
    if ramp.start > global_batch or (global_batch - ramp.start) % ramp.increment:
        return (
            f"{flag}: steps of {ramp.increment} from {ramp.start} never reach --global-batch-size "
            f"{global_batch}: choose an increment that divides the difference"
        )
    is_growing = ramp.start < global_batch
    if ramp.start % unit or (is_growing and ramp.increment % unit):
        return (
            f"{flag}: start and increment must be multiples of {arithmetic} = {unit}, or some "
            "update would not divide into micro-batches"
        )
    return None


def _near_multiples(value: int, unit: int) -> str:
    """The multiples of `unit` around `value`."""
    below = value // unit * unit
    return f"{below} or {below + unit}" if below else f"{unit}"
