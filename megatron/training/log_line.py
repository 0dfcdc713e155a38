"""The figures of an update, and log lines in Megatron's exact format, with throughput added."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron.training.run import Run
    from megatron.training.step import StepOutcome

Figures = Mapping[str, float | None]
"""Figures by TensorBoard tag. A figure that is `None` is not shown."""

# The log name of the divergence from a teacher, which is not a negative log likelihood.
DIVERGENCE = "logits distillation loss"

# The fields of a log line around the losses: label, tag of the figure, format.
_BEFORE_LOSSES = (
    ("consumed samples", "consumed-samples", "12d"),
    ("consumed tokens", "consumed-train-tokens", "12d"),
    ("skipped samples", "skipped-train-samples", "12d"),
    ("elapsed time per iteration (ms)", "milliseconds", ".1f"),
    ("learning rate", "learning-rate", ".3E"),
    ("decoupled learning rate", "decoupled-learning-rate", ".3E"),
    ("global batch size", "batch-size", "5d"),
)
_AFTER_LOSSES = (
    ("loss scale", "loss-scale", ".1f"),
    ("grad norm", "grad-norm", ".3f"),
    ("num zeros", "num-zeros", ".1f"),
    ("params norm", "params-norm", ".3f"),
    ("curriculum seqlen", "seqlen/curriculum_seqlen", "5d"),
    ("number of skipped iterations", "skipped-iterations", "3d"),
    ("number of nan iterations", "nan-iterations", "3d"),
    ("tokens/s per GPU", "tokens-per-second-per-gpu", ".1f"),
)


def update_figures(run: Run, outcome: StepOutcome, params_norm: float | None) -> Figures:
    """Return the figures of the last update that both the log line and TensorBoard report."""
    # Megatron steps its schedules and its loss scale before it logs, so these are the values that
    # the next update uses.
    next_update = run.schedule_position
    counts_tokens = (
        outcome.length is not None
        or run.config.training.train_tokens is not None
        or run.schedules.learning_rate.in_tokens
    )
    return {
        # Megatron computes neither if the loss scale was too high.
        "grad-norm": None if outcome.overflow else outcome.grad_norm,
        "num-zeros": None if outcome.overflow else outcome.zeros,
        "learning-rate": run.schedules.learning_rate.at(next_update),
        "decoupled-learning-rate": run.schedules.decoupled_at(next_update),
        "skipped-train-samples": run.progress.skipped_samples or None,
        "batch-size": outcome.samples,
        # As in Megatron-DeepSpeed, tokens are shown only if their number does not follow from the
        # number of samples.
        "seqlen/curriculum_seqlen": outcome.length,
        "consumed-train-tokens": run.progress.consumed_tokens if counts_tokens else None,
        "loss-scale": run.optimizer.loss_scale,
        "world-size": run.layout.world.size,
        "params-norm": params_norm,
    }


def training_line(
    iteration: int, train_iterations: int, losses: Mapping[str, float], figures: Figures
) -> str:
    """Return the line that Megatron-LM 23.08's `training_log` prints, followed by two more fields.

    Skipped samples and a decoupled learning rate appear where Megatron Core prints them, consumed
    tokens where Megatron-DeepSpeed does.

    Args:
        iteration: The iteration that ended.
        train_iterations: The number of iterations of the run.
        losses: Mean losses since the previous line, over the iterations whose update was applied.
        figures: The result of `update_figures`, and the figures of the iterations since the
            previous line.
    """
    values = {**figures, **losses}
    columns = [*_BEFORE_LOSSES, *((name, name, ".6E") for name in losses), *_AFTER_LOSSES]
    fields = [
        f"{label}: {values[tag]:{form}}" for label, tag, form in columns if values[tag] is not None
    ]
    mfu = figures["mfu"]
    fields.append(f"MFU: {'n/a' if mfu is None else format(mfu, '.1%')} |")
    return f" iteration {iteration:8d}/{train_iterations:8d} | " + " | ".join(fields)


def skipped_line(iteration: int, train_iterations: int, samples: int) -> str:
    """Return the log line for a skipped iteration.

    Args:
        iteration: The iteration, counted from 1. --iterations-to-skip counts from 0.
        train_iterations: The number of iterations of the run.
        samples: The number of samples that the iteration consumed.
    """
    return (
        f" skipped iteration {iteration} of {train_iterations} (--iterations-to-skip "
        f"{iteration - 1}): consumed its {samples} samples without an update"
    )


def is_likelihood(name: str) -> bool:
    """Return whether exp(loss) is a perplexity, for a language model's loss with this log name."""
    return not name.startswith(DIVERGENCE)


def perplexity(loss: float) -> float:
    """Return exp(loss), limited to exp(20) as in Megatron."""
    return math.exp(min(20.0, loss))


def validation_lines(
    where: str,
    losses: Mapping[str, float],
    *,
    has_perplexity: bool = True,
    name: str = "validation",
) -> str:
    """Return the validation losses as a block between dashed rules.

    Args:
        where: "iteration N" or "the end of training ...".
        losses: Losses by name.
        has_perplexity: Whether the losses are per token (`Recipe.head`), so that exp(loss) is a
            perplexity unless the loss is a divergence.
        name: The name of the data. With --multiple-validation-sets, "validation" is followed by the
            name of a set.
    """
    text = f" {name} loss at {where} | "
    for loss, value in losses.items():
        text += f"{loss} value: {value:.6E} | "
        if has_perplexity and is_likelihood(loss):
            text += f"{loss} PPL: {perplexity(value):.6E} | "
    rule = "-" * (len(text) + 1)
    return f"{rule}\n{text}\n{rule}"
