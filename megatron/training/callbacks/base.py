"""The hooks of the training loop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron.training.run import Run
    from megatron.training.step import StepOutcome


@dataclass(frozen=True)
class Leave:
    """The reason why the loop ends before the requested training is complete."""

    reason: str
    by_signal: bool = False


class Callback:
    """A side task of training.

    Every hook does nothing unless overridden. All ranks call all hooks in the same order.
    """

    def on_start(self, run: Run) -> None:
        """Act once, before the first step."""

    def interrupts(self, run: Run) -> bool:
        """Return whether `after_step` of the coming update occupies the device.

        If so, the following update does not begin early.
        """
        return False

    def before_step(self, run: Run) -> None:
        """Act before every update."""

    def after_step(self, run: Run, outcome: StepOutcome, leave: Leave | None) -> None:
        """Act after every update; `leave` is set after the last one of this process."""

    def after_skipped(self, run: Run) -> None:
        """Act after an iteration of --iterations-to-skip, which has no step."""

    def on_end(self, run: Run, leave: Leave | None) -> None:
        """Act once, after the last step."""

    def on_failure(self, run: Run) -> None:
        """Act once, instead of `on_end`, if an error ends the loop. Not collective."""
