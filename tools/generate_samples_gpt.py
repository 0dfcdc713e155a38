#!/usr/bin/env python3
r"""Generate text with a trained GPT from a prompt, from a file of prompts, or without a prompt.

python tools/generate_samples_gpt.py --load CHECKPOINTS --prompt "def main("
python tools/generate_samples_gpt.py --load CHECKPOINTS --sample-input-file prompts.txt \
    --sample-output-file answers.jsonl --greedy
torchrun --nproc-per-node 2 tools/generate_samples_gpt.py --load CHECKPOINTS \
    --tensor-model-parallel-size 2 --num-samples 1000 --genfile samples.jsonl
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

if __package__ in (None, ""):
    # When this file is run as a script, the package next to its folder may not be installed.
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.command import guard_imports
from megatron.config.generation import SamplesConfig
from megatron.config.parser import help_if_asked

PROGRAM = "generate_samples_gpt.py"


def main(argv: Sequence[str] | None = None) -> int:
    """Run this process, which torchrun may have started, and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    help_if_asked(PROGRAM, (SamplesConfig,), trains=False, argv=arguments)
    from megatron.inference.samples import main as run

    return run(PROGRAM, arguments)


if __name__ == "__main__":
    guard_imports()
    sys.exit(main())
