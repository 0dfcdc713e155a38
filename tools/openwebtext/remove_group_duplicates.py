"""Remove all documents of each group of near-duplicates except the first.

python tools/openwebtext/remove_group_duplicates.py groups.json data.json deduplicated.json
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    # When this file is run as a script, the package may not be installed.
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from megatron.command import exit_immediately, tool_main
from megatron.config.arguments import ToolParser
from megatron.environment import usable_cores
from megatron.errors import DataError


def build_parser() -> ToolParser:
    """Build the command-line parser."""
    parser = ToolParser("remove_group_duplicates.py", __doc__)
    parser.add_argument("groups", metavar="GROUPS", help="File that group_duplicate_url.py wrote.")
    parser.add_argument("data", metavar="DATA", help="JSON lines with a text and an ID.")
    parser.add_argument("output", metavar="OUTPUT", help="File to write.")
    parser.add_argument("--key", default="url", metavar="KEY", help="Key of the ID (default: url).")
    return parser


def run(options: argparse.Namespace) -> None:
    """Write the remaining documents.

    Raises:
        UserError: The input is invalid, or the output cannot be written.
    """
    from megatron.corpora.records import read_records, transform_records

    removed: set[str] = set()
    for record in read_records(options.groups):
        for members in record.values():
            if not isinstance(members, list):
                raise DataError(f"{options.groups}: not a file that group_duplicate_url.py wrote")
            removed.update(members[1:])
    print(f"will be removing {len(removed)} urls")

    def work(records: list[dict[str, Any]]) -> tuple[list[list[dict[str, Any]]], Counter[str]]:
        kept = [record for record in records if record[options.key] not in removed]
        return [kept], Counter({"written": len(kept), "removed": len(records) - len(kept)})

    keys = ["text", options.key]
    counts = transform_records(options.data, [options.output], work, keys, usable_cores())
    print(f"written: {counts['written']} | removed: {counts['removed']}")


main = tool_main(build_parser, run)

if __name__ == "__main__":
    exit_immediately(main())
