"""Add an ID to each record of a file of JSON lines: PREFIX-0000000001, PREFIX-0000000002, ...

    python tools/openwebtext/add_id.py --input-file in.json --output-file out.json --id-prefix cc

The key is adlr_id, as in Megatron-LM.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    # When this file is run as a script, the package may not be installed.
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from megatron.command import exit_immediately, tool_main
from megatron.config.arguments import ToolParser


def build_parser() -> ToolParser:
    """Build the command-line parser."""
    parser = ToolParser("add_id.py", __doc__)
    parser.add_argument("--input-file", required=True, metavar="FILE", help="JSON lines.")
    parser.add_argument("--output-file", required=True, metavar="FILE", help="File to write.")
    parser.add_argument("--id-prefix", required=True, metavar="TEXT", help="Prefix of the IDs.")
    parser.add_argument(
        "--log-interval", type=int, default=100, help="Accepted for old scripts; no effect."
    )
    return parser


def run(options: argparse.Namespace) -> None:
    """Write the records with their IDs.

    Raises:
        UserError: The input is invalid, or the output cannot be written.
    """
    from megatron.corpora.records import read_records, write_records

    def numbered() -> Any:
        for number, record in enumerate(read_records(options.input_file), 1):
            yield {**record, "adlr_id": f"{options.id_prefix}-{number:010d}"}

    count = write_records(options.output_file, numbered())
    print(f"{options.output_file}: {count:,} records")


main = tool_main(build_parser, run)

if __name__ == "__main__":
    exit_immediately(main())
