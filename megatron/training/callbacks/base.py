"""The hooks of the training loop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron.errors import EXIT_OK

if TYPE_CHECKING:
    from megatron.training.run import Run
    from megatron.training.step import StepOutcome


@dataclass(frozen=True)
class EarlyExit:
    """The reason why the loop ends before the requested training is complete.

    Attributes:
        reason: The reason in a few words.
        code: The exit code, the same on all ranks. It is not 0 if the run must end immediately,
            apart from saving a checkpoint: after a signal, or if nothing reads the log anymore.
    """

    reason: str
    code: int = EXIT_OK

    @property
    def is_immediate(self) -> bool:
        """Whether the run must end immediately, apart from saving a checkpoint."""
        return self.code != EXIT_OK


class Callback:
    """A side task of training.

    Every hook does nothing unless overridden. All ranks call the hooks in the same order. A
    callback that only some ranks have must not communicate with other ranks.
    """

    def on_start(self, run: Run) -> None:
        """Run once, before the first step."""

    def interrupts(self, run: Run) -> bool:
        """Return whether `after_step` will occupy the device after the next update.

        If so, the update that follows does not begin early.
        """
        return False

    def before_step(self, run: Run) -> None:
        """Run before every update."""

    def after_step(self, run: Run, outcome: StepOutcome, early_exit: EarlyExit | None) -> None:
        """Run after every update; `early_exit` is set if the loop ends early after this update."""

    def after_skipped(self, run: Run) -> None:
        """Run after an iteration of --iterations-to-skip, which has no step."""

    def on_end(self, run: Run, early_exit: EarlyExit | None) -> None:
        """Run once, after the last step."""

    def on_failure(self, run: Run) -> None:
        """Run once, instead of `on_end`, if an error ends the loop. Not collective."""
