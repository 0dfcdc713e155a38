"""Self-generation that is killed and restarted writes the same as an uninterrupted run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.repository import ROOT
from tests.tasks.toy import save_toy
from tools import generate_samples_gpt

COUNT = 200
# Runs a script that is killed, from inside so that it is in time, once it has written five lines.
_KILLED = """
import os, runpy, signal, sys, threading, time
from pathlib import Path

def kill():
    written = Path(sys.argv[-1])
    while not written.exists() or written.read_bytes().count(b"\\n") < 5:
        time.sleep(0.002)
    os.kill(os.getpid(), signal.SIGKILL)

del sys.argv[0]
threading.Thread(target=kill, daemon=True).start()
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_killed_sampling_continues_and_ends_the_same(tmp_path: Path) -> None:
    load = ["--load", save_toy(str(tmp_path / "model")), "--num-samples", str(COUNT)]
    load += ["--out-seq-length", "12", "--max-batch-size", "2", "--top_p", "0.9", "--genfile"]
    whole, killed = tmp_path / "whole.out", tmp_path / "killed.out"
    assert generate_samples_gpt.main([*load, str(whole)]) == 0
    script = ROOT / "examples/detxoify_lm/generate_samples_gpt.py"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [sys.executable, "-c", _KILLED, str(script), *load, str(killed)],
        env=environment,
        capture_output=True,
        check=False,
    )
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    written = killed.read_bytes()
    assert 5 <= written.count(b"\n") < COUNT
    assert whole.read_bytes().startswith(written)
    assert generate_samples_gpt.main([*load, str(killed)]) == 0
    assert killed.read_bytes() == whole.read_bytes()
