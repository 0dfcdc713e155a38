"""The numbers of each step and evaluation, handed to the writers."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from megatron.command import say
from megatron.errors import StorageError
from megatron.training.callbacks.base import Callback, Leave
from megatron.training.log_line import perplexity
from megatron.training.run import Run
from megatron.training.step import StepOutcome
from megatron.training.writers import Writer


class Scalars(Callback):
    """Writes every `--tensorboard-log-interval` iterations, and after every evaluation."""

    def __init__(self, writers: Sequence[Writer]) -> None:
        self._writers = writers
        self._failed: set[Writer] = set()
        self._start = 0.0
        self._resets = self._timed = 0

    def before_step(self, run: Run) -> None:
        self._start = time.perf_counter()

    def after_step(self, run: Run, outcome: StepOutcome, leave: Leave | None) -> None:
        seconds = time.perf_counter() - self._start
        options = run.config.logging
        if run.timers.resets != self._resets:
            self._resets, self._timed = run.timers.resets, 0
        self._timed += 1
        if run.progress.iteration % options.tensorboard_log_interval:
            return
        # All ranks take part in the norm and the timers, whether or not they write.
        norm = None
        if options.log_params_norm:
            norm = run.parameters_norm()
        times = {}
        if options.log_timers_to_tensorboard and options.timing_log_level > 0:
            times = self._slowest(run)
        if self._writers:
            self._write(run, step_scalars(run, outcome, norm, seconds) | times)

    def _slowest(self, run: Run) -> dict[str, float]:
        """Seconds of an iteration that the slowest rank has spent, under Megatron's tags, as a
        mean since the last log line. Collective."""
        return {
            f"{name.removesuffix('-time')}-time": max(seconds) / self._timed
            for name, seconds in run.timers.over_ranks().items()
        }

    def after_evaluation(self, run: Run, split: str, losses: Mapping[str, float]) -> None:
        """`split` is "validation" or "test"."""
        scalars = {}
        for name, value in losses.items():
            scalars[f"{name} {split}"] = value
            if run.config.logging.log_validation_ppl_to_tensorboard:
                scalars[f"{name} {split} ppl"] = perplexity(value)
        self._write(run, scalars)

    def _write(self, run: Run, scalars: Mapping[str, float]) -> None:
        for writer in self._writers:
            try:
                writer.write(scalars, run.progress.iteration, run.progress.consumed_samples)
            except StorageError as error:
                if writer not in self._failed:
                    self._failed.add(writer)
                    say(f"WARNING: {error}. Training goes on; numbers are missing there from here")


def step_scalars(
    run: Run, outcome: StepOutcome, params_norm: float | None, seconds: float
) -> dict[str, float]:
    """Megatron's TensorBoard tags and their values for one step."""
    options = run.config.logging
    scalars = dict(outcome.losses)
    if not outcome.overflow:  # else Megatron knows neither
        scalars["grad-norm"] = outcome.grad_norm
        if outcome.zeros is not None:
            scalars["num-zeros"] = outcome.zeros
    if options.log_learning_rate_to_tensorboard:
        scalars["learning-rate"] = run.schedules.learning_rate.at(run.progress.scheduled_samples)
        decoupled = run.schedules.decoupled_at(run.progress.scheduled_samples)
        if decoupled is not None:
            scalars["decoupled-learning-rate"] = decoupled
    if run.progress.skipped_samples:
        scalars["skipped-train-samples"] = run.progress.skipped_samples
    if options.log_batch_size_to_tensorboard:
        scalars["batch-size"] = outcome.samples
    if options.log_loss_scale_to_tensorboard:
        scalars["loss-scale"] = outcome.loss_scale
    if options.log_world_size_to_tensorboard:
        scalars["world-size"] = run.layout.world.size
    if params_norm is not None:
        scalars["params-norm"] = params_norm
    if options.log_timers_to_tensorboard:
        scalars["iteration-time"] = seconds
    if options.log_memory_to_tensorboard:
        memory = run.device.memory()
        scalars["mem-reserved-bytes"] = memory.reserved
        scalars["mem-allocated-bytes"] = memory.allocated
        scalars["mem-max-allocated-bytes"] = memory.peak_allocated
        if memory.pieces is not None:
            scalars["mem-allocated-count"] = memory.pieces
    return scalars
