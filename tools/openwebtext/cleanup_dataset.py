"""Fix text with ftfy, and remove documents that are not English or have fewer than 128 tokens.

    python tools/openwebtext/cleanup_dataset.py in.json out.json

Here, a token is a word or a punctuation mark. Megatron-LM's script counted tokens of a GPT-2
vocabulary that it downloaded.
"""

from __future__ import annotations

import argparse
import re
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

_MIN_TOKENS = 128
_TOKEN = re.compile(r"\w+|[^\w\s]")


def build_parser() -> ToolParser:
    """Build the command-line parser."""
    parser = ToolParser("cleanup_dataset.py", __doc__)
    parser.add_argument("input", metavar="INPUT", help='JSON lines with the key "text".')
    parser.add_argument("output", metavar="OUTPUT", help="File to write.")
    return parser


def _clean(records: list[dict[str, Any]]) -> tuple[list[list[dict[str, Any]]], Counter[str]]:
    from megatron.corpora.cleaning import fix_text, language_of

    kept, counts = [], Counter[str]()
    for record in records:
        text = fix_text(record["text"])
        counts.update({"documents": 1, "fixed text": int(text != record["text"])})
        if language_of(text)[0] != "en":
            counts.update({"non-english": 1, "non-english chars": len(text)})
        elif len(_TOKEN.findall(text[: 8 * _MIN_TOKENS * 8])) < _MIN_TOKENS:
            counts.update({"small docs": 1, "small docs chars": len(text)})
        else:
            kept.append({**record, "text": text})
    return [kept], counts


def run(options: argparse.Namespace) -> None:
    """Write the clean documents and print what was removed.

    Raises:
        UserError: The input is invalid, or the output cannot be written.
    """
    from megatron.corpora.records import transform_records

    counts = transform_records(options.input, [options.output], _clean, ["text"], usable_cores())
    print(" | ".join(f"{name}: {count}" for name, count in counts.items()))


main = tool_main(build_parser, run)

if __name__ == "__main__":
    exit_immediately(main())
