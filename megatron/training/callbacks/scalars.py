"""Scalars, events and expert loads of a run, at each step and after each evaluation."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence

from megatron.command import print_line
from megatron.errors import StorageError
from megatron.training.callbacks.base import Callback, EarlyExit
from megatron.training.log_line import is_likelihood, perplexity, update_figures
from megatron.training.run import Run
from megatron.training.step import StepOutcome
from megatron.training.writers import RunStart, Writer

_LONGEST_ERROR = 2000  # characters


class Scalars(Callback):
    """A callback that writes scalars at `--tensorboard-log-interval` and after evaluations.

    It also writes the description of the run, events, and the load of the experts at iterations
    with a log line.

    Args:
        writers: The writers, an empty sequence on ranks that do not log.
    """

    def __init__(self, writers: Sequence[Writer]) -> None:
        """Store the writers."""
        self._writers = writers
        self._failed: set[Writer] = set()
        self._start = 0.0
        self._resets = self._timed = 0

    def on_start(self, run: Run) -> None:
        """Write the description of the run."""
        if self._writers:
            start = RunStart.of(run)
            self._write_to_all(lambda writer, *when: writer.write_start(start, *when), run)

    def before_step(self, run: Run) -> None:
        """Start the clock."""
        self._start = time.perf_counter()

    def after_step(self, run: Run, outcome: StepOutcome, early_exit: EarlyExit | None) -> None:
        """Write the step's scalars. Collective: ranks without writers also take part."""
        seconds = time.perf_counter() - self._start
        options = run.config.logging
        load = outcome.expert_load
        if load is not None:
            self._write_to_all(lambda writer, *when: writer.write_expert_load(load, *when), run)
        if not outcome.applied:
            reason = "the loss or the gradients were not finite"
            if outcome.found_spike:
                reason = outcome.spike
            elif outcome.overflow:
                reason = f"the loss scale {outcome.loss_scale:g} was too high"
            self.event(run, "skipped update", reason)
        if run.timers.resets != self._resets:
            self._resets, self._timed = run.timers.resets, 0
        self._timed += 1
        if run.progress.iteration % options.tensorboard_log_interval:
            return
        norm = run.parameters_norm() if options.log_params_norm else None
        sizes = {}
        if options.log_optimizer_states_to_tensorboard:
            sizes = {f"optimizer/{name}": x for name, x in run.optimizer.sizes().items()}
        times = {}
        if options.log_timers_to_tensorboard and options.timing_log_level > 0:
            # The slowest rank's seconds per iteration since the last log line, with Megatron's tags
            times = {
                f"{name.removesuffix('-time')}-time": max(over_ranks) / self._timed
                for name, over_ranks in run.timers.over_ranks().items()
            }
        if self._writers:
            device_seconds = seconds * run.layout.world.size
            speed = {
                "tokens-per-second-per-gpu": outcome.tokens / device_seconds,
                # Megatron's tag: TFLOP/s per GPU
                "throughput": outcome.flops / device_seconds / 1e12,
            }
            share = {} if run.goodput is None else {"goodput": run.goodput}
            extra = speed | share | times | sizes
            self.write(run, step_scalars(run, outcome, norm, seconds) | extra)

    def after_skipped(self, run: Run) -> None:
        """Record that the iteration was skipped."""
        self.event(run, "skipped iteration", "--iterations-to-skip")

    def on_end(self, run: Run, early_exit: EarlyExit | None) -> None:
        """Record why training ended."""
        self.event(run, "end", "training is complete" if early_exit is None else early_exit.reason)

    def on_failure(self, run: Run) -> None:
        """Record the error that ends training."""
        error = sys.exception()
        self.event(run, "failure", f"{type(error).__name__}: {error}"[:_LONGEST_ERROR])

    def event(self, run: Run, kind: str, text: str) -> None:
        """Write an event to all writers.

        Args:
            run: The run.
            kind: The kind of event, such as "checkpoint".
            text: The details.
        """
        self._write_to_all(lambda writer, *when: writer.write_event(kind, text, *when), run)

    def after_evaluation(
        self, run: Run, split: str, losses: Mapping[str, float], *, at_end_of_training: bool
    ) -> None:
        """Write the losses of an evaluation.

        Args:
            run: The run.
            split: "validation" or "test". With --multiple-validation-sets, "validation" is followed
                by the name of a set.
            losses: The losses by log name.
            at_end_of_training: Whether this is the evaluation after the last iteration.
        """
        scalars = {}
        for name, value in losses.items():
            scalars[f"{name} {split}"] = value
            if run.config.logging.log_validation_ppl_to_tensorboard and is_likelihood(name):
                scalars[f"{name} {split} ppl"] = perplexity(value)
        self.write(run, scalars, at_end_of_training=at_end_of_training)

    def write(
        self, run: Run, scalars: Mapping[str, float], *, at_end_of_training: bool = False
    ) -> None:
        """Write scalars to all writers. A full disk is reported once, and training continues.

        Args:
            run: The run.
            scalars: The values by tag.
            at_end_of_training: Whether this is the evaluation after the last iteration.
        """
        self._write_to_all(
            lambda writer, *when: writer.write(
                scalars, *when, at_end_of_training=at_end_of_training
            ),
            run,
        )

    def _write_to_all(self, write: Callable[[Writer, int, int], None], run: Run) -> None:
        """Call `write` with each writer, the iteration and the consumed samples."""
        for writer in self._writers:
            try:
                write(writer, run.progress.iteration, run.progress.consumed_samples)
            except StorageError as error:
                if writer not in self._failed:
                    self._failed.add(writer)
                    print_line(
                        f"WARNING: {error}. Training continues, but later values may be missing"
                    )


def step_scalars(
    run: Run, outcome: StepOutcome, params_norm: float | None, seconds: float
) -> dict[str, float]:
    """Return the values of one step by Megatron's TensorBoard tags.

    Args:
        run: The run.
        outcome: The result of the step.
        params_norm: The L2 norm of the parameters, or `None` if it is not logged.
        seconds: The duration of the step in seconds.
    """
    options = run.config.logging
    scalars = {
        **outcome.losses,
        **outcome.layer_losses,
        **update_figures(run, outcome, params_norm),
        "iteration-time": seconds,
    }
    if options.log_memory_to_tensorboard:
        memory = run.device.memory()
        scalars |= {
            "mem-reserved-bytes": memory.reserved,
            "mem-allocated-bytes": memory.allocated,
            "mem-max-allocated-bytes": memory.peak_allocated,
            "mem-allocated-count": memory.allocations,
        }
    is_enabled = {
        "learning-rate": options.log_learning_rate_to_tensorboard,
        "decoupled-learning-rate": options.log_learning_rate_to_tensorboard,
        "batch-size": options.log_batch_size_to_tensorboard,
        "loss-scale": options.log_loss_scale_to_tensorboard,
        "world-size": options.log_world_size_to_tensorboard,
        "iteration-time": options.log_timers_to_tensorboard,
    }
    return {
        tag: value
        for tag, value in scalars.items()
        if value is not None and is_enabled.get(tag, True)
    }
