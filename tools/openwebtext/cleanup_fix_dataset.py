r"""Clean files of JSON lines: remove short documents, fix text, remove extra whitespace.

    python tools/openwebtext/cleanup_fix_dataset.py --input-files a.json b.json \
        --tasks remove_512 ftfy_fix_text --output-path folder

The command writes folder/a_cleaned.json, and the removed documents as folder/a_filtered.json.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    # When this file is run as a script, the package may not be installed.
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from megatron.command import exit_immediately, tool_main
from megatron.config.arguments import ToolParser
from megatron.environment import usable_cores
from megatron.errors import ConfigError

_TASKS = (
    "remove_512",
    "remove_256_javascript",
    "remove_512_non_english",
    "ftfy_fix_text",
    "general_cleaning",
)
_SPACE = re.compile(r"  +|\b\n+ |\b\n+")


def build_parser() -> ToolParser:
    """Build the command-line parser."""
    parser = ToolParser("cleanup_fix_dataset.py", __doc__)
    parser.add_argument(
        "--input-files", nargs="+", required=True, metavar="FILE", help="JSON lines with a text."
    )
    parser.add_argument(
        "--tasks",
        nargs="+",
        required=True,
        choices=_TASKS,
        help="What to do, in this order: remove documents with fewer than 512 characters; "
        "remove those with fewer than 256 that mention JavaScript; remove those with fewer than "
        "512 that are not in English; fix the text; replace line ends and runs of spaces with one "
        "space.",
    )
    parser.add_argument("--output-path", default=".", metavar="DIR", help="Folder to write into.")
    parser.add_argument(
        "--log-interval", type=int, default=100, help="Accepted for old scripts; no effect."
    )
    return parser


def _reason(text: str, tasks: Sequence[str]) -> str:
    from megatron.corpora.cleaning import language_of

    if "remove_512" in tasks and len(text) < 512:
        return "remove_512"
    if "remove_256_javascript" in tasks and len(text) < 256 and "javascript" in text.lower():
        return "remove_256_javascript"
    if "remove_512_non_english" in tasks and len(text) < 512 and language_of(text)[0] != "en":
        return "remove_512_non_english"
    return ""


def _clean(
    tasks: Sequence[str], records: list[dict[str, Any]]
) -> tuple[list[list[dict[str, Any]]], Counter[str]]:
    from megatron.corpora.cleaning import fix_text

    kept: list[dict[str, Any]] = []
    filtered: list[dict[str, Any]] = []
    counts = Counter({"total docs": len(records)})
    for record in records:
        text = record["text"]
        if reason := _reason(text, tasks):
            counts[reason] += 1
            filtered.append(record)
            continue
        if "ftfy_fix_text" in tasks:
            counts["ftfy_fix_text"] += 1
            text = fix_text(text)
        if "general_cleaning" in tasks:
            counts["general_cleaning"] += 1
            text = _SPACE.sub(" ", text)
        kept.append({**record, "text": text})
    return [kept, filtered], counts


def run(options: argparse.Namespace) -> None:
    """Write both files for each input and print what was removed.

    Raises:
        UserError: The input is invalid, or the output cannot be written.
    """
    from megatron.corpora.records import transform_records
    from megatron.durable import writing_to

    folder = Path(options.output_path)
    with writing_to("--output-path", folder):
        folder.mkdir(parents=True, exist_ok=True)
    work = partial(_clean, tuple(options.tasks))
    sources = [Path(file) for file in options.input_files]
    if len({file.name for file in sources}) < len(sources):
        raise ConfigError(
            "--input-files: two have the same name, so their outputs would too: rename one"
        )
    for file in sources:
        outputs = [
            str(folder / f"{file.stem}_{kind}{file.suffix}") for kind in ("cleaned", "filtered")
        ]
        counts = transform_records(str(file), outputs, work, ["text"], usable_cores())
        print(f"{file}: " + " ".join(f"{name} {count}" for name, count in counts.items()))


main = tool_main(build_parser, run)

if __name__ == "__main__":
    exit_immediately(main())
