r"""Turn text (JSON lines, Parquet) into the `.bin`/`.idx` files that training reads.

    python tools/preprocess_data.py --input corpus.jsonl --output-prefix corpus \
        --tokenizer-type GPT2BPETokenizer --vocab-file vocab.json --merge-file merges.txt \
        --append-eod

This writes corpus_text_document.bin and corpus_text_document.idx.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from megatron.command import rehearsed, tool_main
from megatron.config.arguments import (
    ToolParser,
    add_flags,
    add_max_line_mb,
    from_values,
    minimum_problems,
    prefix_problems,
)
from megatron.config.data import TokenizerConfig
from megatron.durable import expect_no_file
from megatron.environment import without_matrix_threads
from megatron.errors import ConfigError, warn
from megatron.tokenizer import build_tokenizer

if TYPE_CHECKING:
    from megatron.data.preprocess import Counts, Splitter
    from megatron.data.text_input import TextBlock

_MAX_WORKERS = 1024
_LANGUAGE = "english"
_WORKERS = "omit it and --workers: one process per core"
_ROWS = "omit it: training pads the vocabulary with --make-vocab-size-divisible-by"
# Flags of Megatron-LM and its forks that are not supported. All others are accepted.
_UNSUPPORTED_FLAGS = {
    "--find-optimal-num-workers": _WORKERS,
    "--workers-to-check": _WORKERS,
    "--max-documents": _WORKERS,
    "--chunk-size": "omit it: each worker gets enough text to keep it busy",
    "--seq-length": "omit it: documents of any length are written, and training cuts them",
    "--trust-remote-code": "omit it: code that comes with a tokenizer is never run",
    "--make-vocab-size-divisible-by": _ROWS,
    "--pad-vocab-size-to": _ROWS,
    "--datasets": "use tools/merge_datasets.py, which has this flag",
    "--count": "write the samples that you want to a file, and use it as --input",
    "--shuffle": "omit it: training shuffles samples by --seed",
    "--seed": "omit it: nothing here is random; training shuffles samples by its own --seed",
}

# The minimum time between two log lines.
_SECONDS_BETWEEN_LINES = 5.0


def build_parser() -> ToolParser:
    """Build the command-line parser, with its flags in groups."""
    parser = ToolParser("preprocess_data.py", __doc__, _UNSUPPORTED_FLAGS)
    _add_input_flags(parser.add_argument_group("Input"))
    add_flags(parser, TokenizerConfig)
    parser.add_argument(
        "--vocab", dest="vocab_file", help=argparse.SUPPRESS, default=argparse.SUPPRESS
    )
    _add_output_flags(parser.add_argument_group("Output"))
    _add_running_flags(parser.add_argument_group("Running"))
    return parser


def _add_input_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="PATH",
        help="Files, glob patterns or directories: .jsonl or .json (one JSON object per line), "
        "also with .gz, .bz2 or .zst; .parquet; .txt (one document per file).",
    )
    add_max_line_mb(group)
    group.add_argument(
        "--json-keys",
        "--json-key",
        nargs="+",
        default=["text"],
        metavar="KEY",
        help="Keys to encode (for parquet, columns), one dataset each (default: text).",
    )
    group.add_argument(
        "--split-sentences",
        action="store_true",
        help="Write one sequence per sentence, which BERT and T5 need. NLTK's Punkt finds the "
        "sentences. If its data is not installed, it is trained on the beginning of the input.",
    )
    group.add_argument(
        "--presplit-sentences",
        action="store_true",
        help="Write one sequence per sentence of text that is already split: one sentence per line "
        "of the text, or a list of sentences.",
    )
    group.add_argument(
        "--keep-newlines",
        action="store_true",
        help="With --split-sentences, keep the whitespace between sentences.",
    )
    group.add_argument(
        "--lang", default=_LANGUAGE, help=f"Language of NLTK's Punkt (default: {_LANGUAGE})."
    )


def _add_output_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--output-prefix",
        required=True,
        metavar="PATH",
        help="Beginning of the names of the output files: PATH_KEY_document.bin and .idx, or "
        "PATH_KEY_sentence with --split-sentences or --presplit-sentences.",
    )
    group.add_argument("--overwrite", action="store_true", help="Replace existing output files.")
    group.add_argument(
        "--append-eod", action="store_true", help="End each document with the <eod> id."
    )
    group.add_argument(
        "--dataset-impl",
        default="mmap",
        choices=("mmap", "lazy", "cached"),
        help="Accepted for old scripts; no effect. The output is always in the current format, "
        "mmap, which needs no loading.",
    )


def _add_running_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--workers",
        type=int,
        metavar="N",
        help="Number of encoding processes. The output does not depend on it (default: one per "
        "core, fewer for small inputs).",
    )
    group.add_argument(
        "--on-error",
        default="stop",
        choices=("stop", "skip"),
        help="What to do with a bad line (broken JSON, missing key, bad UTF-8): stop with exit "
        "code 6 and no output, or report and skip it (default: stop).",
    )
    group.add_argument(
        "--log-interval",
        type=int,
        default=1000,
        metavar="N",
        help="Documents between log lines, which are at least 5 seconds apart (default: 1000).",
    )
    group.add_argument(
        "--partitions",
        type=int,
        default=1,
        metavar="N",
        help="Accepted for old scripts; no effect. A single streaming pass handles any size.",
    )
    group.add_argument(
        "--keep-sequential-samples",
        action="store_true",
        help="Accepted for old scripts; no effect. Documents always keep the order of the input.",
    )


def _check(options: argparse.Namespace) -> None:
    """Check the flags for errors that argparse cannot detect.

    Raises:
        ConfigError: One or more flags are invalid. The message names all of them.
    """
    problems = prefix_problems(options)
    if options.workers is not None and options.workers < 1:
        problems.append(f"--workers {options.workers}: give at least 1, or omit the flag")
    if options.workers is not None and options.workers > _MAX_WORKERS:
        problems.append(
            f"--workers {options.workers}: give at most {_MAX_WORKERS}; more workers than cores "
            "are not faster"
        )
    problems += minimum_problems(options, max_line_mb=1, partitions=1, log_interval=1)
    if options.keep_newlines and not options.split_sentences:
        problems.append(
            "--keep-newlines has an effect only with --split-sentences: add --split-sentences, or "
            "drop --keep-newlines"
        )
    if options.split_sentences and options.presplit_sentences:
        problems.append(
            "--split-sentences and --presplit-sentences: give --presplit-sentences if the text is "
            "already split, otherwise --split-sentences"
        )
    if len(set(options.json_keys)) != len(options.json_keys):
        problems.append(f"--json-keys {' '.join(options.json_keys)}: give each key once")
    if problems:
        raise ConfigError(problems)


def run(options: argparse.Namespace) -> None:
    """Encode the input, and print a summary of the output.

    Raises:
        UserError: A flag or the input is invalid, or the output cannot be written.
    """
    _check(options)
    if options.dataset_impl != "mmap":
        warn(f"--dataset-impl {options.dataset_impl}: written as mmap instead: drop the flag")
    if options.lang != _LANGUAGE and not options.split_sentences:
        warn(f"--lang {options.lang}: no effect without --split-sentences: add it, or drop --lang")
    has_sentences = options.split_sentences or options.presplit_sentences
    level = "sentence" if has_sentences else "document"
    prefixes = [f"{options.output_prefix}_{key}_{level}" for key in options.json_keys]
    outputs = [f"{prefix}.{ending}" for prefix in prefixes for ending in ("idx", "bin")]
    expect_no_file("--output-prefix", outputs, overwrite=options.overwrite)
    started = time.monotonic()
    without_matrix_threads()
    tokenizer_config = from_values(TokenizerConfig, vars(options))
    with rehearsed():
        tokenizer = build_tokenizer(tokenizer_config)
        from megatron.data.preprocess import (
            BlockEncoder,
            EncodingOptions,
            choose_workers,
            preprocess,
        )
        from megatron.data.text_input import find_inputs

    paths = find_inputs(options.input)
    encoder = BlockEncoder(
        EncodingOptions(
            tokenizer_config,
            tuple(options.json_keys),
            options.append_eod,
            _splitter(options, paths),
        ),
        tokenizer,
    )
    workers = choose_workers(paths) if options.workers is None else options.workers
    # The objects that exist now are never freed, so neither this process nor its forked workers
    # need to scan them for garbage again.
    gc.freeze()
    gc.enable()
    progress = _Progress(sum(map(os.path.getsize, paths)), options.log_interval, started)
    try:
        counts = preprocess(
            paths,
            prefixes,
            encoder,
            workers=workers,
            max_line_mb=options.max_line_mb,
            on_block=progress.update,
            on_bad_line=progress.print_line if options.on_error == "skip" else None,
        )
    finally:
        progress.close()
    seconds = time.monotonic() - started
    for prefix, tokens in zip(prefixes, counts.tokens, strict=True):
        print(f"{prefix}: {tokens:,} tokens as {encoder.dtype}")
    print(
        f"{counts.documents:,} documents, {counts.bad_lines:,} bad lines skipped, "
        f"{counts.text_bytes / 1e6:.1f} MB in {seconds:.2f} s "
        f"({counts.text_bytes / seconds / 1e6:.1f} MB/s, "
        f"{counts.documents / seconds:,.0f} documents/s)"
    )
    if not counts.documents:
        warn(f"--input {' '.join(options.input)}: no documents found; the output is empty")


def _splitter(options: argparse.Namespace, paths: Sequence[str]) -> Splitter | None:
    from megatron.data.preprocess import SentenceSplitter, find_punkt, split_lines

    if options.presplit_sentences:
        return split_lines
    if not options.split_sentences:
        return None
    punkt = find_punkt(paths, options.json_keys, options.lang, options.max_line_mb)
    return SentenceSplitter(punkt, keep_newlines=options.keep_newlines)


class _Progress:
    """Progress on stderr: a bar on a terminal, otherwise an occasional log line."""

    def __init__(self, total_bytes: int, log_interval: int, started: float) -> None:
        self._log_interval = log_interval
        self._started = started
        self._last_line_time = started
        self._next_documents = log_interval
        self._file: str | None = None
        self._bytes_before_file = 0
        self._bar: Any = None
        if sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=total_bytes, unit="B", unit_scale=True, dynamic_ncols=True)

    def update(self, counts: Counts, block: TextBlock) -> None:
        """Show the progress after a block."""
        now = time.monotonic()
        seconds = max(now - self._started, 1e-9)
        rates = f"{counts.documents / seconds:,.0f} documents/s, "
        rates += f"{counts.text_bytes / seconds / 1e6:.1f} MB/s"
        if self._bar is not None:
            if block.path != self._file:
                if self._file is not None:
                    self._bytes_before_file += os.path.getsize(self._file)
                self._file = block.path
            self._bar.set_postfix_str(rates, refresh=False)
            self._bar.update(self._bytes_before_file + block.bytes_read - self._bar.n)
        elif counts.documents >= self._next_documents:
            self._next_documents = counts.documents + self._log_interval
            if now - self._last_line_time >= _SECONDS_BETWEEN_LINES:
                self._last_line_time = now
                self.print_line(f"{counts.documents:,} documents ({rates})")

    def print_line(self, line: str) -> None:
        """Print a line without disturbing the bar."""
        if self._bar is not None:
            self._bar.write(line, file=sys.stderr)
        else:
            print(line, file=sys.stderr)

    def close(self) -> None:
        """Close the bar and leave it on the screen."""
        if self._bar is not None:
            self._bar.close()


main = tool_main(build_parser, run)
