"""A run under DeepSpeed's launcher, started by its package and by an imitation."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.environment import local_world_size
from megatron.processes.launch import Launch, read_launch, with_local_rank
from tests.launch import run_ranks
from tests.ports import free_port
from tests.repository import ROOT

_FLAGS = (
    "--config examples/gpt_tiny.yaml --deepspeed "
    "--deepspeed_config examples/deepspeed/gpt_tiny.json "
    "--zero-stage 1 --no-pipeline-parallel --train-iters 2 --eval-iters 0"
).split()


def losses(text: str) -> list[str]:
    """Return the losses in a run's log, which must be that of two processes."""
    assert "2 processes: TP 1, CP 1, DP 2, PP 1" in text
    return re.findall(r"lm loss: (\S+)", text)


@pytest.fixture
def expected(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the losses under torchrun."""
    monkeypatch.chdir(ROOT)
    done = run_ranks(["pretrain_gpt.py", *_FLAGS], dict(os.environ), 2)
    assert done.returncode == 0, done.stdout
    return losses(done.stdout)


def test_its_variables_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    variables = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_SIZE": "4"}
    variables |= {"CROSS_RANK": "1", "CROSS_SIZE": "2"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert read_launch() == Launch(5, 8, 1, 4)
    assert with_local_rank(read_launch(), 1).machine == range(4, 8)
    assert local_world_size() == 4
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")  # torchrun's variable has priority
    assert local_world_size() == 2


def test_a_run_as_the_launcher_starts_it(expected: list[str]) -> None:
    """Start it with the launcher's variables and the flag that it puts before the others."""
    common = {"WORLD_SIZE": "2", "LOCAL_SIZE": "2", "CROSS_RANK": "0", "CROSS_SIZE": "1"}
    common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-u", "pretrain_gpt.py", f"--local_rank={rank}", *_FLAGS],
            cwd=ROOT,
            env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    text, other = [rank.communicate(timeout=240)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], text + other
    assert losses(text + other) == expected


_INSTALLED = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None,
    reason="DeepSpeed is not installed: pip install deepspeed",
)


def launch(*options: str) -> subprocess.Popen[str]:
    """Start DeepSpeed's launcher."""
    runner = [sys.executable, "-m", "deepspeed.launcher.runner", *options]
    return subprocess.Popen(
        [*runner, "pretrain_gpt.py", *_FLAGS],
        cwd=ROOT,
        env={**os.environ, "DS_ACCELERATOR": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@_INSTALLED
def test_a_run_under_the_launcher_itself(expected: list[str]) -> None:
    launcher = launch("--num_gpus", "2", "--master_port", str(free_port()))
    text, _ = launcher.communicate(timeout=240)
    assert launcher.returncode == 0, text
    assert losses(text) == expected


@_INSTALLED
def test_two_machines_of_a_hostfile(tmp_path: Path, expected: list[str]) -> None:
    """Both are this machine, without ssh: one launcher is started for each."""
    hosts = tmp_path / "hostfile"
    hosts.write_text("localhost slots=1\n127.0.0.1 slots=1\n")
    common = ["--hostfile", str(hosts), "--no_ssh", "--master_addr", "127.0.0.1"]
    common += ["--master_port", str(free_port())]
    launchers = [launch(*common, "--node_rank", str(number)) for number in range(2)]
    texts = [launcher.communicate(timeout=240)[0] for launcher in launchers]
    assert [launcher.returncode for launcher in launchers] == [0, 0], "".join(texts)
    assert losses("".join(texts)) == expected
