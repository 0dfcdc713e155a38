#!/usr/bin/env python3
"""Run `megatron.tools.text_generation_cli`."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from megatron.tools.text_generation_cli import main

    sys.exit(main())
