#!/usr/bin/env python3
"""Run `tools/generate_samples_gpt.py`, with the same flags."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])
    from megatron.command import guard_imports

    guard_imports()
    from megatron.cli.main import generate

    sys.exit(generate(sys.argv[1:]))
