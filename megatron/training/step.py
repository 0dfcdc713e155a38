"""One update: micro-batches forward and backward, reduce, clip, update."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.parallel.layout import Layout
from megatron.parallel.random import micro_batch_seed
from megatron.training.recipe import Batch
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
    sample_ids: list[list[int]] = field(default_factory=list)
    finite: list[bool] = field(default_factory=list)


def train_step(run: Run) -> StepOutcome:
    """Consume one global batch and update the parameters."""
    progress = run.progress
    samples = run.batches.global_batch_at(progress.consumed_samples)
    lr = run.schedules.learning_rate.at(progress.scheduled_samples)
    weight_decay = run.schedules.weight_decay.at(progress.scheduled_samples)
    loss_scale = run.optimizer.loss_scale

    run.model.train()
    run.gradients.zero()
    with run.timers.measure("forward-backward"):
        micro_losses, sample_ids = _forward_backward(run, samples)
    with run.timers.measure("all-grads-sync"):
        run.gradients.reduce()
    with run.timers.measure("optimizer"):
        result = run.optimizer.step(lr=lr, weight_decay=weight_decay)
    means = {name: torch.stack(values).mean() for name, values in micro_losses.items()}
    losses, exit_wanted = reduce_losses(means, run.exit.wanted, run.layout)
    finite = torch.stack([sum(terms) for terms in zip(*micro_losses.values(), strict=True)])

    losses_are_finite = all(math.isfinite(value) for value in losses.values())

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
        sample_ids=sample_ids,
        finite=torch.isfinite(finite).tolist(),
    )


def _forward_backward(run: Run, samples: int) -> tuple[dict[str, list[Tensor]], list[list[int]]]:
    """Run this rank's micro-batches; their losses and sample ids."""
    per_pass = run.batches.micro_batch * run.layout.data.size
    count = samples // per_pass
    losses: dict[str, list[Tensor]] = {}
    sample_ids = []
    for index in range(count):
        with run.timers.measure("batch-generator", level=2):
            batch = next(run.train_batches)
        sample_ids.append(batch["id"].tolist())
        first = run.progress.consumed_samples + index * per_pass
        first += run.layout.data.rank * run.batches.micro_batch
        run.device.seed(micro_batch_seed(run.progress.dropout_seed, first))
        with run.timers.measure("forward-compute", level=2):
            terms = run.recipe.losses(run.model, to_device(batch, run), run.config, run.tokenizer)
        total = torch.stack(list(terms.values())).sum() / count
        is_last = index == count - 1
        with (
            run.timers.measure("backward-compute", level=2),
            run.gradients.micro_batch(is_last=is_last),
        ):
            run.optimizer.scale_loss(total).backward()
        for name, value in terms.items():
            losses.setdefault(name, []).append(value.detach())
    return losses, sample_ids


def any_rank(flag: bool, layout: Layout) -> bool:
    """Whether any data rank says yes. Collective."""
    return reduce_losses({"": torch.zeros(())}, flag, layout)[1]


def to_device(batch: Batch, run: Run) -> Batch:
    """The batch on this run's device; ids stay where they are."""
    target = run.device.torch_device
    return {
        name: value if name == "id" else value.to(target, non_blocking=True)
        for name, value in batch.items()
    }


def reduce_losses(
    losses: dict[str, Tensor], exit_wanted: bool, layout: Layout
) -> tuple[dict[str, float], bool]:
    """Mean of each loss over data ranks, and whether any rank wants to leave: one all-reduce."""
    stacked = torch.stack([*losses.values()]).float()
    packed = torch.cat([stacked, stacked.new_tensor([float(exit_wanted)])])
    if layout.data.size > 1:
        dist.all_reduce(packed, group=layout.data.group)
        packed[:-1] /= layout.data.size
    *values, flag = packed.tolist()
    return dict(zip(losses, values, strict=True)), flag > 0
