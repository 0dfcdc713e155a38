"""The policy for skipped updates: what is printed, and when the run rewinds or ends."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron.checkpoint.loading import open_root
from megatron.checkpoint.reader import Reader
from megatron.command import print_line
from megatron.errors import NumericsError
from megatron.parallel.collectives import all_gather
from megatron.training.callbacks.base import Callback, EarlyExit
from megatron.training.callbacks.checkpoints import Checkpoints
from megatron.training.callbacks.non_persistent import NonPersistentCheckpoints
from megatron.training.callbacks.scalars import Scalars
from megatron.training.restoring import rewind_run
from megatron.training.run import Run
from megatron.training.step import StepOutcome

_SHOWN_IDS = 64  # sample ids in a message


@dataclass(frozen=True)
class _SkipReason:
    """A reason for skipping updates.

    Attributes:
        description: A description of what is wrong, and in which iteration.
        skips: Whether the flags ask to skip such updates and continue.
        remedy: What the user can do if the flags do not ask to skip.
        limit: The number of such updates in a row that the flags allow.
        flag: The flag that sets the limit.
    """

    description: str
    skips: bool
    remedy: str
    limit: int
    flag: str


class SkippedUpdates(Callback):
    """A callback that reports skipped updates, and ends the run unless the flags allow for them.

    An update with non-finite gradients or a spike (`--on-spike`) has not changed the parameters.
    With a dynamic fp16 loss scale, overflowing gradients are not an error: they only lower the
    scale. A non-finite loss never counts as an overflow.

    With `--on-spike rewind`, the callback also restores the weights of the last checkpoint.
    """

    def __init__(
        self,
        scalars: Scalars,
        checkpoints: Checkpoints | None,
        non_persistent: NonPersistentCheckpoints | None = None,
    ) -> None:
        """Create the callback, with no skipped updates.

        Args:
            scalars: The callback that records events.
            checkpoints: The callback that saves, if there is one.
            non_persistent: The callback that saves non-persistent checkpoints, if there is one.
        """
        self._scalars = scalars
        self._checkpoints, self._non_persistent = checkpoints, non_persistent
        self._in_a_row = 0
        self._rewinds: dict[int, int] = {}  # how often the run went back, by iteration

    def after_step(self, run: Run, outcome: StepOutcome, early_exit: EarlyExit | None) -> None:
        """End the run, rewind, or count the skipped update.

        Raises:
            NumericsError: The policy ends the run.
            CheckpointError: The checkpoint to rewind to is damaged or gone.
        """
        is_bad = outcome.found_nonfinite and not outcome.overflow
        if not is_bad and not outcome.found_spike:
            self._in_a_row = 0
            return
        self._in_a_row += 1
        if is_bad and not run.config.training.check_for_nan_in_loss_and_grad:
            return
        reason = _reason_of(run, outcome)
        if reason.skips and self._in_a_row <= reason.limit:
            if outcome.found_spike and run.config.training.on_spike == "rewind":
                self._rewind(run, reason)
            elif run.is_log_rank:
                print_line(f" skipped the update: {reason.description}")
            return
        remedy = reason.remedy
        if reason.skips:
            limit = f"{reason.flag} {reason.limit}"
            remedy = f"{self._in_a_row} such iterations in a row exceed {limit}"
        raise NumericsError(f"{reason.description}. The parameters are unchanged; {remedy}")

    def _rewind(self, run: Run, reason: _SkipReason) -> None:
        """Go back to the last checkpoint, or only report the skipped update if there is none."""
        reader = self._newest(run)
        if reader is None:
            if run.is_log_rank:
                print_line(
                    f" skipped the update: {reason.description}; there is no checkpoint yet to "
                    "go back to"
                )
            return
        iteration = reader.iteration
        count = self._rewinds[iteration] = self._rewinds.get(iteration, 0) + 1
        if count > reason.limit:
            raise NumericsError(
                f"{reason.description}. The run has gone back to the checkpoint of iteration "
                f"{iteration} {reason.limit} times ({reason.flag}): resume from an older one "
                "with --ckpt-step"
            )
        samples = rewind_run(run, reader)
        self._scalars.event(run, "rewind", f"to the weights of iteration {iteration}")
        if run.is_log_rank:
            print_line(
                f" went back to the weights of iteration {iteration}: {reason.description}; the "
                f"{samples} samples read since then are not trained on again"
            )

    def _newest(self, run: Run) -> Reader | None:
        """Open the newest checkpoint that this run has saved or resumed from. Collective.

        Raises:
            CheckpointError: The newest durable checkpoint is damaged or gone.
        """
        durable = None if self._checkpoints is None else self._checkpoints.newest(run)
        root, iteration = durable or (None, -1)
        newest = None
        if self._non_persistent is not None:
            newest = self._non_persistent.open_newest(after=iteration)
        if newest is not None or root is None:
            return newest
        trust = run.config.checkpoint.allow_foreign_checkpoints
        return open_root(root, step=iteration, layout=run.layout, allow_foreign=trust)


def _reason_of(run: Run, outcome: StepOutcome) -> _SkipReason:
    """Return why an update was skipped, and how the flags treat such updates. Collective."""
    options, ids = run.config.training, _suspects(run, outcome)
    id_text = ", ".join(map(str, ids[:_SHOWN_IDS])) + (", ..." if len(ids) > _SHOWN_IDS else "")
    position, samples = f"iteration {run.progress.iteration}", f"(training sample ids {id_text})"
    if outcome.found_spike:
        description, limit = f"{position}: {outcome.spike} {samples}", options.max_spikes
        return _SkipReason(description, skips=True, remedy="", limit=limit, flag="--max-spikes")
    losses = ", ".join(f"{name} {value}" for name, value in outcome.losses.items())
    return _SkipReason(
        f"{position}: {losses}, grad norm {outcome.grad_norm} are not all finite {samples}",
        skips=options.on_nonfinite == "skip",
        remedy="--on-nonfinite skip skips such updates and continues",
        limit=options.max_nonfinite_skips,
        flag="--max-nonfinite-skips",
    )


def _suspects(run: Run, outcome: StepOutcome) -> list[int]:
    """Return the sample ids of micro-batches with an abnormal loss, or of the whole batch.

    Collective.
    """
    width = run.batches.micro_batch
    local_ids = torch.tensor(outcome.sample_ids).reshape(-1, width)
    bad = ~torch.tensor(outcome.ordinary).reshape(-1, 1)
    table = torch.cat([local_ids, bad.long()], dim=1)
    rows = all_gather(table, run.layout.world)  # the last stage may be on another rank
    is_bad = rows[:, -1] > 0
    suspicious = rows[is_bad] if is_bad.any() else rows
    return sorted(set(suspicious[:, :-1].flatten().tolist()))
