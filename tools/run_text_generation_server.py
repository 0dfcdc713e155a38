#!/usr/bin/env python3
r"""Serve a trained GPT or Retro with Megatron-LM's REST API, OpenAI's API, and a web page.

python tools/run_text_generation_server.py --load runs/demo/checkpoints
torchrun --nproc-per-node 8 tools/run_text_generation_server.py --load CHECKPOINTS \
    --tensor-model-parallel-size 8
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

if __package__ in (None, ""):
    # When this file is run as a script, the package next to its folder may not be installed.
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.command import guard_imports
from megatron.config.generation import ServerConfig
from megatron.config.parser import help_if_asked


def main(argv: Sequence[str] | None = None) -> int:
    """Run this process of the server, which torchrun may have started, and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    help_if_asked("run_text_generation_server.py", (ServerConfig,), trains=False, argv=arguments)
    from megatron.inference.server.run import main as run

    return run(arguments)


if __name__ == "__main__":
    guard_imports()
    sys.exit(main())
