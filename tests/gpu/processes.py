"""Whole runs with several processes, one GPU each."""

import subprocess
import sys
from collections.abc import Sequence

from tests.repository import ROOT


def run_processes(count: int, words: Sequence[str], seconds: float = 90) -> str:
    """Start `words` with PyTorch's launcher, and return the output; an error fails the test.

    The launcher chooses a free port, so tests may run in parallel.
    """
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    program = [*launcher, f"--nproc-per-node={count}", *words]
    done = subprocess.run(
        program, cwd=ROOT, capture_output=True, text=True, timeout=seconds, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout
