"""The rows that `benchmark_layouts.py` measures, as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

_COLUMNS = (
    *("layout", "GPUs", "flags", "loss", "largest loss difference", "grad norm", "ms"),
    *("tokens/s a GPU", "MFU", "peak GiB", "predicted GiB", "bubble", "predicted bubble"),
)


@dataclass(frozen=True)
class Measurement:
    """What one run gave.

    Attributes:
        losses: of every iteration.
        norms: of the gradient, likewise.
        milliseconds: of an iteration, the median without the first third.
        tokens_per_second: of one GPU.
        mfu: in percent, of such an iteration; None where the device's peak is not known.
        peak_gib: the most memory allocated by any rank; None where no rank told.
        predicted_gib: the same by the arithmetic of `--dry-run`.
        bubble: fraction of time in which pipeline stages wait; None where it was not measured.
        predicted_bubble: the same by the simulator, from the operations' times.
    """

    losses: tuple[float, ...]
    norms: tuple[float, ...]
    milliseconds: float
    tokens_per_second: float
    mfu: float | None
    peak_gib: float | None
    predicted_gib: float
    bubble: float | None = None
    predicted_bubble: float | None = None


@dataclass(frozen=True)
class Row:
    """A layout and what came of it.

    Attributes:
        batch: what must be equal for losses to be comparable, in words.
        measured: None where the run did not take place or failed.
        problem: why there is no measurement.
        failed: the problem is an error.
    """

    layout: str
    processes: int
    flags: str
    batch: str = ""
    measured: Measurement | None = field(default=None)
    problem: str = ""
    failed: bool = False


def as_markdown(rows: Sequence[Row]) -> str:
    """The table. A difference is the largest relative one from the first row of the same batch."""
    lines = [_line(_COLUMNS), _line(["---"] * len(_COLUMNS))]
    return "\n".join(lines + [_line(_cells(row, rows)) for row in rows]) + "\n"


def loss_difference(row: Row, rows: Sequence[Row]) -> float | None:
    """The largest relative difference over the iterations; None where there is nothing to compare.

    Compared is with the first row of the same batch that has as many iterations.
    """
    if row.measured is None:
        return None
    losses = row.measured.losses
    for first in rows:
        if first.measured is None or first.batch != row.batch:
            continue
        if first is row or len(first.measured.losses) != len(losses):
            return None
        pairs = zip(losses, first.measured.losses, strict=True)
        return max(abs(loss - expected) / abs(expected) for loss, expected in pairs)
    return None


def _cells(row: Row, rows: Sequence[Row]) -> list[str]:
    start = [row.layout, str(row.processes), f"`{row.flags}`"]
    measured = row.measured
    if measured is None:
        text = " ".join(row.problem.split()).replace("|", "\\|")
        return [*start, text, *["-"] * (len(_COLUMNS) - len(start) - 1)]
    return [
        *start,
        f"{measured.losses[-1]:.6f}",
        _shown(loss_difference(row, rows), ".1e"),
        f"{measured.norms[-1]:.3f}",
        f"{measured.milliseconds:,.0f}",
        f"{measured.tokens_per_second:,.0f}",
        _shown(measured.mfu, ".1f", "%"),
        _shown(measured.peak_gib, ".2f"),
        f"{measured.predicted_gib:.2f}",
        _shown(measured.bubble, ".1%"),
        _shown(measured.predicted_bubble, ".1%"),
    ]


def _shown(value: float | None, form: str, unit: str = "") -> str:
    return "-" if value is None else f"{value:{form}}{unit}"


def _line(values: Sequence[str]) -> str:
    return f"| {' | '.join(values)} |"
