"""A run whose log loses its reader, as with `| head`, saves and exits with code 141."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.checkpoint.find import TRACKER
from megatron.errors import OutputClosedError
from tests.ports import free_port
from tests.repository import ROOT
from tests.training.toy import TOY

FLAGS = [*TOY, "--train-iters", "100000", "--save-interval", "100000", "--eval-iters", "0"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_whose_reader_leaves_saves_and_ends(ranks: int, tmp_path: Path) -> None:
    """The reader leaves after the first iteration. The ranks share one pipe, as under torchrun."""
    command = [sys.executable, str(ROOT / "pretrain_gpt.py"), *FLAGS, "--save", str(tmp_path)]
    port = str(free_port())
    launch = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    reading, writing = os.pipe()
    processes = []
    for rank in range(ranks):
        variables = {**os.environ, **launch, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        variables["LOCAL_WORLD_SIZE"] = str(ranks)
        processes.append(
            subprocess.Popen(
                command, cwd=ROOT, env=variables, stdout=writing, stderr=subprocess.PIPE, text=True
            )
        )
    os.close(writing)
    with open(reading, encoding="utf-8") as log:
        for line in log:
            if " iteration        1/" in line:
                break
    said = [process.communicate(timeout=120)[1] for process in processes]
    assert [process.returncode for process in processes] == [OutputClosedError.exit_code] * ranks
    for text in said:  # a rank without output in the meantime has nothing to warn about
        assert text == "" or text.startswith("WARNING: the program that read this run's log has")
        assert text.count("\n") <= 1
    assert any(said)
    assert int((tmp_path / TRACKER).read_text()) >= 1
