"""The view of a hang: written by the processes, shown by a command."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.cli import health
from megatron.processes.hang_files import REPORT, HangFiles, hang_view
from megatron.processes.watchdog import State, Wait

_DATA = (0, 1, 2)


def _state(iteration: int, wait: Wait | None, started: int) -> State:
    text = "reduction of the gradients" if wait else "loading of micro-batch 0"
    return State(9, iteration, text, 20, wait, False, {_DATA: started}, "step.py:7 in make")


def _write(folder: Path) -> str:
    """Let rank 1 load data, rank 2 be stopped and rank 0 wait for both; all but 2 write stacks."""
    waits = Wait("all-reduce", _DATA, 4)
    states = {0: _state(5, waits, 4), 1: _state(5, None, 3), 2: _state(4, waits, 3)}
    reason = "hang in iteration 5, reduction of the gradients: ranks 1-2 did not join"
    HangFiles(folder, 0).write_report(f"{reason}\n  rank 2: ...", states, frozenset({2}))
    for rank in (0, 1):
        HangFiles(folder, rank).write_stacks(reason)
    HangFiles(folder, 2).write_stacks("hang in iteration 3: an earlier one")
    return reason


def test_the_table_says_who_waits_and_who_is_missing(tmp_path: Path) -> None:
    reason = _write(tmp_path / "hang")
    head, names, *rows = hang_view(tmp_path).splitlines()
    assert head.endswith(f": {reason}")
    columns = {word: names.rindex(word) for word in ("host", "state", "missing", "at")}
    assert len(rows) == 3
    for row, state, missing in zip(
        rows, ("waits", "runs", "silent"), ("ranks 1-2", "", ""), strict=True
    ):
        assert row[columns["state"] :].startswith(state)
        assert row[columns["missing"] : columns["at"]].strip() == missing
        assert row.endswith("step.py:7 in make")
    assert " all-reduce with ranks 1-2 " in rows[0]
    assert rows[2][columns["host"] :].startswith("?")  # its file is from an earlier hang


@pytest.mark.parametrize(
    ("pending", "shown"),
    [([], "  its device  "), (["all_reduce 7", "all_gather 8"], "  all_reduce 7; all_gather 8  ")],
)
def test_the_table_says_what_a_device_has_not_finished(
    pending: list[str], shown: str, tmp_path: Path
) -> None:
    behind = replace(_state(5, None, 4), device_is_behind=True)
    HangFiles(tmp_path, 0).write_report("hang", {0: behind, 1: None}, frozenset())
    content = json.dumps({"reason": "hang", "host": "node7", "device": pending})
    (tmp_path / "rank_00000.json").write_text(content)
    _, _, waiting, unseen = hang_view(tmp_path).splitlines()
    assert waiting.startswith("0     node7  waits")
    assert shown in waiting
    assert unseen.split() == ["1", "?", "never", "seen"]


def test_ranks_with_the_same_stacks_share_them(tmp_path: Path) -> None:
    _write(tmp_path)
    view = hang_view(tmp_path, stacks=True)
    assert "\nrank 2:\n  no stacks were written" in view
    assert " in write_stacks\n" in view
    assert " in test_ranks_with_the_same_stacks_share_them\n" in view


def test_a_disk_that_fails_keeps_nobody(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    HangFiles(tmp_path / "file", 0).write_stacks("hang")
    HangFiles(tmp_path / "file", 0).write_report("hang", {}, frozenset())


@pytest.mark.parametrize("content", [None, "", "[]", "{"])
def test_a_folder_without_a_report_is_named(
    content: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        (tmp_path / REPORT).write_text(content)
    assert health.main(["--hang", str(tmp_path)]) == 6
    assert f"--hang {tmp_path}: there is no {REPORT}" in capsys.readouterr().err


def test_the_command_shows_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reason = _write(tmp_path)
    assert health.main(["--hang", str(tmp_path)]) == 0
    assert reason in capsys.readouterr().out
    assert json.loads((tmp_path / REPORT).read_text())["silent"] == [2]
