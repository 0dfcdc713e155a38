#!/usr/bin/env python3
"""Run `megatron.tasks.main`."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from megatron.command import guard_imports
    from megatron.tasks.main import main

    guard_imports()
    sys.exit(main())
