"""One update: micro-batches forward and backward, reduce, clip, update."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron.parallel.collectives import all_reduce
from megatron.parallel.layers import forget_weights
from megatron.parallel.tied import share_tied_gradients
from megatron.training.passes import Passes
from megatron.training.run import Run


@dataclass(frozen=True)
class StepOutcome:
    """What one update did; the same on every rank except for `batches`.

    Attributes:
        losses: mean over the global batch, by log name.
        applied: the parameters changed.
        found_nonfinite: loss or gradients were not finite.
        overflow: they were not because the dynamic fp16 loss scale is too high: no error.
        grad_norm: before clipping.
        zeros: zero entries of the gradient; None unless asked for.
        samples: size of the global batch.
        loss_scale: what the loss was multiplied by.
        exit_wanted: some rank asked to leave.
        save_due: on some rank it is time for a checkpoint (`--save-interval-in-mins`).
        sample_ids: of this rank, one list a micro-batch.
        finite: whether each micro-batch of this rank had a finite loss.
    """

    losses: dict[str, float]
    applied: bool
    found_nonfinite: bool
    overflow: bool
    grad_norm: float
    zeros: int | None
    samples: int
    loss_scale: float
    exit_wanted: bool
    save_due: bool = False
    sample_ids: list[list[int]] = field(default_factory=list)
    finite: list[bool] = field(default_factory=list)


def train_step(run: Run) -> StepOutcome:
    """Consume one global batch and update the parameters. Collective."""
    progress = run.progress
    journal = run.layout.journal
    journal.iteration = progress.iteration + 1
    samples = run.batches.global_batch_at(progress.consumed_samples)
    loss_scale = run.optimizer.loss_scale
    passes = Passes(
        run,
        run.train_batches,
        run.batches.micro_batches_at(progress.consumed_samples),
        first_sample=progress.consumed_samples,
        scale=run.optimizer.scale_loss,
    )
    for part in run.parts:
        part.train()
    run.gradients.zero()
    with run.timers.measure("forward-backward"):
        passes.forward_backward()
    journal.enter("reduction of the gradients")
    with run.timers.measure("all-grads-sync"):
        reduce_gradients(run)
    journal.enter("optimizer step")
    with run.timers.measure("optimizer"):
        result = run.optimizer.step(
            lr=run.schedules.learning_rate.at(progress.scheduled_samples),
            weight_decay=run.schedules.weight_decay.at(progress.scheduled_samples),
        )
    for part in run.parts:
        forget_weights(part)
    journal.enter("reduction of the losses")
    flags = (run.exit.wanted, run.save_clock.is_due)
    losses, (exit_wanted, save_due) = reduce_losses(passes.losses, flags, run)
    losses_are_finite = all(math.isfinite(value) for value in losses.values())

    journal.enter("end of the iteration")
    progress.iteration += 1
    progress.consumed_samples += samples
    if result.applied:
        progress.scheduled_samples += samples
    return StepOutcome(
        losses=losses,
        applied=result.applied,
        found_nonfinite=result.found_nonfinite or not losses_are_finite,
        overflow=result.overflow and losses_are_finite,
        grad_norm=result.grad_norm,
        zeros=result.zeros,
        samples=samples,
        loss_scale=loss_scale,
        exit_wanted=exit_wanted,
        save_due=save_due,
        sample_ids=passes.sample_ids,
        finite=_finite(passes),
    )


def reduce_gradients(run: Run) -> None:
    """From this process's gradients to those of the global batch. Collective."""
    run.gradients.complete()
    share_tied_gradients(run.tied, run.layout.embedding)
    run.gradients.reduce()


def _finite(passes: Passes) -> list[bool]:
    """Whether each micro-batch had a finite loss; true where losses are computed elsewhere."""
    if not passes.losses:
        return [True] * len(passes.sample_ids)
    totals = torch.stack([torch.stack(values) for values in passes.losses.values()]).sum(dim=0)
    return torch.isfinite(totals).tolist()


def any_rank(flag: bool, run: Run) -> bool:
    """Whether any rank says yes. Collective."""
    return reduce_losses({}, [flag], run)[1][0]


def reduce_losses(
    losses: Mapping[str, list[Tensor]], flags: Sequence[bool], run: Run
) -> tuple[dict[str, float], list[bool]]:
    """Mean of each loss over the global batch, and for each flag whether any rank has set it.

    One all-reduce over the world: the ranks that hold the end of the model know the losses, and
    one tensor rank speaks for all. Each data and context rank gives its mean over micro-batches.
    """
    layout, names = run.layout, run.recipe.loss_names(run.config)
    packed = torch.zeros(len(names) + len(flags), device=run.device.torch_device)
    if losses and layout.tensor.is_first:
        means = torch.stack([torch.stack(losses[name]).float().mean() for name in names])
        packed[: len(names)] = means / (layout.data.size * layout.context.size)
    if any(flags):
        packed[len(names) :] = torch.tensor(flags, dtype=packed.dtype)
    values = all_reduce(packed, layout.world).tolist()
    return dict(zip(names, values, strict=False)), [count > 0 for count in values[len(names) :]]
