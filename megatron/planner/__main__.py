"""`python -m megatron.planner`."""

import sys

from megatron.command import run_command
from megatron.planner.command import build_parser, run

if __name__ == "__main__":
    options = build_parser().read()
    sys.exit(run_command(lambda: run(options)))
