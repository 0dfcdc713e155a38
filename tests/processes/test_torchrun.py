"""The launcher ends with the code of the run, and gives ranks time to save on SIGTERM."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.reliability.processes import until
from tests.repository import ROOT

_RANK = """
import os, signal, sys, time
from pathlib import Path

def save(number, frame):
    time.sleep(3)
    Path(folder, "saved" + rank).touch()
    sys.exit(3)

signal.signal(signal.SIGTERM, save)
folder, rank = sys.argv[1], os.environ["RANK"]
Path(folder, "ready" + rank).touch()
code = int(sys.argv[2])
if code < 0:
    os.kill(os.getpid(), -code)
elif code < 100:
    sys.exit(code)
while True:
    time.sleep(1)
"""


def _start(folder: Path, code: int, count: int) -> subprocess.Popen[str]:
    (folder / "rank.py").write_text(_RANK)
    words = ["--standalone", "--nproc-per-node", str(count), str(folder / "rank.py"), str(folder)]
    # torchrun would kill the ranks one second after a signal, before they have saved.
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "megatron.processes.torchrun", *words, str(code)],
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize(("code", "expected"), [(0, 0), (9, 9), (-signal.SIGKILL, 137)])
def test_the_launcher_ends_with_the_code_of_the_run(
    code: int, expected: int, tmp_path: Path
) -> None:
    process = _start(tmp_path, code, 1)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == expected
    assert ("rank.py FAILED" in errors) == (code != 0)


def test_ranks_save_on_sigterm_for_as_long_as_they_need(tmp_path: Path) -> None:
    process = _start(tmp_path, 100, 2)
    until(lambda: len(list(tmp_path.glob("ready*"))) == 2, 60.0)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 3, errors
    assert len(list(tmp_path.glob("saved*"))) == 2
    assert "FAILED" not in errors  # it is no failure


def test_ctrl_c_ends_the_launcher_without_a_traceback(tmp_path: Path) -> None:
    process = _start(tmp_path, 100, 2)
    until(lambda: len(list(tmp_path.glob("ready*"))) == 2, 60.0)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT
    assert "SignalException" not in errors
    assert "torch/distributed/run.py" not in errors
