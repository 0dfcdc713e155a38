"""A callback that finds stragglers: ranks that are slower than others that do the same work."""

from __future__ import annotations

import platform
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from megatron.checkpoint.exchange import JsonExchange
from megatron.command import print_line
from megatron.parallel.collectives import all_gather
from megatron.parallel.layout import Layout
from megatron.processes.watchdog import ranks_text
from megatron.training.callbacks.base import Callback, EarlyExit
from megatron.training.callbacks.scalars import Scalars
from megatron.training.run import Run
from megatron.training.step import StepOutcome
from megatron.training.timers import SECTIONS, SectionClock

INTERVAL = 10  # updates between two comparisons, and in a window
_SHARE = 0.7  # a rank is slow if the others take less than this fraction of its time
_GROUP_SHARE = 0.4  # the same for a group's communication, which varies more with load
_IN_A_ROW = 3  # consecutive comparisons in which a rank must be slow to be named
_MIN_LOSS = 0.05  # fraction of an update; losing less time is not worth a warning
_BASELINE = 3  # comparisons whose median time is the baseline of a rank without peers
_SECTION_NAMES = {
    "compute": "the forward and backward passes",
    "loading": "loading data",
    "rest": "the optimizer step",
}


@dataclass(frozen=True)
class Straggler:
    """Ranks that have been slow in a section for a while.

    Attributes:
        ranks: One rank or, for communication, all ranks of a group.
        section: One of `SECTIONS`, or the name of an axis.
        seconds: The time in seconds that these ranks take per update.
        usual: The time in seconds that the others take or, if there are none, that the rank used to
            take.
    """

    ranks: tuple[int, ...]
    section: str
    seconds: float
    usual: float


class StragglerWatch:
    """A detector of ranks that are slow in several consecutive comparisons of all ranks' times.

    A rank's time is compared with the median over all ranks of its pipeline stage, which do the
    same work, or with the time of the other rank if a stage has two. A rank alone in its stage is
    compared with its own times in the first comparisons, multiplied by the factor by which the
    other ranks have slowed down since then.

    All ranks of a group wait equally long for a slow connection, and the last one to join a
    collective waits only for the connection. The shortest time in a group is therefore compared
    with the shortest times of the other groups of the same axis and stage.

    Args:
        stages: The pipeline stage of each rank.
        groups: For each axis, its groups of ranks.
    """

    def __init__(
        self, stages: Sequence[int], groups: Mapping[str, Sequence[tuple[int, ...]]]
    ) -> None:
        """Create the watch, with no comparison made yet."""
        self._stages, self._groups = stages, groups
        self._slow: dict[tuple[tuple[int, ...], str], int] = {}
        self._first: list[Mapping[str, Sequence[float]]] = []

    @classmethod
    def of(cls, layout: Layout, axes: Sequence[str]) -> StragglerWatch:
        """Return the watch for a run with this layout.

        Args:
            layout: The grid of processes as this process sees it.
            axes: The names of the axes whose groups are compared.
        """
        grid = [layout.as_seen_by(rank) for rank in layout.world.ranks]
        groups = {
            name: list(dict.fromkeys(getattr(rank_layout, name).ranks for rank_layout in grid))
            for name in axes
        }
        return cls([rank_layout.pipeline.rank for rank_layout in grid], groups)

    def compare(self, times: Mapping[str, Sequence[float]]) -> tuple[list[Straggler], list[str]]:
        """Compare the times of all ranks in one window.

        Args:
            times: The seconds of every rank, keyed by section, by axis, and by "update" for the
                whole update.

        Returns:
            The stragglers found now, and descriptions of those that are no longer slow.
        """
        min_loss = _MIN_LOSS * statistics.median(times["update"])
        slow = {}
        for section, ranks, seconds, usual in self._pairs(times):
            share = _SHARE if section in SECTIONS else _GROUP_SHARE
            if seconds > usual / share and seconds - usual > min_loss:
                slow[ranks, section] = Straggler(ranks, section, seconds, usual)
        if len(self._first) < _BASELINE:
            self._first.append(times)
        recovered = [
            key for key, count in self._slow.items() if count >= _IN_A_ROW and key not in slow
        ]
        self._slow = {key: self._slow.get(key, 0) + 1 for key in slow}
        new = [slow[key] for key, count in self._slow.items() if count == _IN_A_ROW]
        return new, [f"{ranks_text(ranks)} in {_name(section)}" for ranks, section in recovered]

    def _pairs(
        self, times: Mapping[str, Sequence[float]]
    ) -> list[tuple[str, tuple[int, ...], float, float]]:
        """Return all comparisons: section or axis, ranks, their seconds and the usual seconds."""
        pairs: list[tuple[str, tuple[int, ...], float, float]] = []
        for section in SECTIONS:
            for rank, seconds in enumerate(times[section]):
                peers = [
                    peer
                    for peer, stage in zip(times[section], self._stages, strict=True)
                    if stage == self._stages[rank]
                ]
                usual = _usual(seconds, peers)
                if usual is None:
                    usual = self._expected_without_peers(times, section, rank)
                if usual is not None:
                    pairs.append((section, (rank,), seconds, usual))
        for axis, groups in self._groups.items():
            shortest = {ranks: min(times[axis][rank] for rank in ranks) for ranks in groups}
            for ranks, seconds in shortest.items():
                stage = self._stages[ranks[0]]
                peers = [shortest[peer] for peer in groups if self._stages[peer[0]] == stage]
                usual = _usual(seconds, peers)
                if usual is not None:
                    pairs.append((axis, ranks, seconds, usual))
        return pairs

    def _expected_without_peers(
        self, times: Mapping[str, Sequence[float]], section: str, rank: int
    ) -> float | None:
        """Return the time that a rank without peers should take, or `None` if it is not known.

        The time is the rank's median in the first comparisons, multiplied by the median slowdown of
        the other ranks since then.
        """
        if len(self._first) < _BASELINE or len(self._stages) == 1:
            return None
        baseline = [
            statistics.median(column)
            for column in zip(*(comparison[section] for comparison in self._first), strict=True)
        ]
        growth = [
            current / former
            for other_rank, (current, former) in enumerate(
                zip(times[section], baseline, strict=True)
            )
            if other_rank != rank and former > 0.0
        ]
        return baseline[rank] * statistics.median(growth) if growth else None


class Stragglers(Callback):
    """A callback that compares the ranks every `INTERVAL` updates (`--log-straggler`).

    At most 40 updates pass from the start of a slowdown to its report. The lower quartile of the
    times in a window is compared: other programs on a machine can delay any single update, but only
    a slow rank is slow in three quarters of them, and in three windows in a row.
    """

    def __init__(self, clock: SectionClock, scalars: Scalars) -> None:
        """Store the clock, and the callback that records events."""
        self._clock, self._scalars = clock, scalars
        self._window: deque[list[float]] = deque(maxlen=INTERVAL)
        self._times: dict[str, list[float]] = {}

    def on_start(self, run: Run) -> None:
        """Determine which ranks to compare, and gather their host names. Collective."""
        self._watch = StragglerWatch.of(run.layout, list(self._clock.axes))
        self._hosts = JsonExchange(run.layout.world).gather(platform.node())
        if run.layout.world.size == 1:
            print_line("  --log-straggler: there is only one rank, so nothing is compared")

    def after_step(self, run: Run, outcome: StepOutcome, early_exit: EarlyExit | None) -> None:
        """Read the clock, and compare the ranks or report their times if due. Collective."""
        self._window.append(self._clock.read())
        if run.progress.iteration % INTERVAL == 0 and len(self._window) == INTERVAL:
            self._compare(run)
        is_due = run.progress.iteration % run.config.logging.log_interval == 0
        if run.is_log_rank and self._times and is_due:
            print_line(times_line(self._times, run.config.logging.straggler_minmax_count))
            self._times = {}

    def _compare(self, run: Run) -> None:
        local_columns = zip(*self._window, strict=True)
        row = [sorted(column)[len(column) // 4] for column in local_columns]  # lower quartiles
        local_times = torch.tensor([row], dtype=torch.float64)
        columns = all_gather(local_times, run.layout.world).T.tolist()
        self._times = dict(zip(self._clock.columns, columns, strict=True))
        stragglers, recovered = self._watch.compare(self._times)
        for straggler in stragglers:
            description = self._describe(straggler)
            self._scalars.event(run, "straggler", description)
            if run.is_log_rank:
                print_line(f"WARNING: iteration {run.progress.iteration}: {description}")
        for recovered_text in recovered:
            if run.is_log_rank:
                print_line(f" no longer slow: {recovered_text}")

    def _describe(self, straggler: Straggler) -> str:
        hosts = ", ".join(dict.fromkeys(self._hosts[rank] for rank in straggler.ranks))
        times = (
            f"{1000 * straggler.seconds:.1f} ms per update instead of "
            f"{1000 * straggler.usual:.1f} ms"
        )
        return (
            f"slow: {ranks_text(straggler.ranks)} (on {hosts}) in {_name(straggler.section)}: "
            f"{times}, {straggler.seconds / straggler.usual:.1f} times as long"
        )


def _usual(seconds: float, peers: Sequence[float]) -> float | None:
    """Return the median time of all peers, or the time of the other peer if there are two."""
    others = list(peers)
    others.remove(seconds)
    return statistics.median(peers if len(others) > 1 else others) if others else None


def _name(section: str) -> str:
    return _SECTION_NAMES.get(section) or f"communication ({section.replace('_', ' ')} axis)"


def times_line(times: Mapping[str, Sequence[float]], count: int) -> str:
    """Return the log line with the slowest and the fastest ranks of each section.

    Args:
        times: The seconds of every rank by section.
        count: The number of ranks to name at either end.
    """
    parts = []
    for section in SECTIONS:
        ranked = sorted(enumerate(times[section]), key=lambda pair: -pair[1])
        slow, fast = (
            ", ".join(f"{1000 * seconds:.1f} (rank {rank})" for rank, seconds in selection)
            for selection in (ranked[:count], ranked[: -count - 1 : -1])
        )
        median = 1000 * statistics.median(times[section])
        parts.append(f"{section}: median {median:.1f}, slowest {slow}, fastest {fast}")
    return f" stragglers (ms) | {' | '.join(parts)} |"
