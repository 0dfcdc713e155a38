"""A run under faults is judged by its output."""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron.checkpoint.find import checkpoint_of
from megatron.checkpoint.loading import open_folder
from megatron.errors import CheckpointError
from tests.checkpoint.states import save_state
from tests.reliability.processes import TOY, wait_until
from tests.repository import ROOT
from tools import chaos
from tools.chaos import Fault, Outcome, judge


def _line(iteration: int, when: float, loss: float | None = None) -> dict[str, Any]:
    values = {"event": "start"} if loss is None else {"lm loss": loss, "grad-norm": 1.0}
    return {"iteration": iteration, "time": when, **values}


_CALM = [_line(0, 0.0), *(_line(step, step, 9.0 - step) for step in (1, 2, 3, 4))]
# Killed in iteration 3, after 2 was computed in vain, so it starts again after 1.
_KILLED = [*_CALM[:3], _line(1, 5.0), *(_line(step, 4.0 + step, 9.0 - step) for step in (2, 3, 4))]


def _judged(
    folder: Path, lines: list[dict[str, Any]], outcome: Outcome, iteration: int = 4
) -> tuple[list[str], dict[str, Any]]:
    save, metrics, calm = (folder / name for name in ("save", "metrics", "calm"))
    if not save.exists():
        save_state(save, iteration)
    for path, content in ((metrics, lines), (calm, _CALM)):
        path.write_text("".join(json.dumps(line) + "\n" for line in content) + '{"torn')
    return judge(save, metrics, outcome, calm)


def test_a_run_that_lost_a_step_survived(tmp_path: Path) -> None:
    outcome = Outcome([-9, 0], [Fault("kill", 1, 2.5)], seconds=8.0)
    problems, numbers = _judged(tmp_path, _KILLED, outcome)
    assert not problems
    assert numbers["goodput"] == (1 + 1 + 1 + 1) / 8.0  # the first try of iteration 2 was lost
    assert (numbers["restarts"], numbers["most steps lost"]) == (1, 1)
    assert numbers["longest recovery (s)"] == 6.0 - 2.5


def test_what_did_not_survive_is_reported(tmp_path: Path) -> None:
    other = [*_KILLED[:-1], _line(4, 8.0, 5.5)]
    problems, _ = _judged(tmp_path, other, Outcome([1]))
    assert [problem.split(",")[0].split(" differ")[0] for problem in problems] == [
        "the command ended with [1]",
        "the losses",
    ]
    repeated = [*_KILLED, _line(4, 9.0, 1.0)]
    assert (
        "iteration 4 was repeated with a different result"
        in _judged(tmp_path, repeated, Outcome([0]))[0]
    )
    assert "1 processes kept running" in _judged(tmp_path, _KILLED, Outcome([0], orphans=1))[0]
    (tmp_path / "save" / "iter_0000005.tmp-1").mkdir()
    assert (
        "temporary files remain: iter_0000005.tmp-1" in _judged(tmp_path, _KILLED, Outcome([0]))[0]
    )


def test_an_older_or_damaged_checkpoint_is_reported(tmp_path: Path) -> None:
    told = "the newest checkpoint is not from the last iteration, 4"
    assert told in _judged(tmp_path, _KILLED, Outcome([0]), iteration=3)[0]
    shard = tmp_path / "save" / "iter_0000003" / "rank_00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    assert any("is damaged" in one for one in _judged(tmp_path, _KILLED, Outcome([0]))[0])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--faults", "clock", "--", "x"], "--faults clock: only root can set the clock"),
        (["--faults", "kil", "--", "x"], "--faults kil: choose from kill, stop"),
        (["--", "python", "x.py", "--save", "a"], "the command has no --load: add it"),
        (["--", "x", "--save", "a", "--load=b"], "--load must name the --save folder, a"),
    ],
)
def test_a_command_that_cannot_be_judged_is_refused(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert chaos.main(words) == 9
    assert said in capsys.readouterr().err


def test_times_have_units() -> None:
    assert [chaos.duration(text) for text in ("90", "60s", "5m", "1.5h")] == [90, 60, 300, 5400]
    for text in ("", "0", "5d", "-1s"):
        with pytest.raises(argparse.ArgumentTypeError):
            chaos.duration(text)


@pytest.mark.parametrize("name", ["torchrun", "/bin/torchrun", "megatron.processes.torchrun"])
def test_a_launcher_is_no_rank(name: str, tmp_path: Path) -> None:
    found = []
    for word in (name, "train.py"):
        command = [sys.executable, "-c", "import time; time.sleep(100)", word]
        job = chaos.Job(chaos.Plan(command, ["kill"], 1.0, 1.0, tmp_path, tmp_path / "log"))
        found.append([pid == job.process.pid for pid in job.ranks()])
        job.process.kill()
        job.end()
    assert found == [[], [True]]


def test_the_last_sound_checkpoint_is_not_damaged(tmp_path: Path) -> None:
    draw = random.Random(0)
    save_state(tmp_path, 3)
    assert not chaos.damage_newest(tmp_path, draw)
    save_state(tmp_path, 6)
    assert chaos.damage_newest(tmp_path, draw)
    with pytest.raises(CheckpointError, match="damaged"):
        open_folder(checkpoint_of(tmp_path, 6))
    assert not chaos.damage_newest(tmp_path, draw)
    open_folder(checkpoint_of(tmp_path, 3))


def test_the_last_rank_that_runs_is_not_stopped(tmp_path: Path) -> None:
    script = "import os, subprocess; os.environ['RANK'] = '0'; " + (
        "[each.wait() for each in [subprocess.Popen(['sleep', '600']) for _ in range(2)]]"
    )
    command = [sys.executable, "-c", script, "torchrun"]
    job = chaos.Job(chaos.Plan(command, ["stop"], 1.0, 1.0, tmp_path, tmp_path / "log"))
    try:
        wait_until(lambda: len(job.ranks()) == 2, 60.0)
        draw = random.Random(0)
        first = chaos.inject_fault("stop", job, tmp_path, draw)
        assert first is not None
        wait_until(lambda: job.processes()[first.pid].is_stopped, 60.0)
        assert chaos.inject_fault("stop", job, tmp_path, draw) is None
        assert chaos.inject_fault("kill", job, tmp_path, draw) is not None
    finally:
        os.killpg(job.process.pid, signal.SIGKILL)
        job.end()


@pytest.mark.slow
def test_a_run_is_killed_until_it_is_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(os.environ, "PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # more threads wait for each other on a busy machine
    save = str(tmp_path / "save")
    command = [sys.executable, str(ROOT / "pretrain_gpt.py"), *TOY, "--train-iters", "400"]
    command += ["--save", save, "--load", save, "--save-interval", "100", "--keep-latest", "2"]
    command += ["--metrics-jsonl", str(tmp_path / "metrics"), "--log-interval", "1000"]
    words = ["--mtbf", "3s", "--hours", "0.003", "--seed", "1", "--faults", "kill", "pause", "disk"]
    code = chaos.main([*words, "--log", str(tmp_path / "log"), "--", *command])
    told = json.loads(capsys.readouterr().out)
    assert (code, told["failed"], told["codes"][-1]) == (0, [], 0), told
    assert told["faults"] >= 1
    assert told["starts"] == len(told["codes"])
    assert 0.0 < told["goodput"] < 1.0
