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
_NEW_INTERPRETER_LIMIT = 10.0  # the same in new interpreters, whose first update imports more
_PROMISE = 10.0  # seconds after the limit by which every rank has ended
_START = 150.0  # seconds within which a rank reaches its first iteration, even on a busy machine
_WORKERS = 10  # concurrent jobs, which mostly wait
_NEW_INTERPRETER_SHARE = 0.02  # the share of jobs whose ranks are new interpreters instead of forks
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
        signal_time: The `time.monotonic` time of the last signal.
        was_in_time: Whether a rank was running when the launcher froze.
    """

    def __init__(
        self,
        count: int,
        fault: str,
        folder: Path,
        *flags: str,
        new_interpreter: bool,
        waits_for_all: bool,
    ) -> None:
        """Start all ranks.

        Args:
            count: The number of ranks.
            fault: The fault of `faulty_pretrain`.
            folder: The folder to which they write.
            flags: Flags for all ranks.
            new_interpreter: Whether the ranks are new interpreters.
            waits_for_all: Whether ranks wait for each other before they connect.
        """
        port = free_port()
        ready = start_method().Event()
        self.launcher: BaseProcess = start_method().Process(target=_hold_store, args=(port, ready))
        self.launcher.start()
        expect(ready.wait(_START), "the launcher did not start")
        self._outputs = [folder / f"rank{rank}" for rank in range(count)]
        variables = {**environment(fault, folder / "fault"), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        if waits_for_all:
            variables["READY"] = str(folder)
        self.limit = _NEW_INTERPRETER_LIMIT if new_interpreter else _LIMIT
        args = module("--distributed-timeout-minutes", f"{self.limit / 60:.4f}", *flags)
        self.ranks = start_ranks(
            args,
            variables,
            self._outputs,
            self._outputs,
            port=port,
            new_interpreter=new_interpreter,
        )
        self.signal_time = time.monotonic()
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
        self.signal_time = time.monotonic()

    def signal_rank(self, rank: int, signum: signal.Signals) -> None:
        """Kill or stop a rank that has not ended."""
        if self.ranks[rank].exitcode is None:
            os.kill(self.ranks[rank].pid or 0, signum)
            self.signal_time = time.monotonic()
            if signum == signal.SIGSTOP:
                self._stopped.add(rank)

    def wait_until(self, condition: Callable[[], object]) -> None:
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
            rank.join(max(0.0, self.signal_time + seconds - time.monotonic()))
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
    count: int, fault: str, folder: Path, *flags: str, new_interpreter: bool, waits_for_all: bool
) -> Iterator[_Job]:
    """Start a job, and kill what is left of it when the block ends."""
    job = _Job(
        count, fault, folder, *flags, new_interpreter=new_interpreter, waits_for_all=waits_for_all
    )
    try:
        yield job
    finally:
        job.end()


@dataclass(frozen=True)
class _Attack:
    """An attack, drawn at random.

    Attributes:
        phase: What the ranks are doing when the launcher freezes.
        count: The number of ranks.
        flags: Their layout.
        victim: The rank that gets a signal.
        signum: The signal for the victim, or `None` to freeze only the launcher.
        seconds: How long after the phase began the launcher freezes.
        victim_delay: How long after that the victim gets its signal; negative if before it.
        new_interpreters: Whether the ranks are new interpreters.
    """

    phase: str
    count: int
    flags: tuple[str, ...]
    victim: int
    signum: signal.Signals | None
    seconds: float
    victim_delay: float
    new_interpreters: bool

    @classmethod
    def draw(cls, phase: str, rng: random.Random) -> _Attack:
        """Draw an attack on this phase."""
        new_interpreters = rng.random() < _NEW_INTERPRETER_SHARE
        count = 2 if new_interpreters else rng.choice((2, 2, 2, 4))
        kill, stop = signal.SIGKILL, signal.SIGSTOP
        signals, max_seconds = {
            "start": ((None, kill, stop), 6.0 if new_interpreters else 0.6),
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
            rng.choice(signals),
            rng.uniform(0.0, max_seconds),
            rng.uniform(-0.3, 0.5),
            new_interpreters,
        )

    def run(self, folder: Path) -> list[str]:
        """Make the attack, earlier if the ranks ended before it, and return notes.

        Raises:
            AssertionError: A rank did not end in time, or none said why it ended.
        """
        for attempt in range(16):
            inner = folder / str(attempt)
            inner.mkdir(parents=True)
            fraction = 2**-attempt if attempt < 8 else 0  # finally, at the very start of the phase
            earlier = {
                "seconds": self.seconds * fraction,
                "victim_delay": self.victim_delay * fraction,
            }
            if replace(self, **earlier).run_once(inner):
                return [self.phase, *(["whole programs"] if self.new_interpreters else [])]
        raise AssertionError("every time the ranks ended before the launcher froze")

    def run_once(self, folder: Path) -> bool:
        """Make the attack once, and return whether a rank was still running.

        Raises:
            AssertionError: A rank did not end in time, or none said why it ended.
        """
        fault = "none:0:0"
        if self.phase == "end after an error":  # a fault of a rank other than the victim
            fault = f"{('mistake', 'bug')[self.count // 4]}:{(self.victim + 1) % self.count}:2"
        endless = self.phase in ("step", "hang report", "save")
        endless |= self.phase == "start" and self.signum is not None
        flags = [*self.flags, "--train-iters", "1000000" if endless else "3"]
        if self.phase in ("save", "end of the run"):
            flags += ["--save", str(folder / "checkpoints"), "--save-interval", "1"]
            flags += ["--keep-latest", "2", *(["--async-save"] if self.victim % 2 else [])]
        is_start, new_interpreter = self.phase == "start", self.new_interpreters
        startup_seconds = _START if new_interpreter else 5.0
        with _job(
            self.count,
            fault,
            folder,
            *flags,
            new_interpreter=new_interpreter,
            waits_for_all=not is_start,
        ) as job:
            if self.phase == "end after an error":
                job.wait_until((folder / "fault").exists)
            elif not is_start:
                job.wait_until(lambda: "iteration        1/" in job.output())
            self._send_signals(job)
            codes = job.codes(job.limit + _PROMISE + (startup_seconds if is_start else 0.0))
            text = job.output()
        codes = [code for code in codes if code != -signal.SIGKILL or self.signum is None]
        expect(all(code >= 0 for code in codes), f"a rank crashed: {codes}: {text[-1000:]}")
        expect(not endless or all(codes), f"a rank ended well: {codes}: {text[-1000:]}")
        expect(not any(codes) or "error: " in text, f"no report: {codes}: {text[-1000:]}")
        return job.was_in_time

    def _send_signals(self, job: _Job) -> None:
        time.sleep(self.seconds if self.phase != "hang report" else 0.0)
        actions: list[tuple[float, Callable[[], None]]] = [(0.0, job.freeze_launcher)]
        if self.signum is not None:
            signum = self.signum
            delay = -self.seconds if self.phase == "hang report" else self.victim_delay
            actions.append((delay, lambda: job.signal_rank(self.victim, signum)))
        elapsed = min(delay for delay, _ in actions)
        for delay, action in sorted(actions, key=lambda timed: timed[0]):
            time.sleep(delay - elapsed)
            action()
            elapsed = delay


def mute_store(folder: Path, count: int) -> Trials:
    """Try row 37: freeze the launcher in each phase, and kill or stop a rank as well."""
    trials, rng = Trials("seed 37"), random.Random(37)
    attempts: list[Attempt] = []
    for number in range(count):
        attack = _Attack.draw(_PHASES[number % len(_PHASES)], rng)
        attempts.append((f"{number}, {attack}", partial(attack.run, folder / str(number))))
    trials.side_by_side(attempts, _WORKERS)
    return trials
