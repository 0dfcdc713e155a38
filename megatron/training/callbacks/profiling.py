"""`--profile`: a PyTorch profiler trace of a few iterations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron.command import say
from megatron.config import RunConfig
from megatron.durable import writing_to
from megatron.training.callbacks.base import Callback, Leave
from megatron.training.run import Run
from megatron.training.step import StepOutcome


def profile_folder(config: RunConfig) -> Path:
    """Where traces go: `--profile-dir`, else beside TensorBoard or checkpoints, else here."""
    if config.profiling.profile_dir:
        return Path(config.profiling.profile_dir)
    return Path(config.logging.tensorboard_dir or config.checkpoint.save or ".") / "profile"


def _first(config: RunConfig) -> int:
    """The first iteration to record: from --profile-step-start on, but none that is left out."""
    first = max(1, config.profiling.profile_step_start)
    while first - 1 in (config.training.iterations_to_skip or ()):
        first += 1
    return first


class Profile(Callback):
    """Records iterations [start, end) and writes a trace for a browser's trace viewer.

    In the trace every iteration is a range called "iteration N", and the parts that `Timers` knows
    are ranges of their names.
    """

    def __init__(self) -> None:
        self._profiler: Any = None
        self._iteration: Any = None

    def on_start(self, run: Run) -> None:
        folder = profile_folder(run.config)
        with writing_to("--profile-dir", folder):
            folder.mkdir(parents=True, exist_ok=True)

    def before_step(self, run: Run) -> None:
        upcoming = run.progress.iteration + 1
        if upcoming == _first(run.config):
            from torch.profiler import profile

            self._profiler = profile(record_shapes=True)
            self._profiler.__enter__()
        if self._profiler is not None:
            from torch.autograd.profiler import record_function

            self._iteration = record_function(f"iteration {upcoming}")
            self._iteration.__enter__()

    def after_step(self, run: Run, outcome: StepOutcome, leave: Leave | None) -> None:
        if self._profiler is None:
            return
        self._iteration.__exit__(None, None, None)
        self._finish_if_over(run, leave)

    def after_left_out(self, run: Run) -> None:
        if self._profiler is not None:
            self._finish_if_over(run, None)

    def _finish_if_over(self, run: Run, leave: Leave | None) -> None:
        over = run.progress.iteration + 1 >= run.config.profiling.profile_step_end
        if over or leave or run.finished:
            self._finish(run)

    def _finish(self, run: Run) -> None:
        run.device.synchronize()
        self._profiler.__exit__(None, None, None)
        folder = profile_folder(run.config)
        path = folder / f"rank{run.layout.world.rank}_iteration{run.progress.iteration}.json"
        self._profiler.export_chrome_trace(str(path))
        say(self._profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=15))
        say(f"profile of rank {run.layout.world.rank}: {path}")
        self._profiler = None
