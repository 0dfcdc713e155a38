"""Self-generation that is killed and restarted writes the same as an uninterrupted run."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from tests.repository import ROOT
from tests.tasks.toy import save_toy
from tools import generate_samples_gpt

COUNT = 200


def test_killed_sampling_continues_and_ends_the_same(tmp_path: Path) -> None:
    load = ["--load", save_toy(str(tmp_path / "model")), "--num-samples", str(COUNT)]
    load += ["--out-seq-length", "12", "--max-batch-size", "2", "--top_p", "0.9", "--genfile"]
    whole, killed = tmp_path / "whole.out", tmp_path / "killed.out"
    assert generate_samples_gpt.main([*load, str(whole)]) == 0
    script = ROOT / "examples/detxoify_lm/generate_samples_gpt.py"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, str(script), *load, str(killed)],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        end = time.monotonic() + 60
        while not killed.exists() or killed.read_bytes().count(b"\n") < 5:
            assert process.poll() is None
            assert time.monotonic() < end
            time.sleep(0.01)
        process.kill()
    written = killed.read_bytes()
    assert 5 <= written.count(b"\n") < COUNT
    assert whole.read_bytes().startswith(written)
    assert generate_samples_gpt.main([*load, str(killed)]) == 0
    assert killed.read_bytes() == whole.read_bytes()
