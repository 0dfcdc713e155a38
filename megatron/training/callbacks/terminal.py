"""The terminal: lines that do not tear a progress bar, and the bar itself."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

from megatron.command import drop_unwritten, lost_its_reader
from megatron.errors import OutputClosedError
from megatron.training.callbacks.base import Callback, Leave
from megatron.training.run import Run
from megatron.training.step import StepOutcome


def say(text: str) -> None:
    """Print a line at once, above the progress bar if one is drawn.

    Where standard output cannot be written (its disk is full), the line goes to the error stream,
    or nowhere: a run does not end for its log.

    Raises:
        OutputClosedError: what read standard output has gone.
    """
    try:
        if sys.stderr.isatty():
            from tqdm import tqdm

            tqdm.write(text)
        else:
            sys.stdout.write(text + "\n")  # one write: lines of several ranks do not mix
        sys.stdout.flush()
    except BrokenPipeError as error:
        if not lost_its_reader():
            raise
        raise OutputClosedError(
            "the program that read this run's log has ended, as `| head` does after its last "
            "line: the run ends too. To keep it running, write the log to a file (> log.txt)"
        ) from error
    except OSError as error:
        drop_unwritten()
        with contextlib.suppress(OSError):
            print(f"(log: {error.strerror}) {text}", file=sys.stderr, flush=True)


class ProgressBar(Callback):
    """A live bar with loss, speed and time left, where the error stream is a terminal."""

    def __init__(self) -> None:
        self._bar: Any = None

    def on_start(self, run: Run) -> None:
        if not (run.is_log_rank and sys.stderr.isatty()):
            return
        from tqdm import tqdm

        self._bar = tqdm(
            total=run.train_iterations,
            initial=run.progress.iteration,
            unit="it",
            dynamic_ncols=True,
            desc="training",
        )

    def after_step(self, run: Run, outcome: StepOutcome, leave: Leave | None) -> None:
        if self._bar is None:
            return
        losses = {name: f"{value:.4f}" for name, value in outcome.losses.items()}
        self._bar.set_postfix(losses, refresh=False)
        self._bar.update(1)

    def on_end(self, run: Run, leave: Leave | None) -> None:
        if self._bar is not None:
            self._bar.close()
