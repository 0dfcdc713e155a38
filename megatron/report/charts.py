"""Grouping curves into charts, and downsampling them to what a screen can show."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.report.history import Curve, History, split_held_out

_POINTS = 24_000  # limit for all curves of a page, which keeps it below 1 MB
_BINS = (60, 1000)  # minimum and maximum number of bins of a curve

# Charts of known tags: title, unit, tags. Each unknown tag gets its own chart.
_KNOWN: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("Learning rate", "", ("learning-rate", "decoupled-learning-rate")),
    ("Gradient norm", "", ("grad-norm",)),
    ("Speed", "tokens/s per GPU", ("tokens-per-second-per-gpu",)),
    ("Throughput", "TFLOP/s per GPU", ("throughput",)),
    ("Pipeline bubble", "share of the time", ("pipeline-bubble", "pipeline-bubble predicted")),
    ("Memory", "bytes", ("mem-reserved-bytes", "mem-allocated-bytes", "mem-max-allocated-bytes")),
)
_NOISY = {"grad-norm", "tokens-per-second-per-gpu", "throughput", "iteration-time"}
_SETTINGS = {"loss-scale", "batch-size", "world-size"}
_HIDDEN = {"time", "consumed samples", "skipped-train-samples", "mem-allocated-count"}


def chart_of(tag: str) -> tuple[str, str]:
    """Return the title and the unit of the chart that shows a tag."""
    for title, unit, tags in _KNOWN:
        if tag in tags:
            return title, unit
    if tag.endswith("-time"):
        return "Time of an iteration", "s"
    if tag.startswith("expert-load/"):
        return "Expert load", "relative to an even share"
    base = split_held_out(tag.removesuffix(" ppl"))[0]
    base = base.replace("-", " ").replace("lm loss", "LM loss")
    title = base[0].upper() + base[1:] if base else tag
    return (f"{title}, perplexity" if tag.endswith(" ppl") else title), ""


def reduce_curve(curve: Curve, bins: int) -> dict[str, list[Any]]:
    """Reduce a curve to at most `3 * bins` values without losing extreme values.

    Returns:
        Iterations `x` and values `y`, rounded to six significant digits. Values that are not finite
        are `None`, and `bad`, if there are any, lists their iterations. A curve of more than
        `3 * bins` values is split into intervals of equal length: `x` holds the first iteration in
        each that has any, `y` the means of their finite values, `low` and `high` the extremes, and
        `bad` the first iterations of intervals with a value that is not finite.
    """
    x, y = np.frombuffer(curve.iterations, np.int64), np.frombuffer(curve.values, np.float64)
    finite = np.isfinite(y)
    if len(x) <= 3 * bins:  # each interval would take three numbers
        reduced = {"x": x.tolist(), "y": _rounded(y)}
        if not finite.all():
            reduced["bad"] = x[~finite].tolist()
        return reduced
    span = int(x[-1] - x[0]) + 1
    index = (x - x[0]) * bins // span
    _, starts = np.unique(index, return_index=True)
    count = np.add.reduceat(finite.astype(np.int64), starts)
    with np.errstate(all="ignore"):
        # An interval without a finite value has the mean 0 / 0.
        mean = np.add.reduceat(np.where(finite, y, 0.0), starts) / count
    reduced = {
        "x": x[starts].tolist(),
        "y": _rounded(mean),
        "low": _rounded(np.minimum.reduceat(np.where(finite, y, np.inf), starts)),
        "high": _rounded(np.maximum.reduceat(np.where(finite, y, -np.inf), starts)),
    }
    if not finite.all():
        reduced["bad"] = x[starts][np.add.reduceat((~finite).astype(np.int64), starts) > 0].tolist()
    return reduced


def _rounded(values: NDArray[np.float64]) -> list[float | None]:
    """Return the values with six significant digits, and `None` where they are not finite."""
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values.tolist()]


def make_charts(histories: Sequence[History]) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Return the charts of a report, and the values of settings that never change.

    Returns:
        Charts, each with a title, a unit and curves that name their run and tag, those of losses
        first; and, without a chart, the values of the tags "loss-scale", "batch-size" and
        "world-size" that are the same in all iterations of all runs.
    """
    tags = list(dict.fromkeys(tag for history in histories for tag in history.curves))
    tags = [tag for tag in tags if tag not in _HIDDEN]
    curves_by_tag = {tag: [history.curves.get(tag) for history in histories] for tag in tags}
    constants = {
        tag: curves[0].values[0]
        for tag, curves in curves_by_tag.items()
        if tag in _SETTINGS
        and curves[0] is not None
        and math.isfinite(curves[0].values[0])
        and len({value for curve in curves if curve for value in curve.values}) == 1
    }
    count = sum(curve is not None for curves in curves_by_tag.values() for curve in curves)
    bins = min(_BINS[1], max(_BINS[0], _POINTS // (3 * max(1, count))))
    charts: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for tag, curves in curves_by_tag.items():
        for index, curve in enumerate(curves):
            if curve is not None and tag not in constants:
                reduced = {"run": index, "tag": tag, **reduce_curve(curve, bins)}
                reduced["smooth"] = ("loss" in tag or tag in _NOISY) and tag not in _SETTINGS
                charts.setdefault(chart_of(tag), []).append(reduced)
    ranks = {title: rank for rank, (title, *_) in enumerate(_KNOWN)}

    def position(chart: tuple[str, str]) -> tuple[bool, int]:
        return "loss" not in chart[0], ranks.get(chart[0], len(ranks))

    return [
        {"title": title, "unit": unit, "curves": charts[title, unit]}
        for title, unit in sorted(charts, key=position)
    ], constants
