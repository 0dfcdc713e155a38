"""Megatron's log lines, to the character, with throughput appended."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class LogRecord:
    """The contents of one log line, which covers the iterations since the previous line.

    Attributes:
        losses: Mean losses over the iterations whose loss was finite.
        milliseconds: The mean time of one iteration.
        tokens_per_second: The throughput of one process (one GPU, if there is one). Padding is
            included, because it is computed.
        mfu: Model FLOP/s over the device's dense 16-bit peak, or `None` if the peak is unknown.
        grad_norm: The last iteration's gradient norm. Fields that are `None` are not printed.
        zeros: The number of zero entries in the last iteration's gradient.
        params_norm: The parameter norm after the last iteration.
        skipped_samples: The number of samples skipped by --iterations-to-skip since the run began.
            0 is not printed.
        decoupled_learning_rate: The learning rate of word embeddings and output layer.
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
    """Return the line of `training_log` in Megatron-LM 23.08, followed by two more fields.

    Skipped samples and a decoupled learning rate appear where Megatron Core prints them.
    """
    fields = [
        (" iteration", f"{record.iteration:8d}/{record.train_iterations:8d}"),
        ("consumed samples:", f"{record.consumed_samples:12d}"),
        ("skipped samples:", f"{record.skipped_samples:12d}" if record.skipped_samples else ""),
        ("elapsed time per iteration (ms):", f"{record.milliseconds:.1f}"),
        ("learning rate:", f"{record.learning_rate:.3E}"),
        ("decoupled learning rate:", _formatted(record.decoupled_learning_rate, ".3E")),
        ("global batch size:", f"{record.global_batch_size:5d}"),
        *((f"{name}:", f"{value:.6E}") for name, value in record.losses.items()),
        ("loss scale:", f"{record.loss_scale:.1f}"),
        ("grad norm:", _formatted(record.grad_norm, ".3f")),
        ("num zeros:", _formatted(record.zeros, ".1f")),
        ("params norm:", _formatted(record.params_norm, ".3f")),
        ("number of skipped iterations:", f"{record.skipped:3d}"),
        ("number of nan iterations:", f"{record.nan:3d}"),
        ("tokens/s per GPU:", f"{record.tokens_per_second:.1f}"),
        ("MFU:", _formatted(record.mfu, ".1%") or "n/a"),
    ]
    return " | ".join(f"{name} {text}" for name, text in fields if text) + " |"


def _formatted(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def skipped_line(iteration: int, train_iterations: int, samples: int) -> str:
    """Return the line for a skipped iteration, whose number in the flag is one less."""
    return (
        f" left out iteration {iteration} of {train_iterations} (--iterations-to-skip "
        f"{iteration - 1}): read past its {samples} samples, updated nothing"
    )


def perplexity(loss: float) -> float:
    """Return exp(loss), limited to exp(20) as in Megatron."""
    return math.exp(min(20.0, loss))


def validation_lines(
    where: str, losses: Mapping[str, float], *, has_perplexity: bool = True
) -> str:
    """Return the validation losses as a block between dashed rules.

    Args:
        where: "iteration N" or "the end of training ...".
        losses: Losses by name.
        has_perplexity: Whether the losses are per token (`Recipe.head`), so that exp(loss) is a
            perplexity.
    """
    text = f" validation loss at {where} | "
    for name, value in losses.items():
        text += f"{name} value: {value:.6E} | "
        if has_perplexity:
            text += f"{name} PPL: {perplexity(value):.6E} | "
    rule = "-" * (len(text) + 1)
    return f"{rule}\n{text}\n{rule}"
