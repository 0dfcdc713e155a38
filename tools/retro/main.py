#!/usr/bin/env python3
"""Run `megatron.retro.command`."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])
    from megatron.command import guard_imports

    guard_imports()
    from megatron.config.parser import help_if_asked
    from megatron.config.retro_preprocessing import RETRO_SECTIONS

    help_if_asked("tools/retro/main.py", RETRO_SECTIONS, trains=False)  # before torch is imported
    from megatron.retro.command import main

    sys.exit(main())
