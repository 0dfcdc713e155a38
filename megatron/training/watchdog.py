"""Ends a run together: when a process hangs, when one fails, when one is gone.

Every process has two threads beside the one that trains. One talks: each second it publishes where
the process is, and looks whether somebody has ended the run. The other watches the time, and never
touches the network: it ends the process even if the first one is stuck in a connection that is cut.

Whoever first sees a reason to end the run says so to all (`Verdict`). Of a hang, that is the first
process that has waited for a communication longer than it may: it collects where the others are,
prints why the run hangs, and all leave with the same exit code, whatever their main thread waits
for.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

import torch.distributed as dist

from megatron.errors import HangError, say_on_stderr
from megatron.parallel.journal import Journal
from megatron.training.hang import State, Wait, explain

BEAT = 1.0  # seconds between two signs of life
_SILENCE = 3 * BEAT  # without one for so long, a process is taken for dead
_LINGER = 2 * BEAT  # from a verdict until its author leaves: the others read it meanwhile
# From an alarm until a process gives up on a verdict, for which others need 4 beats, and more on
# busy machines. All are to leave within 10 s.
_PATIENCE = _SILENCE + 5 * BEAT
_GRACE = 5.0  # from another's failure until a process that does not notice by itself is ended
_PACKAGE = Path(__file__).parents[1]
_PLUMBING = {"journal.py", "collectives.py", "layout.py", "exchange.py", "symmetric_memory.py"}


@dataclass(frozen=True)
class Verdict:
    """Why the run ends.

    Attributes:
        code: exit code of every process.
        rank: whose verdict; it has printed the whole story.
        reason: in one line.
    """

    code: int
    rank: int
    reason: str


class Watchdog:
    """Watches one process of a run, from construction to `stop`.

    Args:
        store: a connection of its own: one that another thread waits on answers nobody else.
        rank: this process.
        world_size: how many there are.
        machine: the ranks on this machine; the first prints why the run ends where a rank of
            another machine has told the whole story.
        journal: where this process is.
        seconds: how long a process may wait for another.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world_size: int,
        *,
        machine: range,
        journal: Journal,
        seconds: float,
    ) -> None:
        self._store, self._rank, self._world_size = store, rank, world_size
        self._machine, self._journal, self._seconds = machine, journal, seconds
        self._main = threading.get_ident()
        self._beat = 0
        self._alarm: float | None = None
        self._claim: Verdict | None = None  # of this process, to be told to the others
        self._verdict: Verdict | None = None
        self._known = threading.Event()  # there is a verdict
        self._wake = threading.Event()
        self._stopped = threading.Event()
        self._threads = [
            threading.Thread(target=target, name=target.__name__, daemon=True)
            for target in (self._talk, self._watch)
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """All went well, or is being cleared up: watch no longer."""
        self._stopped.set()
        self._wake.set()
        self._threads[0].join(timeout=BEAT)

    def verdict_within(self, seconds: float) -> Verdict | None:
        """The verdict, if one is known by then."""
        self._known.wait(seconds)
        return self._verdict

    def end_run(self, code: int, reason: str) -> Verdict:
        """This process fails: tell the others, unless one of them has ended the run before.

        Returns:
            The verdict that counts; this process's own also where nobody can be reached.
        """
        own = self._claim = Verdict(code, self._rank, reason)
        self._wake.set()
        return self.verdict_within(_SILENCE) or own

    def missing(self) -> frozenset[int]:
        """Ranks that give no sign of life; takes some seconds. None where nobody can be asked."""
        try:
            return self._survey()[1]
        except dist.DistError:
            return frozenset()

    def let_others_hear(self) -> None:
        """Rank 0 leaves last: the store may end with it or with its launcher."""
        if self._rank == 0:
            time.sleep(_LINGER)

    def _talk(self) -> None:
        try:
            while not self._stopped.is_set():
                self._say()
                self._hear()
                self._wake.wait(BEAT)
                self._wake.clear()
        except Exception:  # the store is gone, with the process that held it
            return  # `_watch` notices what needs noticing

    def _say(self) -> None:
        self._beat += 1
        self._store.set(f"state/{self._rank}", self._state().to_json())
        if self._claim is not None and self._verdict is None:
            self._judge(self._claim)
        elif self._alarm is not None and self._verdict is None:
            self._explain_hang()

    def _hear(self) -> None:
        if self._verdict is None and self._store.check(["verdict"]):
            self._verdict = Verdict(**json.loads(self._store.get("verdict")))
            self._known.set()
            if self._verdict.code == HangError.exit_code and self._verdict.rank != self._rank:
                self.let_others_hear()
                self._leave(self._verdict.code, self.farewell(self._verdict))

    def _judge(self, verdict: Verdict) -> bool:
        """Make it the verdict unless there is one; whether it is."""
        if self._store.add("verdicts", 1) > 1:
            return False
        self._store.set("verdict", json.dumps(asdict(verdict)))
        return True

    def _explain_hang(self) -> None:
        if self._store.add("alarms", 1) > 1:
            return
        states, silent = self._survey()
        missing, report = explain(states, silent, self._seconds)
        verdict = Verdict(HangError.exit_code, self._rank, report.splitlines()[0])
        if not self._judge(verdict):
            return
        say_on_stderr(f"error: {report}")
        time.sleep(_LINGER)
        self._leave(verdict.code)

    def _survey(self) -> tuple[dict[int, State | None], frozenset[int]]:
        """What every rank says, and which say nothing any more."""
        before = self._states()
        time.sleep(_SILENCE)
        states = self._states() | {self._rank: self._state()}
        silent = frozenset(
            rank
            for rank, state in states.items()
            if rank != self._rank and state == before[rank]  # the beat would differ
        )
        return states, silent

    def _states(self) -> dict[int, State | None]:
        keys = {rank: f"state/{rank}" for rank in range(self._world_size)}
        return {
            rank: State.from_json(self._store.get(key)) if self._store.check([key]) else None
            for rank, key in keys.items()
        }

    def _state(self) -> State:
        journal = self._journal
        place, transfer = journal.place, journal.waits_for
        return State(
            beat=self._beat,
            iteration=place.iteration,
            operation=str(place.operation),
            place=place.number,
            wait=Wait(transfer.kind, transfer.ranks, transfer.number) if transfer else None,
            device_is_behind=journal.device_is_behind,
            started=dict(journal.started),
            source=source_of(sys._current_frames().get(self._main)),
        )

    def _watch(self) -> None:
        progress, since, end = self._journal.progress, time.monotonic(), 0.0
        while not self._stopped.wait(BEAT / 4):
            now, before = time.monotonic(), progress
            progress = self._journal.progress
            if progress != before or not self._waits():
                since = now
            elif now - since >= self._seconds and self._alarm is None:
                self._alarm = now
                self._wake.set()
            if self._alarm is not None:
                self._give_up_after(now - self._alarm)
            if self._verdict is not None:
                end = end or now + _GRACE
                if now > end:
                    self._leave(self._verdict.code, self.farewell(self._verdict))

    def _waits(self) -> bool:
        return self._journal.waits_for is not None or self._journal.device_is_behind

    def _give_up_after(self, seconds: float) -> None:
        if seconds < _PATIENCE and self._threads[0].is_alive():
            return
        report = explain({self._rank: self._state()}, frozenset(), self._seconds)[1].splitlines()
        self._leave(
            HangError.exit_code,
            f"[rank {self._rank}] error: {report[0]}; the others cannot be asked, since the "
            "launcher's store does not answer: the network to the machine of rank 0 is cut, or the "
            f"run there has ended\n{report[1]}",
        )

    def farewell(self, verdict: Verdict) -> str | None:
        """Why this process leaves, where that must be said; None where it has been."""
        if verdict.rank in self._machine or self._rank != self._machine.start:
            return None
        return f"[rank {self._rank}] leaves: rank {verdict.rank} ended the run: {verdict.reason}"

    def _leave(self, code: int, text: str | None = None) -> None:
        """End the process, whatever its main thread waits for."""
        try:
            if text is not None:
                sys.stderr.write(text + "\n")
            sys.stderr.flush()
            sys.stdout.flush()
        finally:  # also where the disk of the log is full
            os._exit(code)


def source_of(frame: FrameType | None) -> str:
    """Where a thread stands: the innermost line of ours that is not about communication itself."""
    stack = traceback.extract_stack(frame) if frame is not None else []
    ours = [entry for entry in stack if Path(entry.filename).is_relative_to(_PACKAGE)]
    ours = [entry for entry in ours if Path(entry.filename).name not in _PLUMBING] or stack
    if not ours:
        return "an unknown place"
    lines = [f"{Path(ours[-1].filename).name}:{ours[-1].lineno} in {ours[-1].name}"]
    if ours[-1] is not stack[-1] and Path(stack[-1].filename).name not in _PLUMBING:
        lines.append(f"{Path(stack[-1].filename).name}:{stack[-1].lineno} in {stack[-1].name}")
    return ", ".join(lines)
