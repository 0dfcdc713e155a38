"""Group the IDs of near-duplicates that find_duplicates.py wrote.

    python tools/openwebtext/group_duplicate_url.py duplicates.json groups.json 0.7

The command writes a line for each group of near-duplicates, with the number of the group as the
key: {"0": ["id", "other id", ...]}.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

if __package__ in (None, ""):
    # When this file is run as a script, the package may not be installed.
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from megatron.command import exit_immediately, tool_main
from megatron.config.arguments import ToolParser
from megatron.errors import ConfigError, DataError


def build_parser() -> ToolParser:
    """Build the command-line parser."""
    parser = ToolParser("group_duplicate_url.py", __doc__)
    parser.add_argument("input", metavar="INPUT", help="File that find_duplicates.py wrote.")
    parser.add_argument("output", metavar="OUTPUT", help="File to write.")
    parser.add_argument(
        "similarity",
        metavar="SIMILARITY",
        nargs="?",
        type=float,
        default=0.7,
        help="Smallest similarity within a group (default: 0.7).",
    )
    return parser


def run(options: argparse.Namespace) -> None:
    """Write the groups.

    Raises:
        UserError: The input is invalid, or the output cannot be written.
    """
    import numpy as np

    from megatron.corpora.minhash import join
    from megatron.corpora.records import read_records, write_records

    if not 0 <= options.similarity <= 1:
        raise ConfigError(f"similarity {options.similarity}: give a number from 0 to 1")
    indices: dict[str, int] = {}
    pairs: list[tuple[int, int]] = []
    for record in read_records(options.input):
        try:
            for main_id, others in record.items():
                first = indices.setdefault(main_id, len(indices))
                for other in others:
                    for other_id, value in other.items():
                        if value >= options.similarity:
                            pairs.append((first, indices.setdefault(other_id, len(indices))))
        except (AttributeError, TypeError):
            raise DataError(
                f"{options.input}: not a file that find_duplicates.py wrote: {str(record)[:100]}"
            ) from None
    edges = np.array(pairs, np.int64).reshape(-1, 2)
    roots = join(np.arange(len(indices)), edges[:, 0], edges[:, 1])
    groups: dict[int, list[str]] = {}
    for name, root in zip(indices, roots.tolist(), strict=True):
        groups.setdefault(root, []).append(name)
    large = [members for members in groups.values() if len(members) > 1]
    write_records(options.output, ({str(i): members} for i, members in enumerate(large)))
    total = sum(map(len, large))
    removed = total - len(large)
    print(f"out of {total} urls, only {len(large)} are unique and {removed} should be removed")


main = tool_main(build_parser, run)

if __name__ == "__main__":
    exit_immediately(main())
