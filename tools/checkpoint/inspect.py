"""Say what a folder of checkpoints holds, and whether it is sound, without loading a tensor.

    python tools/checkpoint/inspect.py runs/demo/checkpoints
    python tools/checkpoint/inspect.py --no-verify --details runs/demo/checkpoints

The folder is one that was given to --save or --load: ours, or Megatron-LM's. Exit code 0: all
checkpoints in it are sound; 4: one is damaged, or there is none.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    # Python puts this script's folder first on the path, where its name hides the standard
    # library's `inspect`.
    sys.path.pop(0)

import argparse
from collections.abc import Sequence
from pathlib import Path


def main(argv: Sequence[str] | None = None) -> int:
    """Print the summary; the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="Folder of checkpoints.")
    parser.add_argument(
        "--no-verify",
        action="store_true",
        help="Compare sizes only, instead of reading every byte and comparing digests.",
    )
    parser.add_argument(
        "--details", action="store_true", help="List all tensors and what else was saved."
    )
    args = parser.parse_args(argv)

    from megatron.command import run_command

    return run_command(lambda: _inspect(args))


def _inspect(args: argparse.Namespace) -> int:
    from megatron.checkpoint.summary import summarize
    from megatron.errors import EXIT_OK, CheckpointError

    lines, sound = summarize(args.folder, verify=not args.no_verify, details=args.details)
    print("\n".join(lines))
    return EXIT_OK if sound else CheckpointError.exit_code


if __name__ == "__main__":
    sys.exit(main())
