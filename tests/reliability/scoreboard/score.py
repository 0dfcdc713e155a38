"""A row of the scoreboard: a promise that is tried a number of times."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.distributed import freeze_inherited, start_method

# The name of a trial, and a function that runs it and returns notes.
Attempt = tuple[str, Callable[[], Iterable[str]]]


@dataclass
class Trials:
    """Results of the trials of one promise.

    Attributes:
        seeds: The seeds of the random choices, in words.
        passed, tried: The counts so far.
        failures: What went wrong, in words.
        worst: The duration of the longest trial in seconds.
        notes: What else is worth reporting, with how often it was noted.
    """

    seeds: str = "nothing is random"
    passed: int = 0
    tried: int = 0
    failures: list[str] = field(default_factory=list)
    worst: float = 0.0
    notes: dict[str, int] = field(default_factory=dict)

    @classmethod
    def with_seeds(cls, count: int) -> Trials:
        """Return results of trials whose seeds are 0, 1, 2 and so on."""
        return cls(f"seeds 0 to {count - 1}" if count > 1 else "seed 0")

    @contextmanager
    def trial(self, name: str) -> Iterator[None]:
        """Run a trial. It fails if the block raises an exception, which is noted and suppressed."""
        self.tried += 1
        started = time.perf_counter()
        try:
            yield
        except Exception as error:
            text = f"{type(error).__name__}: {error}" if str(error) else repr(error)
            self.failures.append(f"{name}: {text}")
        else:
            self.passed += 1
        self.worst = max(self.worst, time.perf_counter() - started)

    def note(self, text: str, count: int = 1) -> None:
        """Count something that the table reports in addition to the result."""
        self.notes[text] = self.notes.get(text, 0) + count

    def side_by_side(self, attempts: Sequence[Attempt], workers: int) -> None:
        """Make attempts in several forked processes at a time.

        This suits attempts that mostly wait. Each worker takes the next attempt when it is free.

        Raises:
            EOFError: A worker died.
        """
        context = start_method()
        next_index = context.Value("i", 0)
        workers_started = []
        for _ in range(min(workers, len(attempts))):
            receiver, sender = context.Pipe(duplex=False)
            worker = context.Process(target=_work, args=(attempts, next_index, sender))
            worker.start()
            sender.close()
            workers_started.append((worker, receiver))
        for worker, receiver in workers_started:
            self._add(receiver.recv())
            worker.join()

    def _add(self, other: Trials) -> None:
        self.passed += other.passed
        self.tried += other.tried
        self.failures += other.failures
        self.worst = max(self.worst, other.worst)
        for text, count in other.notes.items():
            self.note(text, count)


def _work(attempts: Sequence[Attempt], next_index: Any, sender: Connection) -> None:
    freeze_inherited()
    trials = Trials()
    while True:
        with next_index.get_lock():
            index = next_index.value
            next_index.value += 1
        if index >= len(attempts):
            break
        name, attempt = attempts[index]
        notes: list[str] = []
        with trials.trial(name):
            notes += attempt()
        for note in notes:
            trials.note(note)
    sender.send(trials)


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        number: The number in the list of promises, `docs/reliability.md`.
        what: What is done, and what must hold, in one sentence each.
        run: Tries it in an empty folder, about as many times as asked.
        full: How often the command tries.
        quick: How often the tests try.
        gpus: The number of GPUs that it needs.
    """

    number: int
    what: str
    run: Callable[[Path, int], Trials]
    full: int
    quick: int
    gpus: int = 0


def expect(condition: object, text: str) -> None:
    """Raise AssertionError with this text, even if Python omits `assert`; the table shows it."""
    if not condition:
        raise AssertionError(text)


@contextmanager
def within(seconds: int) -> Iterator[None]:
    """Interrupt the block if it takes longer than this.

    Raises:
        AssertionError: It took longer, even if the block itself caught the interruption.
    """

    def interrupt(*_: object) -> None:
        raise AssertionError(f"more than {seconds} s")

    previous = signal.signal(signal.SIGALRM, interrupt)
    started = time.monotonic()
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)
    expect(time.monotonic() - started < seconds, f"more than {seconds} s")
