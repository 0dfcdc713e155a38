"""Time the matrix products of split layers together with their communication.

Each product is timed alone, together with a collective, and cut into parts that are computed while
messages are sent (docs/tensor-parallelism.md).

    torchrun --nproc-per-node 2 tools/benchmark_overlap.py

The tool prints a Markdown table of medians in microseconds. The default shapes are those of
Llama-3-8B. On a CPU, these take minutes; use --tokens 64 --hidden-size 32 --qkv-size 48
--ffn-hidden-size 64 --rounds 1. On GPUs, PyTorch's own fused operations are included.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

if __package__ in (None, ""):
    # When this file is run as a script, the packages next to its folder may not be installed.
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.command import run_command
from megatron.config.arguments import ToolParser


def build_parser() -> ToolParser:
    """Build the command-line parser."""
    parser = ToolParser("benchmark_overlap.py", __doc__)
    add = parser.add_argument
    add("--tokens", type=int, default=8192, help="Tokens per micro-batch (default: 8192).")
    add("--hidden-size", type=int, default=4096, help="Hidden size (default: 4096).")
    add("--qkv-size", type=int, default=6144, help="Width of the QKV product (default: 6144).")
    add(
        "--ffn-hidden-size",
        type=int,
        default=14336,
        help="Inner width of a gated MLP (default: 14336).",
    )
    add("--rounds", type=int, default=7, help="Rounds of 20 calls each (default: 7).")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    options = build_parser().read(arguments)

    def work() -> None:
        from tools.bench.overlap import run  # loads torch

        run(options)

    return run_command(work)


if __name__ == "__main__":
    sys.exit(main())
