"""Megatron's log lines, to the character, with throughput appended."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class LogRecord:
    """What one log line tells about the iterations since the last one.

    Attributes:
        losses: mean over those iterations that had a finite loss.
        milliseconds: of one iteration.
        grad_norm, zeros, params_norm: of the last iteration; None: left out.
        skipped_samples: of iterations left out since the run began; 0: not told.
        decoupled_learning_rate: of word embeddings and output layer; None: not told.
        tokens_per_second: of one process (one GPU, where there is one).
        mfu: model FLOP/s over the device's peak; None where the peak is not known.
    """

    iteration: int
    train_iterations: int
    consumed_samples: int
    milliseconds: float
    learning_rate: float
    global_batch_size: int
    losses: Mapping[str, float]
    loss_scale: float
    skipped: int
    nan: int
    tokens_per_second: float
    mfu: float | None
    grad_norm: float | None = None
    zeros: int | None = None
    params_norm: float | None = None
    skipped_samples: int = 0
    decoupled_learning_rate: float | None = None


def training_line(record: LogRecord) -> str:
    """The line of `training_log` in Megatron-LM 23.08; two fields follow its last one. Samples of
    iterations left out and a decoupled learning rate stand where Megatron Core has them."""
    decoupled = record.decoupled_learning_rate
    fields = [
        f" iteration {record.iteration:8d}/{record.train_iterations:8d}",
        f"consumed samples: {record.consumed_samples:12d}",
        *([f"skipped samples: {record.skipped_samples:12d}"] if record.skipped_samples else []),
        f"elapsed time per iteration (ms): {record.milliseconds:.1f}",
        f"learning rate: {record.learning_rate:.3E}",
        *([] if decoupled is None else [f"decoupled learning rate: {decoupled:.3E}"]),
        f"global batch size: {record.global_batch_size:5d}",
        *(f"{name}: {value:.6E}" for name, value in record.losses.items()),
        f"loss scale: {record.loss_scale:.1f}",
    ]
    if record.grad_norm is not None:
        fields.append(f"grad norm: {record.grad_norm:.3f}")
    if record.zeros is not None:
        fields.append(f"num zeros: {record.zeros:.1f}")
    if record.params_norm is not None:
        fields.append(f"params norm: {record.params_norm:.3f}")
    fields += [
        f"number of skipped iterations: {record.skipped:3d}",
        f"number of nan iterations: {record.nan:3d}",
        f"tokens/s per GPU: {record.tokens_per_second:.1f}",
        f"MFU: {'n/a' if record.mfu is None else f'{record.mfu:.1%}'}",
    ]
    return " | ".join(fields) + " |"


def left_out_line(iteration: int, train_iterations: int, samples: int) -> str:
    """In the place of an iteration's line. Its number for the flag is one less."""
    return (
        f" left out iteration {iteration} of {train_iterations} (--iterations-to-skip "
        f"{iteration - 1}): read past its {samples} samples, updated nothing"
    )


def perplexity(loss: float) -> float:
    """exp(loss), held below exp(20) as Megatron does."""
    return math.exp(min(20.0, loss))


def validation_lines(
    where: str, losses: Mapping[str, float], *, has_perplexity: bool = True
) -> str:
    """The block between dashed rules.

    Args:
        where: "iteration N" or "the end of training ...".
        losses: by name.
        has_perplexity: they are of tokens, see `Recipe.head`.
    """
    text = f" validation loss at {where} | "
    for name, value in losses.items():
        text += f"{name} value: {value:.6E} | "
        if has_perplexity:
            text += f"{name} PPL: {perplexity(value):.6E} | "
    rule = "-" * (len(text) + 1)
    return f"{rule}\n{text}\n{rule}"
