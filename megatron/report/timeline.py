"""The timeline of one iteration, from the traces of `--profile`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from megatron.report.history import MALFORMED

_PATTERNS = tuple("*/" * depth + "*.pt.trace.json" for depth in range(4))
_NAME = re.compile(r"rank(\d+)\.(\d+)\.pt\.trace\.json")
_MAX_BYTES = 256 << 20  # limit for all traces; parsing takes about ten times as much memory
_MAX_RANKS = 16
_MAX_SPANS = 1500  # limit for the page; the shortest spans are omitted
_LATEST = 1e26  # nanoseconds
_ITERATION = re.compile(r"iteration (\d+)")
_MESSAGES = ("gloo:", "nccl:")

Span = tuple[float, float, str]  # start and duration in ms, and name


def find_timelines(folder: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the timelines of a run's ranks from their traces of the latest profiled iteration.

    Args:
        folder: The folder of the run.

    Returns:
        The timelines of up to 16 ranks; and a line for each trace that is too large, damaged or
        without an iteration, and for the traces of further ranks. A timeline is a dictionary with
        the `rank`, the last `iteration` in its trace, that iteration's duration `total`, and
        `rows`, each with a name and its longest spans (start, duration, title). Times are in ms
        from the earliest start among the ranks.
    """
    traces = [
        (int(match[1]), int(match[2]), path)
        for pattern in _PATTERNS
        for path in folder.glob(pattern)
        if (match := _NAME.fullmatch(path.name))
    ]
    newest = max((iteration for _, iteration, _ in traces), default=None)
    latest = {rank: path for rank, iteration, path in sorted(traces) if iteration == newest}
    timelines: list[dict[str, Any]] = []
    notes, size = [], 0
    for index, (rank, path) in enumerate(latest.items()):
        if len(timelines) == _MAX_RANKS:
            rest = len(latest) - index
            notes.append(
                f"{folder}: traces of {rest} more rank{'s' * (rest > 1)} not read: the limit is "
                f"{_MAX_RANKS} ranks"
            )
            break
        trace_size = path.stat().st_size
        if size + trace_size > _MAX_BYTES:
            notes.append(f"{path}: not read: the limit for all traces is {_MAX_BYTES >> 20} MiB")
            continue
        size += trace_size
        timeline = _read(rank, path)
        if timeline is None:
            notes.append(f"{path}: damaged, or without an iteration")
        else:
            timelines.append(timeline)
    origin = min((timeline["start"] for timeline in timelines), default=None)
    for timeline in timelines:
        shift = timeline.pop("start") - origin
        for row in timeline["rows"]:
            spans = sorted(row["spans"], key=lambda span: -span[1])
            longest = spans[: _MAX_SPANS // (len(timelines) * len(timeline["rows"]))]
            row["spans"] = sorted(
                (round(start + shift, 3), round(length, 3), name) for start, length, name in longest
            )
    return timelines, notes


def _read(rank: int, path: Path) -> dict[str, Any] | None:
    """Return the timeline of a trace's last iteration; `None` if it is damaged or has none."""
    try:
        trace = json.loads(path.read_bytes())
        base = _time(trace.get("baseTimeNanoseconds", 0)) / 1e6
        ranges: dict[str, list[Span]] = {}
        for event in trace["traceEvents"]:
            if event.get("ph") == "X" and event.get("cat") in ("user_annotation", "kernel"):
                span = (_time(event["ts"]) / 1e3, _time(event["dur"]) / 1e3, str(event["name"]))
                ranges.setdefault(event["cat"], []).append(span)
    except (OSError, *MALFORMED):
        return None
    host = sorted(ranges.get("user_annotation", []), key=lambda span: (span[0], -span[1]))
    whole = [span for span in host if _ITERATION.fullmatch(span[2])]
    if not whole:
        return None
    start, length, name = whole[-1]
    rows: list[dict[str, Any]] = []
    messages: list[Span] = []  # messages overlap other work and each other
    open_until: list[float] = []
    for begin, duration, title in host:
        if title == name or not start <= begin < start + length:
            continue
        if title.startswith(_MESSAGES):
            messages.append((begin - start, duration, title))
            continue
        while open_until and open_until[-1] <= begin:
            open_until.pop()
        while len(rows) <= len(open_until):
            rows.append({"name": "host" if not rows else "", "spans": []})
        rows[len(open_until)]["spans"].append((begin - start, duration, title))
        open_until.append(begin + duration)
    if messages:
        rows.append({"name": "messages", "spans": messages})
    busy = _merged([span for span in ranges.get("kernel", []) if start <= span[0] < start + length])
    if busy:
        spans = [(begin - start, duration, "kernels") for begin, duration in busy]
        rows.append({"name": "GPU", "spans": spans})
    number = _ITERATION.fullmatch(name)
    assert number
    return {
        "rank": rank,
        "iteration": int(number[1]),
        "start": base + start,
        "total": round(length, 3),
        "rows": rows,
    }


def _time(value: Any) -> float:
    """Return a time or a duration of a trace, in the unit in which the trace stores it.

    Raises:
        ValueError, TypeError, OverflowError: The value is negative, too large, or not a number.
    """
    time = float(value)
    if not 0 <= time < _LATEST:
        raise ValueError(f"time {time}")
    return time


def _merged(spans: list[Span]) -> list[tuple[float, float]]:
    """Return the intervals that are covered by at least one span."""
    merged: list[tuple[float, float]] = []
    for begin, duration, _ in sorted(spans):
        if merged and begin <= merged[-1][0] + merged[-1][1]:
            first = merged[-1][0]
            merged[-1] = (first, max(merged[-1][1], begin + duration - first))
        else:
            merged.append((begin, duration))
    return merged
