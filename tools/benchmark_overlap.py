"""Time the products of split layers with what they send: alone, after or before a collective, and
cut to travel beside their parts (docs/tensor-parallelism.md).

    torchrun --nproc-per-node 2 tools/benchmark_overlap.py

Prints a Markdown table in microseconds, medians of rounds in turn. The shapes are those of
Llama-3-8B unless flags say otherwise; a CPU needs minutes for those, so try it there with
--tokens 64 --hidden-size 32 --qkv-size 48 --ffn-hidden-size 64 --rounds 1. PyTorch's own fused
operations run where there are GPUs.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

if __package__ in (None, ""):
    # Started as a file: the packages beside this folder may not be installed.
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.command import run_command
from megatron.config.arguments import ToolParser


def build_parser() -> ToolParser:
    """The command line."""
    parser = ToolParser("benchmark_overlap.py", __doc__)
    add = parser.add_argument
    add("--tokens", type=int, default=8192, help="Of a micro-batch (default: 8192).")
    add("--hidden-size", type=int, default=4096, help="Default: 4096.")
    add("--qkv-size", type=int, default=6144, help="Queries, keys and values (default: 6144).")
    add("--ffn-hidden-size", type=int, default=14336, help="Of a gated MLP (default: 14336).")
    add("--rounds", type=int, default=7, help="Of 20 calls each (default: 7).")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    options = build_parser().read(arguments)

    def work() -> None:
        from tools.bench.overlap import run  # loads torch

        run(options)

    return run_command(work)


if __name__ == "__main__":
    sys.exit(main())
