"""Join the .json files of a folder, in the order of their names, into one file of JSON lines.

python tools/openwebtext/merge_jsons.py --json_path folder --output_file merged.json
"""

from __future__ import annotations

import argparse
import sys
from itertools import chain
from pathlib import Path

if __package__ in (None, ""):
    # When this file is run as a script, the package may not be installed.
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from megatron.command import exit_immediately, tool_main
from megatron.config.arguments import ToolParser
from megatron.errors import ConfigError


def build_parser() -> ToolParser:
    """Build the command-line parser."""
    parser = ToolParser("merge_jsons.py", __doc__)
    parser.add_argument(
        "--json_path",
        "--json-path",
        default=".",
        metavar="DIR",
        help="Folder (default: the current one).",
    )
    parser.add_argument(
        "--output_file",
        "--output-file",
        default="merged_output.json",
        metavar="FILE",
        help="File to write (default: merged_output.json).",
    )
    return parser


def run(options: argparse.Namespace) -> None:
    """Write the joined file.

    Raises:
        UserError: The input is invalid, or the output cannot be written.
    """
    from megatron.corpora.records import read_records, write_records

    output = Path(options.output_file).resolve()
    files = sorted(
        file for file in Path(options.json_path).glob("*.json") if file.resolve() != output
    )
    if not files:
        raise ConfigError(f"--json_path {options.json_path}: contains no .json file")
    records = chain.from_iterable(read_records(str(file)) for file in files)
    count = write_records(options.output_file, records)
    print(f"{options.output_file}: {count:,} records from {len(files):,} files")


main = tool_main(build_parser, run)

if __name__ == "__main__":
    exit_immediately(main())
