"""Make a dataset from a Wikipedia dump; `make corpus WIKI=simple` runs this script.

    python tools/wikipedia/corpus.py --wiki simple --out corpora/simplewiki

The command downloads and verifies the newest dump, extracts the articles, joins them, trains a
tokenizer unless --tokenizer-model names one, and writes wikipedia_text_document.bin and .idx. To
continue an interrupted run, give the same command again.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

if __package__ in (None, ""):
    # When this file is run as a script, the package next to its folder may not be installed.
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from megatron import durable
from megatron.command import run_command
from megatron.config.arguments import ToolParser
from megatron.environment import usable_cores
from megatron.errors import ConfigError
from megatron.tools.demo import run_step
from tools.wikipedia import download, extract, merge
from tools.wikipedia.plain import parser

_DUMP_RECORD = "dump.txt"  # file that records from which dump the other files were made
_OWN_TOKENIZER = Path("tokenizer", "tokenizer.json")
_FLAGS = "flags.json"  # file with the flags of the first run


def make(options: argparse.Namespace) -> None:
    """Make a dataset, skipping the steps that are complete.

    Raises:
        ConfigError: A flag is invalid, or the folder has a corpus made from another dump.
        DataError: The dump cannot be downloaded or is damaged.
        StorageError: The folder cannot be written.
    """
    parser()  # report a missing mwparserfromhell before downloading anything
    out: Path = options.out.absolute()
    tokenizer = options.tokenizer_model
    if tokenizer is not None and not tokenizer.is_file():
        raise ConfigError(f"--tokenizer-model {tokenizer}: there is no such file")
    _expect_same_flags(options, out)
    prefix = out / "wikipedia"
    dataset = out / "wikipedia_text_document"
    corpus, articles = out / "wikipedia.jsonl", out / "articles"
    if dataset.with_suffix(".idx").exists():
        print(f"{dataset}.bin and .idx are complete")
        return
    if not corpus.exists():
        dump_or_source = _recorded_dump(out) or download.locate(options)
        # The folder is created only now, so that nothing is left behind if the network fails.
        with durable.writing_to("--out", out):
            out.mkdir(parents=True, exist_ok=True)
            durable.replace_file(out / _FLAGS, json.dumps(_flags(options, out)).encode())
        dump = (
            dump_or_source
            if isinstance(dump_or_source, Path)
            else download.download(dump_or_source, out)
        )
        _record_dump(out, dump)
        if not articles.exists():
            print(extract.report(extract.extract(dump, articles, options.workers)), flush=True)
        merge.merge(articles, corpus)
        shutil.rmtree(articles)
    if tokenizer is None:
        tokenizer = out / _OWN_TOKENIZER
        if not tokenizer.exists():
            run_step(
                "Train a tokenizer",
                ["megatron", "data", "tokenizer", "--input", str(corpus), "--kind", "bpe"]
                + ["--vocab-size", str(options.vocab_size), "--output-dir", str(tokenizer.parent)]
                + ["--overwrite"],  # a killed run may have left an incomplete tokenizer
            )
    run_step(
        "Turn the text into token ids",
        ["megatron", "data", "preprocess", "--input", str(corpus), "--append-eod"]
        + ["--output-prefix", str(prefix), "--tokenizer-type", "HuggingFaceTokenizer"]
        + ["--tokenizer-model", str(tokenizer), "--workers", str(max(1, options.workers))]
        + ["--overwrite"],  # a killed run leaves a .bin without its .idx
    )
    print(f"\nTrain on it with --data-path {dataset}")


def _flags(options: argparse.Namespace, out: Path) -> dict[str, object]:
    """Return the flags that determine the result."""
    names = ("wiki", "date", "url", "checksum", "vocab_size")
    tokenizer = options.tokenizer_model or out / _OWN_TOKENIZER
    given = {name: getattr(options, name) for name in names}
    return {**given, "tokenizer_model": str(tokenizer.absolute())}


def _expect_same_flags(options: argparse.Namespace, out: Path) -> None:
    """Compare the flags that determine the result with those of an earlier run."""
    file = out / _FLAGS
    if not file.exists():
        return
    recorded = json.loads(file.read_bytes())
    for name, value in _flags(options, out).items():
        if recorded.get(name) != value:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(
                f"{flag} {value}: --out {out} was started with {flag} {recorded.get(name)}: give "
                "the same flags to continue, or another folder"
            )


def _recorded_dump(out: Path) -> Path | None:
    """Return the dump that an earlier run used, or `None` if no dump is recorded or it is gone.

    Continuing with it prevents a newer dump from restarting the work.
    """
    try:
        dump = Path((out / _DUMP_RECORD).read_text(encoding="utf-8").strip())
    except FileNotFoundError:
        return None
    return dump if dump.is_file() else None


def _record_dump(out: Path, dump: Path) -> None:
    marker = out / _DUMP_RECORD
    with durable.writing_to("--out", out):
        out.mkdir(parents=True, exist_ok=True)
        if marker.exists() and marker.read_text(encoding="utf-8").strip() != str(dump.absolute()):
            raise ConfigError(
                f"--out {out} was made from a different dump, which no longer exists ({marker}): "
                "give another folder, or remove this one"
            )
        durable.replace_file(marker, f"{dump.absolute()}\n".encode())


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool and return its exit code."""
    arguments = ToolParser("corpus.py", __doc__)
    download.add_source_flags(arguments)
    arguments.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="Folder for all files."
    )
    arguments.add_argument(
        "--tokenizer-model",
        type=Path,
        metavar="FILE",
        help="tokenizer.json to use (default: train one).",
    )
    arguments.add_argument(
        "--vocab-size",
        type=int,
        default=32000,
        metavar="N",
        help="Vocabulary size of the new tokenizer (default: %(default)s).",
    )
    arguments.add_argument(
        "--workers",
        type=int,
        default=usable_cores(),
        metavar="N",
        help="Processes that extract and tokenize (default: one per core).",
    )
    options = arguments.read(argv)
    return run_command(lambda: make(options))


if __name__ == "__main__":
    sys.exit(main())
