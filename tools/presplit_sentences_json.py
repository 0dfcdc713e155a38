"""Split the text of JSON lines into sentences, one per line of the text.

    python tools/presplit_sentences_json.py corpus.json presplit.json
    python tools/preprocess_data.py --input presplit.json --presplit-sentences ...

`preprocess_data.py --split-sentences` does both steps at once. Use this program to see or change
the sentences before they are encoded. Other keys stay unchanged.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    # When this file is run as a script, the package next to its folder may not be installed.
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.command import tool_main
from megatron.config.arguments import MAX_LINE_MB, ToolParser, add_max_line_mb
from megatron.durable import atomic_file, expect_no_file, writing_to
from megatron.errors import DataError


def build_parser() -> ToolParser:
    """Build the command-line parser, with Megatron-LM's flags and a few others."""
    parser = ToolParser("presplit_sentences_json.py", __doc__)
    add = parser.add_argument
    add("input", metavar="INPUT", help="File of JSON lines, also with .gz, .bz2 or .zst.")
    add("output", metavar="OUTPUT", help="File to write.")
    add("--json-key", default="text", metavar="KEY", help="Key of the text (default: text).")
    add("--lang", default="english", help="Language of NLTK's Punkt (default: english).")
    add_max_line_mb(parser)
    add("--overwrite", action="store_true", help="Replace an existing output file.")
    return parser


def run(options: argparse.Namespace) -> None:
    """Write the split lines.

    Raises:
        UserError: A flag or the input is invalid, or the output cannot be written.
    """
    import orjson

    from megatron.data.preprocess import SentenceSplitter, find_punkt
    from megatron.data.text_input import find_inputs

    expect_no_file("OUTPUT", [options.output], overwrite=options.overwrite)
    paths = find_inputs([options.input])
    key, count, sentences = options.json_key, 0, 0
    splitter = SentenceSplitter(
        find_punkt(paths, [key], options.lang, options.max_line_mb), keep_newlines=False
    )
    with (
        writing_to("OUTPUT", options.output),
        atomic_file(Path(options.output)) as file,
    ):
        for record in _records(paths, key, options.max_line_mb):
            text = record[key]
            lines = text.split("\n") if isinstance(text, str) else text
            new_sentences = [sentence for line in lines for sentence in splitter(line)]
            record[key] = "\n".join(sentence.replace("\n", " ") for sentence in new_sentences)
            file.write(orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE))
            count, sentences = count + 1, sentences + len(new_sentences)
    print(f"{options.output}: {count:,} documents, {sentences:,} sentences")


def _records(paths: Sequence[str], key: str, max_line_mb: int = MAX_LINE_MB) -> Iterator[Any]:
    """Yield the object of each line.

    Raises:
        DataError: A line is not a JSON object with a text under the key.
    """
    from megatron.data.text_input import load_line, parse_block, read_blocks

    path, first = "", 1
    for block in read_blocks(paths, [key], max_line_mb=max_line_mb):
        if block.path != path:
            path, first = block.path, 1
        documents = parse_block(block, [key])
        for bad in documents.bad[:1]:
            raise DataError(f"{path}:{first + bad.line}: {bad.reason}; fix or remove the line")
        lines = block.read().split(b"\n")
        for number, _ in documents.locations:
            yield load_line(lines[number])
        first += documents.lines


main = tool_main(build_parser, run)

if __name__ == "__main__":
    sys.exit(main())
