#!/usr/bin/env python3
"""Run `megatron.tools.fill_in`."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from megatron.tools.fill_in import main

    sys.exit(main())
