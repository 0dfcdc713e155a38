"""A killed run resumes from its newest non-persistent checkpoint, with a few exceptions."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from megatron.checkpoint.find import TRACKER
from tests.reliability.scoreboard.commands import run_training

_OFTEN = ("--save-interval", "3", "--non-persistent-save-interval", "1")


@pytest.mark.parametrize("kind", ["local", "global"])
def test_a_killed_run_resumes_from_its_fast_state(kind: str, tmp_path: Path) -> None:
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
    assert sorted(path.name for path in fast.iterdir()) == ["iter_0000001", "iter_0000002"]
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
