"""The view of a hang: written by the processes, shown by a command."""

from __future__ import annotations

import json
import re
import threading
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron.cli import health
from megatron.errors import DataError
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
    reason = _write(tmp_path / "run" / "hang")  # folders that do not exist
    head, names, *rows = hang_view(tmp_path / "run").splitlines()
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


def test_ranks_that_wait_themselves_are_missing_only_if_no_other_is(tmp_path: Path) -> None:
    states = {
        0: _state(5, Wait("all-reduce", _DATA, 4), 4),
        1: _state(5, Wait("receive", (3,), None), 3),
        2: _state(4, None, 3),
        3: _state(5, Wait("send", (1,), None), 3),
        4: _state(5, Wait("all-reduce", (4, 5), 9), 9),
    }
    states[5] = replace(states[4], started={(4, 5): 9})
    states[4] = replace(states[4], started={(4, 5): 9})
    HangFiles(tmp_path, 0).write_report("hang", states, frozenset())
    head, *rows = hang_view(tmp_path).splitlines()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d: hang", head)
    waits = "reduction of the gradients"
    place = "step.py:7 in make"
    expected = [
        ("rank", "host", "state", "iteration", "operation", "waits for", "missing", "at"),
        ("0", "?", "waits", "5", waits, "all-reduce with ranks 1-2", "rank 2", place),
        ("1", "?", "waits", "5", waits, "receive with rank 3", "rank 3", place),
        ("2", "?", "runs", "4", "loading of micro-batch 0", "", "", place),
        ("3", "?", "waits", "5", waits, "send with rank 1", "rank 1", place),
        ("4", "?", "waits", "5", waits, "all-reduce with rank 5", "none", place),
        ("5", "?", "waits", "5", waits, "all-reduce with rank 4", "none", place),
    ]
    widths = [max(map(len, column)) for column in zip(*expected, strict=True)]
    for row, cells in zip(rows, expected, strict=True):
        assert row == "  ".join(map(str.ljust, cells, widths)).rstrip()


def test_the_stacks_begin_with_the_main_thread_s_and_omit_the_watchdog_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = [
        {
            "profiling_name": "nccl:all_reduce",
            "collective_seq_id": number,
            "process_group": ["2", "data"],
            "state": "completed" if number < 2 else "started",
        }
        for number in range(9)
    ]
    dumps = iter([json.dumps({"entries": entries}), "{}", "no JSON"])
    monkeypatch.setattr(
        torch._C._distributed_c10d, "_dump_nccl_trace_json", lambda: next(dumps), raising=False
    )
    done = threading.Event()
    threads = [threading.Thread(target=done.wait, name=name) for name in ("other", "_watch")]
    for thread in threads:
        thread.start()
    try:
        found = []
        for rank in range(3):
            HangFiles(tmp_path, rank).write_stacks("hang")
            found.append(json.loads((tmp_path / f"rank_0000{rank}.json").read_text()))
    finally:
        done.set()
    assert [name for name in found[0]["stacks"] if name in ("MainThread", "other", "_watch")] == [
        "MainThread",
        "other",
    ]
    assert next(iter(found[0]["stacks"])) == "MainThread"
    assert [content["device"] for content in found] == [
        [f"nccl:all_reduce {number} of group data (started)" for number in range(2, 7)],
        [],
        [],
    ]


@pytest.mark.parametrize(
    ("pending", "shown"),
    [([], "  its device  "), (["all_reduce 7", "all_gather 8"], "  all_reduce 7; all_gather 8  ")],
)
def test_the_table_says_what_a_device_has_not_finished(
    pending: list[str], shown: str, tmp_path: Path
) -> None:
    behind = replace(_state(5, None, 4), device_is_behind=True)
    HangFiles(tmp_path, 0).write_report("hang", {0: None, 1: behind}, frozenset())
    content = json.dumps({"reason": "hang", "host": "node7", "device": pending})
    (tmp_path / "rank_00001.json").write_text(content)
    _, _, unseen, waiting = hang_view(tmp_path).splitlines()
    assert waiting.startswith("1     node7  waits")
    assert shown in waiting
    assert unseen.split() == ["0", "?", "never", "seen"]


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


@pytest.mark.parametrize("extra", [0, 1])
def test_a_report_of_more_than_64_mebibytes_is_not_read(extra: int, tmp_path: Path) -> None:
    _write(tmp_path)
    text = (tmp_path / REPORT).read_bytes().rstrip().removesuffix(b"}")
    (tmp_path / REPORT).write_bytes(text.ljust(2**26 - 1 + extra) + b"}")
    with pytest.raises(DataError, match="there is no") if extra else nullcontext():
        hang_view(tmp_path)


def test_the_command_shows_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reason = _write(tmp_path)
    assert health.main(["--hang", str(tmp_path)]) == 0
    assert reason in capsys.readouterr().out
    assert json.loads((tmp_path / REPORT).read_text())["silent"] == [2]
