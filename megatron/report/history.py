"""The history of a run: curves by tag, events, settings and the load of its experts."""

from __future__ import annotations

import json
import math
import re
from array import array
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# Errors that a damaged record can raise when it is parsed as JSON or passed to `History.add`.
MALFORMED = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)
_RESERVED = {"iteration", "consumed samples", "time", "event", "expert load", "end of training"}
_MAX_ITERATIONS = 1 << 48
# The suffix of the tag of a held-out loss; --multiple-validation-sets adds the name of a set.
_HELD_OUT = re.compile(r" (?:validation(?:-\S+)?|test)$")
_LONGEST_TEXT = 2000  # maximum number of characters of a setting or an event


def split_held_out(tag: str) -> tuple[str, str]:
    """Split a tag, such as "lm loss validation-wiki", into the loss and the held-out data.

    The data is empty if the tag is not that of an evaluation.
    """
    match = _HELD_OUT.search(tag)
    return (tag, "") if match is None else (tag[: match.start()], match[0].strip())


class Curve:
    """The values of one scalar by iteration, in ascending order."""

    def __init__(self) -> None:
        """Create a curve without points."""
        self.iterations, self.values = array("q"), array("d")

    def add(self, iteration: int, value: float) -> None:
        """Add a point, after dropping the points at this and later iterations.

        Those points were recorded before a restart, after which the run repeats their iterations.
        """
        self.cut(iteration)
        self.iterations.append(iteration)
        self.values.append(value)

    def cut(self, iteration: int) -> None:
        """Drop the points at `iteration` and after it."""
        if self.iterations and self.iterations[-1] >= iteration:
            end = bisect_left(self.iterations, iteration)
            del self.iterations[end:], self.values[end:]


@dataclass(frozen=True)
class Event:
    """Something that happened during a run.

    Attributes:
        kind: A short name, such as "checkpoint".
        iteration: The iteration after which it happened.
        time: Seconds since 1970, or `None` if unknown.
        text: Details, such as "1024 to 512" for a change of the loss scale, or "".
    """

    kind: str
    iteration: int
    time: float | None
    text: str = ""


@dataclass
class History:
    """The history of a run, reconstructed from its files.

    Attributes:
        name: The name to show.
        curves: The curve of each scalar, by TensorBoard tag.
        events: Events in the order in which they were recorded.
        settings: The value of each setting by its flag.
        changed: The settings that differ from their defaults.
        facts: Versions, layout, parameters and other facts, by name.
        iterations: The planned number of iterations; 0 if unknown.
        tokens_per_sample: The number of tokens in a sample; 0 if unknown.
        expert_load: Each expert's tokens divided by an even share, by layer, at the last log line.
        sources: The files that were read.
        timelines: The timeline of an iteration on each profiled rank (see `find_timelines`).
        notes: Remarks about the files for the reader of the report.
        damaged: The number of damaged records that were skipped.
        incomplete: Whether the last record is incomplete, because it is still being written or the
            run was interrupted while writing it.
    """

    name: str
    curves: dict[str, Curve] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    settings: dict[str, str] = field(default_factory=dict)
    changed: frozenset[str] = frozenset()
    facts: dict[str, str] = field(default_factory=dict)
    iterations: int = 0
    tokens_per_sample: int = 0
    expert_load: dict[str, list[float]] = field(default_factory=dict)
    sources: list[str] = field(default_factory=list)
    timelines: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    damaged: int = 0
    incomplete: bool = False

    def empty_copy(self) -> History:
        """Return an empty history of the same run, to read its records from the beginning."""
        return History(self.name, sources=self.sources, timelines=self.timelines, notes=self.notes)

    def add_point(self, tag: str, iteration: int, value: float) -> None:
        """Add a point to the curve of `tag`."""
        self.curves.setdefault(tag, Curve()).add(iteration, value)

    def add(self, record: Mapping[str, Any]) -> None:
        """Add a record of a `--metrics-jsonl` file.

        Raises:
            ValueError, KeyError, TypeError, AttributeError, OverflowError: This is not a valid
                record. Nothing has been added.
        """
        iteration = int(record["iteration"])
        if not 0 <= iteration < _MAX_ITERATIONS:
            raise ValueError(f"iteration {iteration}")
        time = float(record["time"]) if "time" in record else None
        time = time if time is not None and math.isfinite(time) else None
        if "event" in record:
            self._add_event(record, iteration, time)
            return
        points = {tag: float(value) for tag, value in record.items() if tag not in _RESERVED}
        if time is not None:
            points["time"] = time
        if "consumed samples" in record:
            points["consumed samples"] = float(record["consumed samples"])
        load = {
            str(layer): [float(value) for value in loads]
            for layer, loads in record.get("expert load", {}).items()
        }
        self._add_scalar_events(points, iteration, time)
        for tag, value in points.items():
            self.add_point(tag, iteration, value)
        if load and all(math.isfinite(value) for loads in load.values() for value in loads):
            self.expert_load = load
            shares = [share for shares in load.values() for share in shares]
            self.add_point("expert-load/busiest", iteration, max(shares, default=math.nan))
            self.add_point("expert-load/idlest", iteration, min(shares, default=math.nan))

    def _add_scalar_events(
        self, points: Mapping[str, float], iteration: int, time: float | None
    ) -> None:
        """Add the events that scalars reveal: evaluations and changes of the loss scale."""
        losses = {tag: value for tag, value in points.items() if split_held_out(tag)[1]}
        if losses:
            text = ", ".join(f"{tag} {value:.4f}" for tag, value in losses.items())
            self.events.append(Event("evaluation", iteration, time, text))
        scale, previous = points.get("loss-scale"), self.curves.get("loss-scale")
        if scale is not None and previous is not None and previous.values[-1] != scale:
            text = f"{previous.values[-1]:g} to {scale:g}"
            self.events.append(Event("loss scale", iteration, time, text))

    def _add_event(self, record: Mapping[str, Any], iteration: int, time: float | None) -> None:
        kind, text = str(record["event"]), str(record.get("text", ""))[:_LONGEST_TEXT]
        if kind == "start":
            settings = {
                str(flag): _setting_text(value) for flag, value in record["settings"].items()
            }
            changed = frozenset(map(str, record["changed"]))
            facts = {str(name): _setting_text(value) for name, value in record["facts"].items()}
            iterations, tokens = int(record["iterations"]), int(record["tokens_per_sample"])
            self.iterations, self.tokens_per_sample = iterations, tokens
            self.settings, self.changed, self.facts = settings, changed, facts
            last = self.last_iteration
            if iteration or self.events:
                kind = "resumed"
                text = f"repeats {last - iteration:,} iterations" if last > iteration else ""
            for tag in list(self.curves):
                self.curves[tag].cut(iteration + 1)
                if not self.curves[tag].iterations:
                    del self.curves[tag]
        self.events.append(Event(kind, iteration, time, text))

    @property
    def last_iteration(self) -> int:
        """The last iteration with a point; 0 if there are no points."""
        return max((curve.iterations[-1] for curve in self.curves.values()), default=0)

    @property
    def state(self) -> str:
        """A description of how the run ended, or "running, or interrupted"."""
        milestones = [
            event for event in self.events if event.kind in ("start", "resumed", "end", "failure")
        ]
        if not milestones or milestones[-1].kind in ("start", "resumed"):
            return "running, or interrupted"
        return f"{'ended' if milestones[-1].kind == 'end' else 'failed'}: {milestones[-1].text}"


def _setting_text(value: Any) -> str:
    """Return a setting's value as text, cut to `_LONGEST_TEXT` characters."""
    text = value if isinstance(value, str) else json.dumps(value)
    return text[:_LONGEST_TEXT]
