"""Run `megatron.tools.build_corpus`."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from megatron.command import exit_immediately
    from megatron.tools.build_corpus import main

    exit_immediately(main())
