#!/usr/bin/env python3
"""Run `megatron.detoxify.evaluate`."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])
    from megatron.detoxify.evaluate import main

    sys.exit(main())
