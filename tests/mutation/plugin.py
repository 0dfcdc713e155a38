"""Pytest plugin for mutation trials: records what tests execute, and sets their order.

A tree in which trials run has this file in its root, and pytest loads it with `-p`. Two environment
variables say what to do. `MUTATION_WATCH` names a file with the lines to watch; the tests are then
recorded, together with the processes that they start: forks keep the trace function, and new
interpreters begin with `sitecustomize.py`, which calls `watch`. `MUTATION_TESTS` names a file with
the tests to run, in order, each with its time limit.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
import threading
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

WATCH, TESTS = "MUTATION_WATCH", "MUTATION_TESTS"
PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
_Trace = Callable[[FrameType, str, Any], Any]


@cache
def recorder() -> Recorder | None:
    """Return this process's recorder, if the environment asks for one."""
    path = os.environ.get(WATCH)
    return Recorder(json.loads(Path(path).read_text(encoding="utf-8"))) if path else None


def watch() -> None:
    """Start recording in a new interpreter, if the environment asks for it.

    Pytest itself waits for the first test, because a trace function makes imports slow.
    """
    if "pytest" not in sys.orig_argv and (found := recorder()):
        found.start()


class Recorder:
    """Records what has been executed, in memory that all processes of a test share.

    A mark is a byte: 1 once a line of a mutation or any function of a file has been executed.
    """

    def __init__(self, work: dict[str, Any]) -> None:
        root = Path(__file__).resolve().parent
        with open(work["marks"], "r+b") as file:
            self._marks = mmap.mmap(file.fileno(), 0)
        self._files = {
            str(root / file): (mark, {int(line): marks for line, marks in lines.items()})
            for file, (mark, lines) in work["files"].items()
        }
        self._of_code: dict[tuple[str, int, str], tuple[int, ...]] = {}
        self._out = Path(work["out"])
        self._outcome, self._seconds = PASSED, 0.0

    def start(self) -> None:
        """Trace this thread and those that it starts."""
        threading.settrace(self._called)
        sys.settrace(self._called)

    def _called(self, frame: FrameType, _event: str, _argument: object) -> _Trace | None:
        """Trace a call if its function has unmarked lines."""
        code = frame.f_code
        watched = self._files.get(code.co_filename)
        if watched is None:
            return None
        mark, lines = watched
        if mark is not None:
            self._marks[mark] = 1
        key = code.co_filename, code.co_firstlineno, code.co_qualname
        marks = self._of_code.get(key)
        if marks is None:
            found = {one for *_, line in code.co_lines() for one in lines.get(line or 0, ())}
            marks = self._of_code[key] = tuple(found)
        return self._reached if any(not self._marks[one] for one in marks) else None

    def _reached(self, frame: FrameType, event: str, _argument: object) -> _Trace:
        if event == "line":
            for one in self._files[frame.f_code.co_filename][1].get(frame.f_lineno, ()):
                self._marks[one] = 1
        return self._reached

    def begin(self) -> None:
        """Clear the marks, because a test begins."""
        self._marks[:] = bytes(len(self._marks))
        self._outcome, self._seconds = PASSED, 0.0
        self.start()

    def add(self, report: pytest.TestReport) -> None:
        """Add the setup, call or teardown of a test."""
        self._seconds += report.duration
        if report.failed or (report.skipped and self._outcome == PASSED):
            self._outcome = FAILED if report.failed else SKIPPED

    def end(self, name: str) -> None:
        """Write what a test has executed as a line of JSON."""
        marks = [number for number, mark in enumerate(self._marks[:]) if mark]
        line = json.dumps([name, self._outcome, round(self._seconds, 3), marks])
        with self._out.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def pytest_runtest_logstart() -> None:
    if found := recorder():
        found.begin()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if found := recorder():
        found.add(report)


def pytest_runtest_logfinish(nodeid: str) -> None:
    if found := recorder():
        found.end(nodeid)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the requested tests in the requested order, and limit the time of each."""
    import pytest

    if not (path := os.environ.get(TESTS)):
        return
    limits: dict[str, float] = json.loads(Path(path).read_text(encoding="utf-8"))
    found = {item.nodeid: item for item in items}
    config.hook.pytest_deselected(items=[one for name, one in found.items() if name not in limits])
    items[:] = _limited(found, limits, pytest.mark.timeout)


def _limited(
    found: dict[str, pytest.Item], limits: dict[str, float], timeout: Callable[..., Any]
) -> Iterator[pytest.Item]:
    for name, limit in limits.items():
        if name in found:
            found[name].add_marker(timeout(limit), append=False)
            yield found[name]
