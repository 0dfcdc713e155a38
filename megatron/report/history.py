"""What is known about a run: curves by tag, events, settings and the load of its experts."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_RESERVED = {"iteration", "consumed samples", "time", "event", "expert load", "end of training"}


class Curve:
    """The values of one scalar by iteration, in ascending order."""

    def __init__(self) -> None:
        """Create a curve without points."""
        self.iterations, self.values = array("q"), array("d")

    def add(self, iteration: int, value: float) -> None:
        """Add a point. Points at this and later iterations are dropped first.

        They come from before a restart, after which the run repeats those iterations.
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
        kind: A few words, such as "checkpoint".
        iteration: The iteration after which it happened.
        time: Seconds since 1970, or `None` if unknown.
        text: Details.
    """

    kind: str
    iteration: int
    time: float | None
    text: str = ""


@dataclass
class History:
    """What is known about a run.

    Attributes:
        name: The name to show.
        curves: The curve of each scalar, by TensorBoard tag.
        events: Events in the order in which they were recorded.
        settings: The value of each setting by its flag.
        changed: The settings that differ from their defaults.
        facts: Versions, layout, parameters and other facts, by name.
        expert_load: Each expert's tokens divided by an even share, by layer, at the last log line.
        sources: The files that were read.
        damaged: The number of damaged or incomplete records that were skipped.
    """

    name: str
    curves: dict[str, Curve] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    changed: frozenset[str] = frozenset()
    facts: dict[str, str] = field(default_factory=dict)
    expert_load: dict[str, list[float]] = field(default_factory=dict)
    sources: list[str] = field(default_factory=list)
    damaged: int = 0

    def point(self, tag: str, iteration: int, value: float) -> None:
        """Add a point to the curve of `tag`."""
        self.curves.setdefault(tag, Curve()).add(iteration, value)

    def add(self, record: Mapping[str, Any]) -> None:
        """Add a record of a `--metrics-jsonl` file.

        Raises:
            ValueError, KeyError, TypeError, OverflowError: This is not such a record. Nothing has
                been added.
        """
        iteration = int(record["iteration"])
        time = float(record["time"]) if "time" in record else None
        points = {tag: float(value) for tag, value in record.items() if tag not in _RESERVED}
        if time is not None:
            points["time"] = time
        if "consumed samples" in record:
            points["consumed samples"] = float(record["consumed samples"])
        load = {
            str(layer): [float(value) for value in loads]
            for layer, loads in record.get("expert load", {}).items()
        }
        for tag, value in points.items():
            self.point(tag, iteration, value)
        if load:
            self.expert_load = load
