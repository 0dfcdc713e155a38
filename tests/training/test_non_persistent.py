"""A killed run resumes from its newest non-persistent checkpoint, with a few exceptions."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.checkpoint.find import TRACKER
from megatron.checkpoint.lock import save_lock
from megatron.config import RunConfig
from megatron.errors import CheckpointError, StorageError
from megatron.parallel.layout import Layout
from megatron.training import run_record
from megatron.training.callbacks import non_persistent as callback
from megatron.training.callbacks.base import EarlyExit
from megatron.training.run import Run
from megatron.training.run_record import RunRecord, store_of
from tests.config.command import parse
from tests.reliability.scoreboard.commands import run_training

_OFTEN = ("--save-interval", "3", "--non-persistent-save-interval", "1")


@pytest.mark.parametrize("kind", ["local", "global"])
def test_a_killed_run_resumes_from_a_non_persistent_checkpoint(kind: str, tmp_path: Path) -> None:
    save, fast = tmp_path / "save", tmp_path / "fast"
    flags = ["--save", str(save), "--load", str(save), "--metrics-jsonl", str(tmp_path / "metrics")]
    flags += [*_OFTEN, "--non-persistent-ckpt-type", kind]
    if kind == "local":
        flags += ["--non-persistent-local-ckpt-dir", str(fast)]
    else:
        fast = save / "non_persistent"

    def resumed(iteration: int, *, ends_at: int = 6) -> str:
        fault = ("--fault-inject", f"step:0:{ends_at}:kill")
        ended = run_training(tmp_path / "out", *flags, *fault)
        assert ended.code == -9, ended.output
        assert f"at iteration {iteration} (read in" in ended.output or not iteration
        return ended.output

    assert resumed(0, ends_at=3).count("first non-persistent checkpoint: ") == 1
    assert sorted(path.name for path in fast.glob("iter_*")) == ["iter_0000001", "iter_0000002"]
    assert f"loaded checkpoint from {fast}/iter_0000002" in resumed(2)
    resumed(5)
    # A damaged one is skipped.
    shard = fast / "iter_0000005" / "rank_00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    told = resumed(4)
    assert "the non-persistent checkpoint of iteration 5 is not used: rank_00000" in told
    # So is a damaged durable one: the fast ones are older here, but newer than the one before it.
    run_training(tmp_path / "out", *flags)
    shard = save / "iter_0000006" / "rank_00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    assert f"loaded checkpoint from {fast}/iter_0000005" in resumed(5)
    # Somebody has moved the tracker back.
    (save / TRACKER).write_text("3")
    resumed(3, ends_at=5)
    lines = list(map(json.loads, (tmp_path / "metrics").read_text().splitlines()))
    losses = {(line["iteration"], line["lm loss"]) for line in lines if "lm loss" in line}
    assert len(losses) == 6
    shares = [line["goodput"] for line in lines if "goodput" in line]
    assert all(0.0 < share < 1.0 for share in shares)
    if kind == "local":
        shutil.rmtree(save)  # another run starts
        assert "loaded checkpoint" not in resumed(0, ends_at=2)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            ["--non-persistent-save-interval", "2"],
            "give --non-persistent-ckpt-type local or global",
        ),
        ([*_OFTEN, "--non-persistent-ckpt-type", "local"], "give --non-persistent-local-ckpt-dir"),
        ([*_OFTEN, "--non-persistent-ckpt-type", "in_memory"], "use local, with"),
        ([*_OFTEN, "--non-persistent-ckpt-type", "global", "--replication"], "requires"),
    ],
)
def test_flags_that_contradict_each_other_are_refused(
    flags: list[str], said: str, tmp_path: Path
) -> None:
    ended = run_training(tmp_path / "out", "--save", str(tmp_path), "--save-interval", "3", *flags)
    assert ended.code == 9
    assert said in ended.output


@pytest.mark.parametrize("kind", ["local", "global"])
def test_a_folder_that_another_job_uses_is_refused(kind: str, tmp_path: Path) -> None:
    """A save deletes older checkpoints in the folder, whichever run wrote them."""
    fast, flag = tmp_path / "fast", f"--non-persistent-{kind}-ckpt-dir"
    flags = ["--save", str(tmp_path / "save"), *_OFTEN, "--non-persistent-ckpt-type", kind]
    with save_lock(fast):
        ended = run_training(tmp_path / "out", *flags, flag, str(fast))
    assert ended.code == 4
    assert f"{fast}/save.lock: process {os.getpid()} on " in ended.output
    assert f"give another folder to {flag}" in ended.output


def test_a_folder_that_cannot_be_created_is_named_with_its_flag(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    words = f"--save {tmp_path} --save-interval 10 --non-persistent-save-interval 1"
    for kind in ("local", "global"):
        flag = f"--non-persistent-{kind}-ckpt-dir"
        config = _config(f"{words} --non-persistent-ckpt-type {kind} {flag} {tmp_path}/file")
        with pytest.raises(
            StorageError, match=f"^{flag} {tmp_path}/file cannot be written .*: give anoth"
        ):
            store_of(config, Layout.single())


def test_a_run_keeps_its_identity(tmp_path: Path) -> None:
    first = RunRecord.of(tmp_path / "new" / "save", Layout.single())
    assert RunRecord.of(tmp_path / "new" / "save", Layout.single()) == first
    assert RunRecord.of(tmp_path, Layout.single()).run != first.run
    assert abs(time.time() - first.began) < 60
    assert len(first.run) == 32


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "[" * 100_000,
        '{"run": "a"}',
        '{"run": "a", "began": 1}',
        '{"run": 2, "began": 1.0}',
        '{"run": "a", "began": 1.0, "more": 1}',
        '{"run": "a", "began": 1.0}' + " " * 2**16 + "x",
    ],
    ids=["empty", "list", "deep", "part", "integer", "number", "more", "long"],
)
def test_a_damaged_identity_is_replaced(content: str, tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    file.write_text(content)
    found = RunRecord.of(tmp_path, Layout.single())
    is_whole = content.endswith("x")  # only the first 64 KiB are read
    assert (found == RunRecord("a", 1.0)) == is_whole
    if not is_whole:
        assert json.loads(file.read_text()) == {"run": found.run, "began": found.began}


def _config(words: str) -> RunConfig:
    return parse(words, world_size=8).config


def test_the_folders_of_non_persistent_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_record, "NonPersistentStore", lambda *words, **kinds: (words, kinds))
    save = f"--save {tmp_path} --save-interval 10"
    assert store_of(_config(save), Layout.single()) is None
    save += " --non-persistent-save-interval 1 --non-persistent-ckpt-type"
    run = RunRecord.of(tmp_path, Layout.single()).run
    alone: dict[str, Any] = {"copies": 1, "jump": None, "is_shared": False}
    shared = {**alone, "is_shared": True}
    copied = {**alone, "copies": 2}
    local = f"{save} local --non-persistent-local-ckpt-dir here"
    for words, root, kinds in (
        (local, "here", alone),
        (f"{local} --replication", "here", copied),
        (
            f"{local} --replication --replication-jump 2 --replication-factor 4",
            "here",
            {**copied, "copies": 4, "jump": 2},
        ),
        (f"{save} global", str(tmp_path / "non_persistent"), shared),
        (f"{save} global --non-persistent-global-ckpt-dir there", "there", shared),
    ):
        opened: Any = store_of(_config(words), Layout.single())
        (found, *given), found_kinds = opened
        assert (found, given[0], found_kinds) == (root, run, kinds)


_DAMAGED = CheckpointError("all are damaged")


@pytest.mark.parametrize(
    ("durable", "opened", "fast", "after", "chosen"),
    [
        ([5, 3], 5, [7], [5], 7),
        ([5, 3], 5, [None], [5], 5),
        ([], None, [2], [-1], 2),
        ([], None, [None], [-1], None),
        ([3, 5], 3, [], [], 3),  # the tracker was moved back
        ([5, 3], 3, [None, 4], [5, 3], 4),  # 5 is damaged
        ([5, 3], 3, [None, None], [5, 3], 3),
        ([5, 3], None, [None, 4], [5, -1], 4),
        ([5, 3], _DAMAGED, [None, 2], [5, -1], 2),
        ([5, 3], _DAMAGED, [None, None], [5, -1], _DAMAGED),
        (_DAMAGED, _DAMAGED, [2], [-1], 2),
        (_DAMAGED, _DAMAGED, [None], [-1], _DAMAGED),
    ],
)
def test_the_newest_state_is_opened(
    durable: Any,
    opened: Any,
    fast: Sequence[int | None],
    after: list[int],
    chosen: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The list of durable checkpoints begins with the one that the tracker names."""

    def reader(iteration: Any) -> Any:
        if isinstance(iteration, Exception):
            raise iteration
        return None if iteration is None else SimpleNamespace(iteration=iteration)

    def listed(*_: object, quiet: bool) -> list[Any]:
        assert quiet
        return [] if durable == [] else [reader(one) for one in durable]

    asked: list[int] = []
    answers = iter(fast)

    def newest(after: int) -> Any:
        asked.append(after)
        return reader(next(answers))

    store = SimpleNamespace(open_newest=newest)
    monkeypatch.setattr(run_record, "store_of", lambda *_: store)
    monkeypatch.setattr(
        run_record,
        "list_checkpoints",
        (lambda *_, **__: reader(durable)) if isinstance(durable, Exception) else listed,
    )
    config = _config("--save a --load a/../a --save-interval 10")
    if isinstance(chosen, Exception):
        with pytest.raises(CheckpointError, match="all are damaged"):
            run_record.open_newest(config, Layout.single(), lambda: reader(opened))
    else:
        found = run_record.open_newest(config, Layout.single(), lambda: reader(opened))
        assert found == reader(chosen)
    assert asked == after


@pytest.mark.parametrize(
    ("words", "asks"),
    [
        ("--save a --load a", True),
        ("--save b --load a", False),
        ("--load a", False),
        ("--save a --load a --finetune", False),
        ("--save a --load a --no-load-optim", False),
        ("--save a --load a --ckpt-step 5", False),
    ],
)
def test_only_a_run_that_continues_asks_for_non_persistent_checkpoints(
    words: str, asks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def newest(after: int) -> None:
        asked.append(after)

    store = SimpleNamespace(open_newest=newest)
    monkeypatch.setattr(run_record, "store_of", lambda *_: store)
    found = run_record.open_newest(
        _config(f"{words} --save-interval 10" if "--save" in words else words),
        Layout.single(),
        lambda: None,
    )
    assert found is None
    assert asked == [-1] * asks


def _run(iteration: int = 0, **changes: Any) -> Any:
    words = "--save a --save-interval 6 --non-persistent-save-interval 2"
    config = _config(f"{words} --non-persistent-ckpt-type global")
    values: dict[str, Any] = {"was_resumed": False, "finished": False, "config": config}
    values |= {"useful_seconds": 1.0, "save_at": ()}
    return SimpleNamespace(
        layout=Layout.single(),
        progress=SimpleNamespace(iteration=iteration),
        timers=SimpleNamespace(measure=lambda _: nullcontext()),
        **{**values, **changes},
    )


def test_which_updates_are_followed_by_a_fast_save(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    saved: list[int] = []
    events: list[tuple[int, str, str]] = []

    def save(snapshot: Any) -> Path:
        if snapshot.iteration == 8:
            raise StorageError("the disk is full")
        saved.append(snapshot.iteration)
        return Path("here")

    def take(iteration: int, *_: object) -> Any:
        return SimpleNamespace(iteration=iteration, plan=SimpleNamespace(total_bytes=2_500_000_000))

    store = SimpleNamespace(save=save, delete_after=lambda iteration: None)
    monkeypatch.setattr(callback, "store_of", lambda *_: store)
    monkeypatch.setattr(callback.checkpointing, "meta_of", lambda run: {})
    monkeypatch.setattr(callback.checkpointing, "state_of", lambda run: {})
    monkeypatch.setattr(callback.Snapshot, "take", take)
    monkeypatch.setattr(callback.time, "perf_counter", iter(range(10, 100)).__next__)
    scalars: Any = SimpleNamespace(
        event=lambda run, *words: events.append((run.progress.iteration, *words))
    )
    run, saver = _run(), callback.NonPersistentCheckpoints(scalars)
    saver.on_start(run)
    interrupted = []
    for iteration in range(1, 15):
        if saver.interrupts(run):
            interrupted.append(iteration)
        run.progress.iteration, run.finished = iteration, iteration == 14
        outcome: Any = SimpleNamespace(save_due=iteration == 4)
        saver.after_step(run, outcome, EarlyExit("now", 0) if iteration == 10 else None)
    # 6 and 12 are saved durably. 4 turns out to be too, and 10 and 14 end the run.
    assert interrupted == [2, 4, 8, 10, 14]
    assert run.layout.journal.position.operation == "saving a non-persistent checkpoint"
    assert saved == [2]
    assert events == [
        (2, "non-persistent checkpoint", "saved in 1.00 s"),
        (8, "failed non-persistent checkpoint", "the disk is full"),
    ]
    printed = capsys.readouterr().out
    assert "  first non-persistent checkpoint: here (2.5 GB in 1.00 s)\n" in printed
    assert "WARNING: no non-persistent checkpoint was written: the disk is full\n" in printed
    run.progress.iteration, run.finished = 16, False
    saver.after_step(run, outcome, None)
    assert saved == [2, 16]
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(("was_resumed", "least"), [(False, 4), (True, 3)])
def test_a_run_goes_back_to_its_own_state_only(
    was_resumed: bool, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resumed run may go back to the checkpoint from which it has started."""
    asked: list[tuple[str, int]] = []
    store = SimpleNamespace(
        delete_after=lambda iteration: asked.append(("delete", iteration)),
        open_newest=lambda after: asked.append(("open", after)),
    )
    monkeypatch.setattr(callback, "store_of", lambda *_: store)
    saver = callback.NonPersistentCheckpoints(None)  # type: ignore[arg-type]
    saver.on_start(_run(4, was_resumed=was_resumed))
    for after in (0, 9):
        saver.open_newest(after)
    assert asked == [("delete", 4), ("open", least), ("open", 9)]


@pytest.mark.parametrize(
    ("changes", "is_told"),
    [
        ({}, True),
        ({"config": None}, False),
        ({"config": None, "was_resumed": True}, True),
        ({"goodput": None}, False),
        ({"record": None}, False),
        ({"is_log_rank": False}, False),
    ],
)
def test_when_the_goodput_is_reported(
    changes: dict[str, Any],
    is_told: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    record = RunRecord("a", 1000.0)
    run = _run(**{"goodput": 0.25, "record": record, "is_log_rank": True, **changes})
    run.config = run.config or _config("")  # without fast saves
    now = iter((5.0, 7.5))
    monkeypatch.setattr(callback.time, "perf_counter", lambda: next(now))
    monkeypatch.setattr(callback.time, "time", lambda: 3345.0)
    goodput = callback.Goodput()
    goodput.before_step(run)
    goodput.after_step(run, None, None)  # type: ignore[arg-type]
    assert run.useful_seconds == 3.5
    goodput.on_end(run, None)
    told = capsys.readouterr().out
    assert told.startswith("  goodput: 25.0% of the 2,345 s since the run") == is_told
    assert bool(told) == is_told


def test_a_clock_that_is_behind_gives_no_goodput(monkeypatch: pytest.MonkeyPatch) -> None:
    goodput = Run.goodput.fget
    assert goodput is not None
    run = _run(record=RunRecord("a", 1000.0), useful_seconds=30.0)
    for now, expected in ((1120.0, 0.25), (1020.0, None), (1000.0, None), (400.0, None)):
        monkeypatch.setattr(callback.time, "time", lambda now=now: now)
        assert goodput(run) == expected
