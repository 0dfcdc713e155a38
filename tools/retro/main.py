#!/usr/bin/env python3
"""Run `megatron.retro.command`."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])
    from megatron.command import guard_imports

    guard_imports()
    from megatron.retro.command import main

    sys.exit(main())
