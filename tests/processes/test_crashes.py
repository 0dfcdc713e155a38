"""The log of a run's failures: what it keeps, and when it says that they repeat."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megatron.errors import CrashLoopError
from megatron.processes.crashes import CrashLog
from megatron.processes.watchdog import Verdict

_KILLED = Verdict(1, 0, "rank 1 ended", 7, "rank 1")


def test_a_loop_is_the_same_failure_of_the_last_two_attempts(tmp_path: Path) -> None:
    log = CrashLog(tmp_path)
    assert log.loop() is None
    for iteration, is_loop in ((3, False), (7, False), (8, False), (8, True), (9, False)):
        failure = replace(_KILLED, iteration=iteration)
        log.record(failure)
        assert log.loop() == (failure if is_loop else None)
    log.record(replace(_KILLED, iteration=9, reason="rank 1 was seen to end", rank=2))
    assert log.loop() == replace(_KILLED, iteration=9, reason="rank 1 was seen to end", rank=2)
    log.record(replace(_KILLED, code=CrashLoopError.exit_code))  # not a failure of its own
    assert log.loop() is not None
    log.clear()
    assert log.loop() is None


def test_the_file_keeps_the_latest_failures_and_can_be_read_by_people(tmp_path: Path) -> None:
    log = CrashLog(tmp_path)
    log.record(_KILLED)
    assert log.path == tmp_path / "crashes.json"
    assert log.path.read_text() == (
        '{\n "crashes": [\n  {\n   "code": 1,\n   "rank": 0,\n   "reason": "rank 1 ended",\n'
        '   "iteration": 7,\n   "missing": "rank 1"\n  }\n ],\n "skipped": []\n}\n'
    )
    for iteration in range(10, 31):
        log.record(replace(_KILLED, iteration=iteration))
    kept = [line for line in log.path.read_text().splitlines() if "iteration" in line]
    assert kept == [f'   "iteration": {iteration},' for iteration in range(11, 31)]


def test_an_iteration_is_skipped_once(tmp_path: Path) -> None:
    log = CrashLog(tmp_path)
    assert log.skipped == []
    for _ in range(2):
        log.record(_KILLED)
    assert log.skip(0)
    assert log.loop() is None  # the failures are forgotten
    assert not log.skip(0)
    assert not log.skip(-1)
    assert log.skip(6)
    log.record(_KILLED)
    log.clear()
    assert CrashLog(tmp_path).skipped == [0, 6]


def test_a_log_of_another_job_is_left_alone(tmp_path: Path) -> None:
    log = CrashLog(tmp_path)
    log.disown()
    log.record(_KILLED)
    assert not log.path.exists()
    log.clear()
    assert not log.path.exists()  # nothing to forget


@pytest.mark.parametrize("extra", [0, 1])
def test_a_file_of_more_than_a_mebibyte_counts_as_empty(extra: int, tmp_path: Path) -> None:
    log = CrashLog(tmp_path)
    for _ in range(2):
        log.record(_KILLED)
    text = log.path.read_bytes().rstrip().removesuffix(b"}")
    log.path.write_bytes(text.ljust(2**20 - 1 + extra) + b"}")
    assert log.loop() == (None if extra else _KILLED)


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"crashes": [{}], "skipped": []}', "[" * 10**5]
)
def test_a_damaged_file_counts_as_empty(content: str, tmp_path: Path) -> None:
    log = CrashLog(tmp_path)
    log.path.write_text(content)
    assert (log.loop(), log.skipped) == (None, [])
    log.record(_KILLED)
    log.record(_KILLED)
    assert log.loop() == _KILLED


def test_a_folder_that_cannot_be_written_does_not_matter(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    CrashLog(tmp_path / "file").record(_KILLED)
