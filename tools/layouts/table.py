"""The Markdown table of `benchmark_layouts.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

_COLUMNS = (
    *("layout", "GPUs", "flags", "loss", "largest loss difference", "grad norm", "ms"),
    *(
        "predicted ms",
        "error",
        "tokens/s per GPU",
        "MFU",
        "peak GiB",
        "predicted GiB",
        "bubble",
        "predicted bubble",
    ),
)


@dataclass(frozen=True)
class Measurement:
    """The measurements of one run.

    Attributes:
        losses: Loss of every iteration.
        norms: Gradient norm of every iteration.
        milliseconds: Median time per iteration in milliseconds, excluding the first third.
        tokens_per_second: Speed in tokens per second per GPU.
        mfu: Model FLOPs utilization in percent, or `None` if the device's peak is unknown.
        peak_gib: The largest peak of allocated memory of any rank in GiB, or `None` if no rank
            reported it.
        predicted_gib: The same memory as estimated by `--dry-run`.
        bubble: Fraction of time in which pipeline stages wait, or `None` if not measured.
        predicted_bubble: The same fraction as simulated from the operations' times.
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
    """A layout and the result of its run.

    Attributes:
        layout: Name of the layout.
        processes: Number of processes, each with its own GPU if the machine has GPUs.
        flags: Flags of the layout.
        batch: The batch in words. Losses are comparable between rows with the same batch.
        measured: The measurements, or `None` if the run was skipped or failed.
        problem: Why there is no measurement.
        failed: Whether the problem is an error.
        predicted_milliseconds: The planner's time per iteration, or `None` if the planner was not
            used.
    """

    layout: str
    processes: int
    flags: str
    batch: str = ""
    measured: Measurement | None = field(default=None)
    problem: str = ""
    failed: bool = False
    predicted_milliseconds: float | None = None

    @property
    def error(self) -> float | None:
        """The relative error of the predicted time, or `None` if either time is missing."""
        if self.measured is None or self.predicted_milliseconds is None:
            return None
        return self.predicted_milliseconds / self.measured.milliseconds - 1


def as_markdown(rows: Sequence[Row]) -> str:
    """Return the table. Each row is compared with the first row that has the same batch."""
    lines = [_line(_COLUMNS), _line(["---"] * len(_COLUMNS))]
    return "\n".join(lines + [_line(_cells(row, rows)) for row in rows]) + "\n"


def loss_difference(row: Row, rows: Sequence[Row]) -> float | None:
    """Return the largest relative loss difference over the iterations.

    The reference is the first measured row with the same batch. The result is `None` for the
    reference itself, or if the iteration counts differ.
    """
    if row.measured is None:
        return None
    losses = row.measured.losses
    for reference in rows:
        if reference.measured is None or reference.batch != row.batch:
            continue
        if reference is row or len(reference.measured.losses) != len(losses):
            return None
        pairs = zip(losses, reference.measured.losses, strict=True)
        return max(abs(loss - expected) / abs(expected) for loss, expected in pairs)
    return None


def verdict(rows: Sequence[Row]) -> str:
    """Describe how the planner's best layout compares with the fastest measured layout.

    The result is empty if no row with a prediction was measured.
    """
    planned = [row for row in rows if row.predicted_milliseconds is not None]
    times = [(row.measured.milliseconds, row) for row in planned if row.measured is not None]
    if not times:
        return ""
    best = min(planned, key=lambda row: row.predicted_milliseconds or 0.0)
    milliseconds, fastest = min(times, key=lambda pair: pair[0])
    errors = [abs(row.error) for row in planned if row.error is not None]
    text = f"the planner's best of {len(planned)}: {best.layout}: "
    text += f"predicted {best.predicted_milliseconds:,.1f} ms, "
    if best.measured is None:
        text += f"not measured ({best.problem})"
    else:
        text += f"measured {best.measured.milliseconds:,.1f} ms"
    text += f"\nthe fastest of {len(times)} measured: {fastest.layout}: {milliseconds:,.1f} ms\n"
    if best.measured is not None:
        slower = best.measured.milliseconds / milliseconds - 1
        text += f"the planner's best takes {slower:.1%} more than the fastest; "
    text += f"errors of the predicted times: median {median(errors):.1%}, "
    return text + f"largest {max(errors):.1%}\n"


def _cells(row: Row, rows: Sequence[Row]) -> list[str]:
    cells = [row.layout, str(row.processes), f"`{row.flags}`"]
    measured = row.measured
    predicted = _format(row.predicted_milliseconds, ",.1f")
    if measured is None:
        text = " ".join(row.problem.split()).replace("|", "\\|")
        return [*cells, text, "-", "-", "-", predicted, *["-"] * (len(_COLUMNS) - len(cells) - 5)]
    return [
        *cells,
        f"{measured.losses[-1]:.6f}",
        _format(loss_difference(row, rows), ".1e"),
        f"{measured.norms[-1]:.3f}",
        f"{measured.milliseconds:,.1f}",
        predicted,
        _format(row.error, "+.1%"),
        f"{measured.tokens_per_second:,.0f}",
        _format(measured.mfu, ".1f", "%"),
        _format(measured.peak_gib, ".2f"),
        f"{measured.predicted_gib:.2f}",
        _format(measured.bubble, ".1%"),
        _format(measured.predicted_bubble, ".1%"),
    ]


def _format(value: float | None, spec: str, unit: str = "") -> str:
    return "-" if value is None else f"{value:{spec}}{unit}"


def _line(values: Sequence[str]) -> str:
    return f"| {' | '.join(values)} |"
