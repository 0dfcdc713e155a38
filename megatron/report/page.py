"""The HTML page of a report. It loads nothing from other servers and escapes all text it shows."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import statistics
from collections import Counter
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from megatron.report.charts import make_charts, reduce_curve
from megatron.report.history import Curve, History

GENERATOR = '<meta name="generator" content="megatron report">'
_MAX_EVENTS = 500
_LAST_DATE = 8.64e12  # seconds since 1970; for later times, toISOString() fails
_CLOCK = 500  # points of the curves that convert iterations to samples and hours
# In JSON, these characters occur only in strings, where an escape has the same meaning.
_ESCAPES = {ord(character): f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"}


def page_data(histories: Sequence[History]) -> dict[str, Any]:
    """Return everything that the page shows, as plain data, with each run's last 500 events."""
    charts, constants = make_charts(histories)
    return {
        "runs": [_run_data(history) for history in histories],
        "charts": charts,
        "constants": constants,
    }


def _run_data(history: History) -> dict[str, Any]:
    time = history.curves.get("time")
    changed = [flag for flag in history.settings if flag in history.changed]
    return {
        "name": history.name,
        "state": history.state,
        "sources": history.sources,
        "notes": history.notes,
        "damaged": history.damaged + history.incomplete,
        "events": [
            {**vars(event), "time": _date(event.time)} for event in history.events[-_MAX_EVENTS:]
        ],
        "eventCounts": Counter(event.kind for event in history.events),
        "settings": history.settings,
        "changed": changed,
        "facts": history.facts,
        "expertLoad": history.expert_load,
        "timelines": history.timelines,
        "summary": summarize(history),
        "clock": _clock(history),
        "lastTime": _date(time.values[-1] if time is not None else None),
        "tokensPerSample": history.tokens_per_sample,
    }


def _date(time: float | None) -> float | None:
    """Return a time in seconds if JavaScript has a date for it, otherwise `None`."""
    return time if time is not None and abs(time) <= _LAST_DATE else None


def _clock(history: History) -> dict[str, Any]:
    """Return the consumed samples and the hours since the first record, by iteration."""
    hours = Curve()
    time = history.curves.get("time", Curve())
    for iteration, seconds in zip(time.iterations, time.values, strict=True):
        hours.add(iteration, (seconds - time.values[0]) / 3600.0)
    samples = history.curves.get("consumed samples", Curve())
    return {"hours": reduce_curve(hours, _CLOCK), "samples": reduce_curve(samples, _CLOCK)}


def summarize(history: History) -> list[tuple[str, str]]:
    """Return the key figures of a run as (name, text) pairs."""
    rows: list[tuple[str, str]] = []
    curves = history.curves
    total = f" of {history.iterations:,}" if history.iterations else ""
    rows.append(("state", history.state))
    rows.append(("iterations", f"{history.last_iteration:,}{total}"))
    for tag, curve in curves.items():
        finite = [value for value in curve.values if math.isfinite(value)]
        if not finite or "loss" not in tag or tag == "loss-scale" or tag.endswith(" ppl"):
            continue
        best = f" (lowest {min(finite):.4f})" if "validation" in tag else ""
        rows.append((tag, f"{finite[-1]:.4f}{best}"))
    if "tokens-per-second-per-gpu" in curves:
        rate = statistics.median(curves["tokens-per-second-per-gpu"].values)
        rows.append(("tokens/s per GPU", f"{rate:,.0f} (median)"))
    time = curves.get("time")
    if time is not None:
        rows.append(("time", f"{(time.values[-1] - time.values[0]) / 3600.0:,.2f} h"))
    return rows


def as_json(data: Any) -> str:
    """Return JSON that is safe inside a script element because it cannot end the element.

    Raises:
        ValueError: A number in `data` is not finite.
    """
    return json.dumps(data, separators=(",", ":"), allow_nan=False).translate(_ESCAPES)


def render(histories: Sequence[History], *, live: bool = False) -> str:
    """Return the HTML page of a report.

    Args:
        histories: The runs, in order.
        live: Whether the page asks its server for new data.
    """
    from jinja2 import Environment

    texts = {
        name.replace(".", "_"): _file(name)
        for name in ("report.css", "report.js", "uplot.css", "uplot.js")
    }
    server = "'self'" if live else "'none'"
    # The content security policy allows these inline scripts by their hashes.
    digests = (
        hashlib.sha256(texts[f"{name}_js"].encode()).digest() for name in ("uplot", "report")
    )
    hashes = " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
    return (
        Environment(autoescape=True)
        .from_string(_file("report.html"))
        .render(
            texts,
            title=" and ".join(history.name for history in histories) or "no runs yet",
            data=as_json(page_data(histories)),
            policy=f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; "
            f"img-src data:; connect-src {server}; base-uri 'none'; "
            "form-action 'none'",
            live=live,
        )
    )


def _file(name: str) -> str:
    return files("megatron.report").joinpath("page", name).read_text(encoding="utf-8")
