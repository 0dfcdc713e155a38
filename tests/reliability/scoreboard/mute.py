"""Row 37: the launcher, which holds the store, freezes, and a rank is killed or stopped as well."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.distributed import start_method
from tests.launch import start_ranks
from tests.ports import free_port
from tests.reliability.processes import environment, module
from tests.reliability.scoreboard.score import Attempt, Trials, expect

_LIMIT = 2.0  # seconds that a rank may keep others waiting
_WHOLE_LIMIT = 10.0  # the same in new interpreters, which import more during their first update
_PROMISE = 10.0  # seconds after the limit by which every rank has ended
_START = 150.0  # seconds within which a rank reaches its first iteration, even on a busy machine
_WORKERS = 10  # concurrent jobs, which mostly wait
_WHOLE = 0.02  # the share of jobs whose ranks are new interpreters instead of forks
_PHASES = ("step", "start", "hang report", "end after an error", "end of the run", "save")
_LAYOUTS = (
    (),
    ("--tensor-model-parallel-size", "2"),
    ("--pipeline-model-parallel-size", "2"),
    ("--zero-stage", "3"),
    ("--DDP-impl", "torch"),
)


class _Job:
    """Ranks of the faulty toy and their launcher, of which only torchrun's store is left.

    Attributes:
        ranks: The ranks' processes.
        launcher: The process that holds the store.
        limit: The seconds that a rank may keep others waiting.
        struck: The `time.monotonic` time of the last signal.
        was_in_time: Whether a rank was running when the launcher froze.
    """

    def __init__(
        self, count: int, fault: str, folder: Path, *flags: str, is_new: bool, meets: bool
    ) -> None:
        """Start all of them.

        Args:
            count: The number of ranks.
            fault: The fault of `faulty_pretrain`.
            folder: The folder to which they write.
            flags: Flags for all ranks.
            is_new: Whether the ranks are new interpreters.
            meets: Whether ranks wait for each other before they connect.
        """
        port = free_port()
        ready = start_method().Event()
        self.launcher: BaseProcess = start_method().Process(target=_hold_store, args=(port, ready))
        self.launcher.start()
        expect(ready.wait(_START), "the launcher did not start")
        self._outputs = [folder / f"rank{rank}" for rank in range(count)]
        variables = {**environment(fault, folder / "fault"), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        if meets:
            variables["READY"] = str(folder)
        self.limit = _WHOLE_LIMIT if is_new else _LIMIT
        words = module("--distributed-timeout-minutes", f"{self.limit / 60:.4f}", *flags)
        self.ranks = start_ranks(
            words, variables, self._outputs, self._outputs, port=port, is_new=is_new
        )
        self.struck = time.monotonic()
        self.was_in_time = False
        self._stopped: set[int] = set()

    def output(self) -> str:
        """Return everything that the ranks have printed."""
        return "\n".join(path.read_text() for path in self._outputs if path.exists())

    @property
    def is_running(self) -> bool:
        """Return whether a rank that was not stopped is still running."""
        running = [rank for i, rank in enumerate(self.ranks) if i not in self._stopped]
        return any(rank.exitcode is None for rank in running)

    def freeze_launcher(self) -> None:
        """Stop the launcher, like a frozen machine."""
        self.was_in_time = self.is_running
        os.kill(self.launcher.pid or 0, signal.SIGSTOP)
        self.struck = time.monotonic()

    def strike(self, rank: int, number: signal.Signals) -> None:
        """Kill or stop a rank that has not ended."""
        if self.ranks[rank].exitcode is None:
            os.kill(self.ranks[rank].pid or 0, number)
            self.struck = time.monotonic()
            if number == signal.SIGSTOP:
                self._stopped.add(rank)

    def until(self, condition: Callable[[], object]) -> None:
        """Wait until a condition holds or all ranks have ended."""
        deadline = time.monotonic() + _START
        while not condition() and any(rank.exitcode is None for rank in self.ranks):
            expect(time.monotonic() < deadline, f"not at work: {self.output()[-500:]}")
            time.sleep(0.05)

    def codes(self, seconds: float) -> list[int]:
        """Return the exit codes of the ranks that were not stopped, in rank order.

        Raises:
            AssertionError: A rank has not ended this many seconds after the last signal.
        """
        running = [rank for i, rank in enumerate(self.ranks) if i not in self._stopped]
        for rank in running:
            rank.join(max(0.0, self.struck + seconds - time.monotonic()))
        hanging = [i for i, rank in enumerate(self.ranks) if rank in running and rank.is_alive()]
        expect(not hanging, f"ranks {hanging} hang {seconds:g} s later: {self.output()[-1000:]}")
        return [rank.exitcode or 0 for rank in running]

    def end(self) -> None:
        """Kill what is left of the job."""
        for process in (*self.ranks, self.launcher):
            process.kill()
            process.join()


def _hold_store(port: int, ready: Any) -> None:
    store = dist.TCPStore("localhost", port, is_master=True, wait_for_workers=False)
    ready.set()
    while store is not None:
        time.sleep(60)


@contextmanager
def _job(
    count: int, fault: str, folder: Path, *flags: str, is_new: bool, meets: bool
) -> Iterator[_Job]:
    """Start a job, and kill what is left of it when the block ends."""
    started = _Job(count, fault, folder, *flags, is_new=is_new, meets=meets)
    try:
        yield started
    finally:
        started.end()


@dataclass(frozen=True)
class _Attack:
    """An attack, drawn at random.

    Attributes:
        phase: What the ranks are doing when the launcher freezes.
        count: The number of ranks.
        flags: Their layout.
        victim: The rank that is struck.
        number: The signal for the victim, or `None` to freeze only the launcher.
        seconds: How long after the phase began the launcher freezes.
        apart: How long after that the victim is struck; negative if before it.
        is_whole: Whether the ranks are new interpreters.
    """

    phase: str
    count: int
    flags: tuple[str, ...]
    victim: int
    number: signal.Signals | None
    seconds: float
    apart: float
    is_whole: bool

    @classmethod
    def drawn(cls, phase: str, rng: random.Random) -> _Attack:
        """Draw an attack on this phase."""
        is_whole = rng.random() < _WHOLE
        count = 2 if is_whole else rng.choice((2, 2, 2, 4))
        kill, stop = signal.SIGKILL, signal.SIGSTOP
        numbers, longest = {
            "start": ((None, kill, stop), 6.0 if is_whole else 0.6),
            "step": ((kill, kill, stop), 0.5),
            "hang report": ((stop,), 12.0),
            "end after an error": ((None, None, kill, stop), 6.0),
            "end of the run": ((None, None, kill, stop), 1.0),
            "save": ((kill, stop), 0.5),
        }[phase]
        return cls(
            phase,
            count,
            rng.choice(_LAYOUTS),
            rng.randrange(count),
            rng.choice(numbers),
            rng.uniform(0.0, longest),
            rng.uniform(-0.3, 0.5),
            is_whole,
        )

    def run(self, folder: Path) -> list[str]:
        """Make the attack, earlier if the ranks ended before it, and return notes.

        Raises:
            AssertionError: A rank did not end in time, or none said why it ended.
        """
        for attempt in range(16):
            inner = folder / str(attempt)
            inner.mkdir(parents=True)
            share = 2**-attempt if attempt < 8 else 0  # finally, at the very start of the phase
            sooner = {"seconds": self.seconds * share, "apart": self.apart * share}
            if replace(self, **sooner).strikes(inner):
                return [self.phase, *(["whole programs"] if self.is_whole else [])]
        raise AssertionError("every time the ranks ended before the launcher froze")

    def strikes(self, folder: Path) -> bool:
        """Make the attack once, and return whether a rank was still running.

        Raises:
            AssertionError: A rank did not end in time, or none said why it ended.
        """
        fault = "none:0:0"
        if self.phase == "end after an error":  # a fault of a rank that is not struck
            fault = f"{('mistake', 'bug')[self.count // 4]}:{(self.victim + 1) % self.count}:2"
        endless = self.phase in ("step", "hang report", "save")
        endless |= self.phase == "start" and self.number is not None
        flags = [*self.flags, "--train-iters", "1000000" if endless else "3"]
        if self.phase in ("save", "end of the run"):
            flags += ["--save", str(folder / "checkpoints"), "--save-interval", "1"]
            flags += ["--keep-latest", "2", *(["--async-save"] if self.victim % 2 else [])]
        is_start, is_new = self.phase == "start", self.is_whole
        slow = _START if is_new else 5.0
        with _job(self.count, fault, folder, *flags, is_new=is_new, meets=not is_start) as started:
            if self.phase == "end after an error":
                started.until((folder / "fault").exists)
            elif not is_start:
                started.until(lambda: "iteration        1/" in started.output())
            self._strike(started)
            codes = started.codes(started.limit + _PROMISE + (slow if is_start else 0.0))
            text = started.output()
        codes = [code for code in codes if code != -signal.SIGKILL or self.number is None]
        expect(all(code >= 0 for code in codes), f"a rank crashed: {codes}: {text[-1000:]}")
        expect(not endless or all(codes), f"a rank ended well: {codes}: {text[-1000:]}")
        expect(not any(codes) or "error: " in text, f"no report: {codes}: {text[-1000:]}")
        return started.was_in_time

    def _strike(self, started: _Job) -> None:
        time.sleep(self.seconds if self.phase != "hang report" else 0.0)
        strikes: list[tuple[float, Callable[[], None]]] = [(0.0, started.freeze_launcher)]
        if self.number is not None:
            number = self.number
            apart = -self.seconds if self.phase == "hang report" else self.apart
            strikes.append((apart, lambda: started.strike(self.victim, number)))
        last = min(when for when, _ in strikes)
        for when, strike in sorted(strikes, key=lambda each: each[0]):
            time.sleep(when - last)
            strike()
            last = when


def mute_store(folder: Path, count: int) -> Trials:
    """Try row 37: freeze the launcher in each phase, and kill or stop a rank as well."""
    trials, rng = Trials("seed 37"), random.Random(37)
    attempts: list[Attempt] = []
    for number in range(count):
        attack = _Attack.drawn(_PHASES[number % len(_PHASES)], rng)
        attempts.append((f"{number}, {attack}", partial(attack.run, folder / str(number))))
    trials.side_by_side(attempts, _WORKERS)
    return trials
