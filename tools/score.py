#!/usr/bin/env python3
"""Run `megatron.tools.score`."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from megatron.tools.score import main

    sys.exit(main())
