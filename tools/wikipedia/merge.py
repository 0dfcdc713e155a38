"""Join the files of JSON lines in a folder into one file, in the order of their names.

    python tools/wikipedia/merge.py articles --output wikipedia.jsonl

Folders that WikiExtractor wrote with --json (AA/wiki_00 and so on) are also accepted.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

if __package__ in (None, ""):
    # When this file is run as a script, the package next to its folder may not be installed.
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from megatron import durable
from megatron.command import run_command
from megatron.config.arguments import ToolParser
from megatron.errors import DataError, StorageError

_PATTERNS = ("part-*.jsonl", "wiki_*")


def merge(folder: Path, output: Path) -> int:
    """Join the files of JSON lines in a folder, and return the number of files.

    Raises:
        DataError: The folder has no files with a known name, or a file is not JSON lines.
        StorageError: The output cannot be written.
    """
    files = sorted(path for name in _PATTERNS for path in folder.rglob(name) if path.is_file())
    if not files:
        raise DataError(
            f"{folder}: no {' or '.join(_PATTERNS)}: give a folder that extract.py wrote"
        )
    needed = sum(path.stat().st_size for path in files)
    with durable.writing_to("--output", output):
        output.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(output.parent).free
        if free < needed:
            raise StorageError(f"{needed:,} bytes are needed, but only {free:,} are free")
        with durable.atomic_file(output) as joined:
            for path in files:
                _append(path, joined)
        durable.sync_folder(output.parent)
    return len(files)


def _append(path: Path, joined: BinaryIO) -> None:
    with path.open("rb") as part:
        if part.read(1) not in (b"{", b""):
            raise DataError(f"{path}: not JSON lines: WikiExtractor writes them with --json")
        part.seek(0)
        shutil.copyfileobj(part, joined, 1 << 20)


def run(options: argparse.Namespace) -> None:
    """Join the files of a folder, and print their number."""
    durable.expect_no_file("--output", [options.output], overwrite=False)
    count = merge(options.folder, options.output)
    print(f"{options.output}: {count} files joined")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool and return its exit code."""
    parser = ToolParser("merge.py", __doc__)
    parser.add_argument("folder", type=Path, help="Folder that extract.py wrote.")
    parser.add_argument(
        "--output", type=Path, required=True, metavar="FILE.jsonl", help="New file."
    )
    options = parser.read(argv)
    return run_command(lambda: run(options))


if __name__ == "__main__":
    sys.exit(main())
