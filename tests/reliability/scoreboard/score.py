"""A row of the scoreboard: a promise that is tried a number of times."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Trials:
    """Counts of the trials of one promise.

    Attributes:
        passed, tried: so far.
        failures: what went wrong, in words.
        worst: seconds of the longest trial.
        notes: what else is worth telling, with how often it was noted.
    """

    passed: int = 0
    tried: int = 0
    failures: list[str] = field(default_factory=list)
    worst: float = 0.0
    notes: dict[str, int] = field(default_factory=dict)

    @contextmanager
    def trial(self, name: str) -> Iterator[None]:
        """One trial: it fails with an exception inside, which is noted and goes no further."""
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
        """Count something that the table tells beside the result."""
        self.notes[text] = self.notes.get(text, 0) + count


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        number: in the list of promises, `docs/reliability.md`.
        what: what is done, and what must hold, in one sentence each.
        run: tries it in an empty folder, about so many times as asked.
        full: how often the command tries.
        quick: how often the tests try.
    """

    number: int
    what: str
    run: Callable[[Path, int], Trials]
    full: int
    quick: int


def expect(condition: object, text: str) -> None:
    """Raise AssertionError with a text, also if Python leaves `assert` out; the table shows it."""
    if not condition:
        raise AssertionError(text)
