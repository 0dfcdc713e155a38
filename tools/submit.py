"""Write and submit the job file of a run for SLURM, Kubernetes, a hostfile or this machine."""

from __future__ import annotations

import sys
from pathlib import Path

if __package__ in (None, ""):
    # When this file is run as a script, the package next to its folder may not be installed.
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.command import run_command
from megatron.submit.command import build_parser, run

if __name__ == "__main__":
    sys.exit(run_command(lambda: run(build_parser().read())))
