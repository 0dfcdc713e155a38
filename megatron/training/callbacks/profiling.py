"""Profiling callbacks: a PyTorch profiler trace, and the pipeline bubble."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron.command import print_line
from megatron.config import RunConfig
from megatron.durable import writing_to
from megatron.parallel.collectives import all_gather
from megatron.training.callbacks.base import Callback, EarlyExit
from megatron.training.callbacks.scalars import Scalars
from megatron.training.passes import schedule_of
from megatron.training.run import Run
from megatron.training.step import StepOutcome
from megatron.training.timers import Bubble, OperationClock, compare_with_prediction


def profile_folder(config: RunConfig) -> Path:
    """Return the folder of traces.

    This is --profile-dir or, by default, "profile" in --tensorboard-dir, --save or the current
    folder.
    """
    if config.profiling.profile_dir:
        return Path(config.profiling.profile_dir)
    return Path(config.logging.tensorboard_dir or config.checkpoint.save or ".") / "profile"


class Profile(Callback):
    """A callback that traces windows of iterations, each [start, end) (`--profile`).

    In a trace, every iteration is a range called "iteration N", and every timer of `Timers` is a
    range with its name. The trace of a window has the name that TensorBoard's profiler plugin
    expects: "rank0.12.pt.trace.json" is the window of rank 0 that ends with iteration 12. Perfetto
    and chrome://tracing also open the files.
    """

    def __init__(self) -> None:
        """Create the callback without a profiler."""
        self._profiler: Any = None
        self._iteration: Any = None
        self._end = 0

    def on_start(self, run: Run) -> None:
        """Create the folder, so that an unwritable path is reported immediately."""
        folder = profile_folder(run.config)
        with writing_to("--profile-dir", folder):
            folder.mkdir(parents=True, exist_ok=True)

    def before_step(self, run: Run) -> None:
        """Begin recording at a window's first iteration that is not skipped."""
        upcoming = run.progress.iteration + 1
        options = run.config.profiling
        end = next((end for start, end in options.windows if start <= upcoming < end), None)
        if self._profiler is None and end is not None:
            from torch.profiler import profile

            self._end = end
            self._profiler = profile(
                record_shapes=True,
                profile_memory=options.profile_memory,
                # PyTorch records the modules of an eager model as part of the call stacks.
                with_stack=options.profile_callstack or options.profile_modules,
                with_flops=options.profile_flops,
                with_modules=options.profile_modules,
            )
            self._profiler.__enter__()
        if self._profiler is not None:
            from torch.autograd.profiler import record_function

            self._iteration = record_function(f"iteration {upcoming}")
            self._iteration.__enter__()

    def after_step(self, run: Run, outcome: StepOutcome, early_exit: EarlyExit | None) -> None:
        """Write the trace and print a summary after the last iteration of a window or the run."""
        if self._profiler is not None:
            self._iteration.__exit__(None, None, None)
            self._finish_if_over(run, early_exit)

    def after_skipped(self, run: Run) -> None:
        """Write the trace if this was the last iteration of a window."""
        if self._profiler is not None:
            self._finish_if_over(run, None)

    def _finish_if_over(self, run: Run, early_exit: EarlyExit | None) -> None:
        is_over = run.progress.iteration + 1 >= self._end
        if not (is_over or early_exit or run.finished):
            return
        run.device.synchronize()
        self._profiler.__exit__(None, None, None)
        rank, last = run.layout.world.rank, run.progress.iteration
        path = profile_folder(run.config) / f"rank{rank}.{last}.pt.trace.json"
        with suppress(OSError):
            path.unlink()  # the trace of an earlier run
        self._profiler.export_chrome_trace(str(path))  # does not raise an error if it fails
        print_line(self._profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=15))
        if path.is_file():
            print_line(f"profile of rank {rank}: {path}")
        else:
            print_line(
                f"WARNING: --profile-dir: the profile {path} could not be written: free space or "
                "give another folder. Training continues"
            )
        self._profiler = None


class PipelineBubble(Callback):
    """A callback that reports measured and predicted bubbles (`--log-pipeline-bubble`).

    It prints a line every `--log-interval` iterations and writes two scalars per iteration, for the
    pipeline of the logging rank. The other pipelines do the same work.
    """

    def __init__(self, clock: OperationClock, scalars: Scalars) -> None:
        """Store the clock, and the callback that writes scalars."""
        self._clock = clock
        self._scalars = scalars
        self._bubbles: list[Bubble] = []

    def after_step(self, run: Run, outcome: StepOutcome, early_exit: EarlyExit | None) -> None:
        """Gather the stages' times and report the bubble. Collective."""
        stages = all_gather(self._clock.read(len(run.parts)).unsqueeze(0), run.layout.pipeline)
        if not run.is_log_rank:
            return
        bubble = compare_with_prediction(stages, schedule_of(run, len(outcome.ordinary)))
        self._bubbles.append(bubble)
        scalars = {
            "pipeline-bubble": bubble.measured,
            "pipeline-bubble predicted": bubble.predicted,
        }
        self._scalars.write(run, scalars)
        if run.progress.iteration % run.config.logging.log_interval == 0:
            print_line(bubble_line(self._bubbles))
            self._bubbles = []


def bubble_line(bubbles: Sequence[Bubble]) -> str:
    """Return the log line with the mean bubble of some updates."""
    mean = Bubble(*(sum(column) / len(bubbles) for column in zip(*bubbles, strict=True)))
    return (
        f" pipeline bubble | measured: {mean.measured:.2%} of {1000 * mean.seconds:.1f} ms |"
        f" predicted: {mean.predicted:.2%} of {1000 * mean.predicted_seconds:.1f} ms |"
    )
