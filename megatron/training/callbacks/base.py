"""What a side concern of training may hook into."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron.training.run import Run
    from megatron.training.step import StepOutcome


@dataclass(frozen=True)
class Leave:
    """Why the loop ends before the training that was asked for is done."""

    reason: str
    by_signal: bool = False


class Callback:
    """Every hook does nothing unless overridden. All ranks call all hooks in the same order."""

    def on_start(self, run: Run) -> None:
        """Once, before the first step."""

    def interrupts(self, run: Run) -> bool:
        """Whether `after_step` of the update to come needs the device's memory for a while: then
        the one after it is not begun before."""
        return False

    def before_step(self, run: Run) -> None:
        """Before every update."""

    def after_step(self, run: Run, outcome: StepOutcome, leave: Leave | None) -> None:
        """After every update; `leave` is set when it was the last one of this process."""

    def after_left_out(self, run: Run) -> None:
        """After an iteration of --iterations-to-skip, instead of `before_step` and `after_step`."""

    def on_end(self, run: Run, leave: Leave | None) -> None:
        """Once, after the last step."""

    def on_failure(self, run: Run) -> None:
        """Once, instead of `on_end`, where an error ends the loop; other ranks may be elsewhere."""
