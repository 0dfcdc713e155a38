#!/usr/bin/env python3
"""Run `megatron.detoxify.select_texts`."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[3])
    from megatron.detoxify.select_texts import main

    sys.exit(main())
