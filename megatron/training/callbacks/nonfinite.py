"""The policy for losses or gradients that are not finite. All ranks decide alike."""

from __future__ import annotations

import torch

from megatron.command import say
from megatron.errors import NumericsError
from megatron.parallel.collectives import all_gather
from megatron.training.callbacks.base import Callback, Leave
from megatron.training.run import Run
from megatron.training.step import StepOutcome

_SHOWN_IDS = 64


class NonFinitePolicy(Callback):
    """A policy that ends the run at the first non-finite update, or after too many in a row.

    The update itself never changes the parameters when its gradients are not finite. With a
    dynamic fp16 loss scale, overflowing gradients are not an error: they only lower the scale. A
    non-finite loss is always an error.
    """

    def __init__(self) -> None:
        """Start with no skipped updates."""
        self._in_a_row = 0

    def after_step(self, run: Run, outcome: StepOutcome, leave: Leave | None) -> None:
        """End the run, or count the skipped update.

        Raises:
            NumericsError: The policy ends the run.
        """
        if not outcome.found_nonfinite or outcome.overflow:
            self._in_a_row = 0
            return
        self._in_a_row += 1
        options = run.config.training
        if not options.check_for_nan_in_loss_and_grad:
            return
        what, skips = _describe(run, outcome), options.on_nonfinite == "skip"
        if skips and self._in_a_row <= options.max_nonfinite_skips:
            if run.is_log_rank:
                say(f" skipped the update: {what}")
            return
        remedy = "--on-nonfinite skip skips such updates and continues"
        if skips:
            remedy = (
                f"{self._in_a_row} such iterations in a row exceed --max-nonfinite-skips "
                f"{options.max_nonfinite_skips}"
            )
        raise NumericsError(f"{what}. The parameters are unchanged; {remedy}")


def _describe(run: Run, outcome: StepOutcome) -> str:
    losses = ", ".join(f"{name} {value}" for name, value in outcome.losses.items())
    ids = _suspects(run, outcome)
    shown = ", ".join(map(str, ids[:_SHOWN_IDS])) + (", ..." if len(ids) > _SHOWN_IDS else "")
    return (
        f"iteration {run.progress.iteration}: {losses}, grad norm {outcome.grad_norm} are not all "
        f"finite (training sample ids {shown})"
    )


def _suspects(run: Run, outcome: StepOutcome) -> list[int]:
    """Return the sample ids of all micro-batches with a non-finite loss, or of the whole batch."""
    width = run.batches.micro_batch
    mine = torch.tensor(outcome.sample_ids).reshape(-1, width)
    bad = ~torch.tensor(outcome.finite).reshape(-1, 1)
    table = torch.cat([mine, bad.long().expand(-1, 1)], dim=1)
    rows = all_gather(table, run.layout.world)  # the last stage may be on another rank
    chosen = rows[rows[:, -1] > 0] if bool((rows[:, -1] > 0).any()) else rows
    return sorted(set(chosen[:, :-1].flatten().tolist()))
