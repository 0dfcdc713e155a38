"""Why a run hangs, from what its processes say about themselves: a pure function."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

Ranks = tuple[int, ...]


@dataclass(frozen=True)
class Wait:
    """A communication that a process waits for: see `journal.Transfer`."""

    kind: str
    ranks: Ranks
    number: int | None


@dataclass(frozen=True)
class State:
    """What one process says.

    Attributes:
        beat: grows as long as the process lives.
        iteration: the update under way, from 1.
        operation: what it is doing, in words.
        place: how many operations it has been in.
        wait: the communication that it waits for.
        device_is_behind: it waits for its device, which may wait for a communication.
        started: communications started so far, by the ranks that take part.
        source: where in the source it stands.
    """

    beat: int
    iteration: int
    operation: str
    place: int
    wait: Wait | None
    device_is_behind: bool
    started: dict[Ranks, int]
    source: str

    @property
    def waits(self) -> bool:
        return self.wait is not None or self.device_is_behind

    def to_json(self) -> str:
        """JSON has no tuples as keys."""
        return json.dumps(asdict(self) | {"started": list(self.started.items())})

    @classmethod
    def from_json(cls, text: str | bytes) -> State:
        fields: dict[str, Any] = json.loads(text)
        wait = fields["wait"]
        fields["wait"] = wait and Wait(wait["kind"], tuple(wait["ranks"]), wait["number"])
        fields["started"] = {tuple(ranks): count for ranks, count in fields["started"]}
        return cls(**fields)


def explain(
    states: Mapping[int, State | None], silent: frozenset[int], seconds: float
) -> tuple[frozenset[int], str]:
    """Who did not come to what, and the report to print.

    Args:
        states: the last that each rank said; None of a rank that never spoke.
        silent: ranks that say nothing any more.
        seconds: the time that was allowed.
    """
    missed = {
        rank: absent
        for rank, state in states.items()
        if state is not None and rank not in silent and state.waits
        for absent in [_absent(state, rank, states, silent)]
    }
    missing = frozenset().union(*missed.values()) - missed.keys()
    awaited = [rank for rank in missed if missed[rank] & missing] or list(missed)
    first = min(awaited, key=lambda rank: _order(states[rank]), default=None)
    if not missing and first is not None:  # all wait: whoever went past the first that is not done
        missing = missed[first]
    missing = missing or silent
    lines = [_headline(missing, states[first] if first is not None else None, seconds)]
    lines += [f"  {line}" for line in _describe_all(states, silent)]
    lines.append(
        "  If nothing is broken but something takes long, allow it more by "
        "--distributed-timeout-minutes."
    )
    return missing, "\n".join(lines)


def _order(state: State | None) -> tuple[int, int]:
    """How far a rank has come; ranks of one pipeline stage count alike."""
    assert state is not None
    return state.iteration, state.place


def _absent(
    state: State, rank: int, states: Mapping[int, State | None], silent: frozenset[int]
) -> frozenset[int]:
    """Whom a waiting process waits for, as far as can be seen."""
    if state.wait is not None and state.wait.number is None:  # a message
        return frozenset(state.wait.ranks)
    if state.wait is not None:
        expected = {state.wait.ranks: state.wait.number or 0}
    else:  # its device waits, for something that the process has started
        expected = state.started
    absent = set()
    for ranks, number in expected.items():
        for other in set(ranks) - {rank}:
            theirs = states.get(other)
            if other in silent or theirs is None or theirs.started.get(ranks, 0) < number:
                absent.add(other)
    return frozenset(absent)


def _headline(missing: frozenset[int], waiting: State | None, seconds: float) -> str:
    limit = f"within {seconds:g} s (--distributed-timeout-minutes {seconds / 60:g})"
    if waiting is None:
        return f"hang: {ranks_text(missing)} did not get on {limit}"
    where = f"iteration {waiting.iteration}, {waiting.operation}"
    what = f"the {waiting.wait.kind}" if waiting.wait else "the communication"
    if not missing:
        return (
            f"hang in {where}: every rank has joined {what}, which did not end {limit}: "
            "look for a broken network or device"
        )
    return f"hang in {where}: {ranks_text(missing)} did not join {what} {limit}"


def _describe_all(states: Mapping[int, State | None], silent: frozenset[int]) -> list[str]:
    """A line for every set of ranks that say the same, those that do not wait first."""
    said = sorted(
        (state is not None and rank not in silent and state.waits, _describe(rank, state, silent))
        for rank, state in states.items()
    )
    texts: dict[str, list[int]] = {text: [] for _, text in said}
    for rank, state in sorted(states.items()):
        texts[_describe(rank, state, silent)].append(rank)
    return [f"{ranks_text(ranks)}: {text}" for text, ranks in texts.items()]


def _describe(rank: int, state: State | None, silent: frozenset[int]) -> str:
    if state is None:
        return "never said anything"
    where = f"iteration {state.iteration}, {state.operation}"
    if rank in silent:
        return f"no sign of life (stopped, killed, or cut off); was last seen in {where}"
    if state.wait is not None:
        others = ranks_text([other for other in state.wait.ranks if other != rank])
        return f"waits in {where}, for {state.wait.kind} with {others}, at {state.source}"
    if state.device_is_behind:
        return f"waits for its device in {where}, at {state.source}"
    return f"alive in {where}, at {state.source}"


def ranks_text(ranks: Sequence[int] | frozenset[int]) -> str:
    """ "rank 3", "ranks 0-2, 5"."""
    ordered = sorted(ranks)
    runs = []
    for _, members in groupby(enumerate(ordered), key=lambda pair: pair[1] - pair[0]):
        run = [rank for _, rank in members]
        runs.append(f"{run[0]}" if len(run) == 1 else f"{run[0]}-{run[-1]}")
    return f"rank{'s' if len(ordered) != 1 else ''} {', '.join(runs)}"
