"""What the watchdog decides, step by step, while its threads and its clock stand still."""

from __future__ import annotations

import json
import os
import subprocess
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.parallel.journal import Journal, Transfer
from megatron.processes import watchdog
from megatron.processes.hang_files import REPORT, HangFiles
from megatron.processes.launch import Launch
from megatron.processes.watchdog import Verdict, Watchdog


class _LaggingJournal(Journal):
    """The journal of a process whose device never finishes its work."""

    @property
    def device_is_behind(self) -> bool:
        """Always true."""
        return True


class EndedError(Exception):
    """Raised in place of the end of this process."""


class Still(Watchdog):
    """A watchdog whose threads have ended, whose clock stands still, and which records its calls.

    Attributes:
        calls: The deadlines, delays and ends.
    """

    def __init__(self, launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
        """Stop the thread, and stop the clock at 100 s."""
        super().__init__(launch, 9.0)
        self.stop()
        self.calls: list[object] = []
        clock = SimpleNamespace(monotonic=lambda: 100.0, sleep=self._sleep)
        monkeypatch.setattr(watchdog, "time", clock)
        self._last_answer = self._since = 100.0

    def _sleep(self, seconds: float) -> None:
        self.calls.append(("sleep", seconds))

    def end_within(self, seconds: float, code: int, text: str | None) -> None:
        """Record the deadline."""
        self.calls.append(("deadline", seconds, code, text))

    def delay_exit(self) -> None:
        """Record the delay."""
        self.calls.append("delay")

    def _exit(self, code: int, text: str | None = None) -> None:
        self.calls.append(("exit", code, text))
        raise EndedError


@pytest.mark.parametrize(
    ("changes", "is_same"),
    [
        ({"rank": 0, "reason": "it was killed"}, True),
        ({"code": 5}, False),
        ({"iteration": 4}, False),
        ({"missing": "rank 3"}, False),
    ],
)
def test_a_failure_is_the_same_whoever_saw_it(changes: dict[str, Any], is_same: bool) -> None:
    first = Verdict(1, 1, "a connection broke", 3, "rank 2")
    assert first.is_same_failure(replace(first, **changes)) == is_same
    assert Verdict(1, 1, "a connection broke") == Verdict(1, 1, "a connection broke", 0, "")


@pytest.mark.parametrize(("blames_peer", "silences"), [(False, 1), (True, 2)])
def test_an_error_has_time_for_a_heartbeat_or_two_that_are_missed(
    blames_peer: bool, silences: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    dog = Still(Launch(0, 2), monkeypatch)
    dog._last_answer = 0.0
    verdict = Verdict(6, 0, "a damaged sample")
    assert dog.end_run(6, lambda gone: "a damaged sample", blames_peer=blames_peer) == (
        verdict,
        True,
    )
    seconds = silences * watchdog._SILENCE + watchdog.GRACE
    assert dog.calls == [("deadline", seconds, 6, "[rank 0] error: a damaged sample")]


@pytest.mark.parametrize(
    ("time_left", "is_hanging", "silence", "ends"),
    [
        (0.0, False, 0.0, True),
        (0.1, False, 0.0, False),
        (0.1, True, 0.0, False),
        (0.1, False, 1.5, False),
        (0.1, True, 1.0, False),  # the longest time that a store may take
        (0.1, True, 1.5, True),
        (None, True, 1.5, False),
    ],
)
def test_a_process_ends_at_its_deadline_or_when_nobody_can_explain_its_hang(
    time_left: float | None,
    is_hanging: bool,
    silence: float,
    ends: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dog = Still(Launch(0, 2), monkeypatch)
    if time_left is not None:
        dog._deadline = watchdog._Deadline(100.0 + time_left, 7, "late")
    dog._is_hanging, dog._last_answer = is_hanging, 100.0 - silence * watchdog.GRACE
    with pytest.raises(EndedError) if ends else nullcontext():
        dog._check_time()
    assert dog.calls == [("exit", 7, "late")] * ends


@pytest.mark.parametrize(
    ("waited", "waits", "silence", "patience"),
    [
        (9.0, "collective", 0.0, watchdog._PATIENCE),
        (9.0, "device", 0.0, watchdog._PATIENCE),
        (9.0, "", 50.0, 0.0),
        (9.0, "collective", 50.0, 0.0),
        (8.9, "collective", 0.0, None),
        (9.0, "", 0.0, None),
        (9.0, "progress", 0.0, None),
        (9.0, "deadline", 0.0, None),
    ],
)
def test_a_wait_of_the_maximum_time_is_a_hang(
    waited: float,
    waits: str,
    silence: float,
    patience: float | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dog = Still(Launch(0, 2), monkeypatch)
    dog._journal = journal = _LaggingJournal() if waits == "device" else Journal()
    if waits in ("collective", "progress", "deadline"):
        journal.begin_wait(Transfer(journal, "all-reduce", (0, 1), 1, None))
    dog._progress, dog._since = journal.progress, 100.0 - waited
    dog._last_answer -= silence
    if waits == "progress":
        journal.enter("another operation")
    if waits == "deadline":
        dog._deadline = watchdog._Deadline(1000.0, 7, "late")
    dog._wake.clear()
    dog._check_time()
    assert dog._is_hanging == dog._wake.is_set() == (patience is not None)
    report = dog._local_report()
    expected = [] if patience is None else [("deadline", patience, 5, t) for t in (None, report)]
    assert dog.calls == expected
    kept = waits in ("collective", "deadline") or patience is not None
    assert dog._since == (100.0 - waited if kept else 100.0)


@pytest.mark.parametrize(
    ("rank", "code", "ends"), [(1, 5, True), (1, 6, False), (0, 5, False), (0, 6, False)]
)
def test_a_hang_that_another_process_announced_ends_this_one(
    rank: int, code: int, ends: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """After other errors, the process can end by itself until a deadline."""
    dog = Still(Launch(0, 2), monkeypatch)
    dog._files = HangFiles(tmp_path, 0)
    assert not dog._has_verdict()
    dog._store.set("verdict", f'{{"code": {code}, "rank": {rank}, "reason": "why"}}')
    with pytest.raises(EndedError) if ends else nullcontext():
        assert dog._has_verdict()
    assert dog._decided.is_set()
    text = "[rank 0] exits: rank 1 ended the run: why" if rank else None
    expected = [("deadline", watchdog.GRACE, code, text)]
    assert dog.calls == expected + ["delay", ("exit", code, text)] * ends
    assert len(list(tmp_path.iterdir())) == ends
    if not ends:
        assert dog._has_verdict()  # the verdict is not read again
        assert dog.calls == expected


@pytest.mark.parametrize("others", [0, 1])
def test_one_process_explains_a_hang_and_ends(
    others: int,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    dog = Still(Launch(0, 2), monkeypatch)
    dog._files = HangFiles(tmp_path, 0)
    dog._poll_states = lambda: ({0: dog._state(), 1: None}, frozenset({1}))  # type: ignore[method-assign]
    dog._store.add("alarms", others)
    with nullcontext() if others else pytest.raises(EndedError):
        dog._explain_hang()
    said = capsys.readouterr().err
    assert said.startswith("error: hang: rank 1 made no progress") == (not others)
    assert dog.calls == [] if others else [("sleep", watchdog._LINGER), ("exit", 5, None)]
    if not others:
        stacks = json.loads((tmp_path / "rank_00000.json").read_text())
        assert f"error: {stacks['reason']}" == said.splitlines()[0]
        assert (tmp_path / REPORT).exists()


def test_a_process_that_misses_another_ends_unless_there_is_a_verdict(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    dog = Still(Launch(0, 2), monkeypatch)
    dog._explain_loss(frozenset())
    assert not dog._store.check(["verdict"])
    with pytest.raises(EndedError):
        dog._explain_loss(frozenset({1}))
    assert dog.calls == [("sleep", watchdog._LINGER), ("exit", 1, None)]
    reason = "rank 1 ended without reporting an error, in iteration 0, start-up"
    assert capsys.readouterr().err == f"[rank 0] error: {reason}: {watchdog.LOST}\n"
    verdict = json.loads(dog._store.get("verdict"))
    assert (verdict["code"], verdict["reason"], verdict["missing"]) == (1, reason, "rank 1")
    dog._explain_loss(frozenset({1}))  # now there is one
    assert len(dog.calls) == 2


def test_processes_that_end_within_a_moment_are_named_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dog = Still(Launch(0, 4, 0, 4), monkeypatch)
    seen = iter([set(), {2}, {2, 3}, {2, 3}, {0}])
    dog._ended_on_this_machine = lambda: frozenset(next(seen))  # type: ignore[method-assign]
    states, silent = dog._poll_states()
    assert silent == {2, 3}
    assert next(seen) == {0}  # the rest has not been asked for
    assert states == {0: dog._state(), 1: None, 2: None, 3: None}


def test_a_process_that_has_not_told_its_id_has_not_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    dog = Still(Launch(1, 3, 1, 3), monkeypatch)
    dog._store.set_timeout(timedelta(seconds=0.1))  # of reading what is not there
    namespace = os.readlink("/proc/self/ns/pid")
    with subprocess.Popen(["true"]) as process:
        pass
    for rank in (1, 2):  # what this process itself has told does not matter
        dog._store.set(f"process/{rank}", f"{process.pid} {namespace}")
    assert dog._ended_on_this_machine() == {2}
