"""Describe a folder of checkpoints and check it, or show how two checkpoints differ.

    python tools/checkpoint/inspect.py runs/demo/checkpoints
    python tools/checkpoint/inspect.py --no-verify --details runs/demo/checkpoints
    python tools/checkpoint/inspect.py diff runs/demo/checkpoints runs/other/iter_0000100

A folder is a Hugging Face folder, or the --save or --load folder of a run of this package or of
Megatron-LM. For `diff`, it may also be a single checkpoint. Tensors are read in chunks. The exit
code is 0 if all checkpoints are intact, or if the two compared ones are equal; 1 if these differ;
and 4 if a checkpoint is damaged, if the tracker names a missing one, or if there is none.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    # Python puts this script's folder first on the path, where its name hides the standard
    # library's `inspect`. The package may not be installed.
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from collections.abc import Sequence

from megatron.command import run_command
from megatron.config.arguments import ToolParser

DIFFERENT = 1  # exit code


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["diff"]:
        return _diff(arguments[1:])
    parser = ToolParser("inspect.py", __doc__)
    parser.add_argument("folder", type=Path, help="Folder of checkpoints.")
    text = "Compare sizes only, instead of reading every byte and comparing digests."
    parser.add_argument("--no-verify", action="store_true", help=text)
    text = "Also list all tensors and the metadata."
    parser.add_argument("--details", action="store_true", help=text)
    parser.add_trust()
    args = parser.read(arguments)

    def work() -> int:
        from megatron.checkpoint.inspection import summarize
        from megatron.errors import EXIT_OK, CheckpointError

        lines, sound = summarize(
            args.folder,
            verify=not args.no_verify,
            details=args.details,
            allow_foreign=args.allow_foreign_checkpoints,
        )
        print("\n".join(lines))
        return EXIT_OK if sound else CheckpointError.exit_code

    return run_command(work)


def _diff(arguments: Sequence[str]) -> int:
    parser = ToolParser("inspect.py diff", "Show how two checkpoints of any format differ.")
    parser.add_argument("one", type=Path, help="Checkpoint, or folder of checkpoints.")
    parser.add_argument("other", type=Path, help="Checkpoint or folder to compare it with.")
    text = "Compare only tensors whose names begin with this."
    parser.add_argument("--only", default="", metavar="PREFIX", help=text)
    parser.add_argument("--no-verify", action="store_true", help="Do not compare digests first.")
    parser.add_trust()
    args = parser.read(arguments)

    def work() -> int:
        from megatron.checkpoint.inspection import compare
        from megatron.checkpoint.loading import open_any
        from megatron.errors import EXIT_OK

        one, other = (
            open_any(path, verify=not args.no_verify, allow_foreign=args.allow_foreign_checkpoints)
            for path in (args.one, args.other)
        )
        print(f"{one.path} ({one.format}) -> {other.path} ({other.format})")
        lines, equal = compare(one, other, only=args.only)
        print("".join(f"{line}\n" for line in lines), end="")
        print(f"{equal} tensors are the same, {len(lines)} differences")
        return DIFFERENT if lines else EXIT_OK

    return run_command(work)


if __name__ == "__main__":
    sys.exit(main())
