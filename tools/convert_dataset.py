"""Convert a dataset of token ids to current `.bin`/`.idx` files, or split it into parts.

    python tools/convert_dataset.py --input old --output-prefix new
    python tools/convert_dataset.py --input whole --output-prefix part --parts 4
    python tools/convert_dataset.py --input shards --output-prefix whole --eod-id 50256

The first command reads a dataset of either format (MMIDIDX, or TNTIDX, which `--dataset-impl lazy`
and `cached` wrote until 2023). The second one writes part_0 to part_3, which
tools/merge_datasets.py joins again. The third one reads a folder of numpy shards (`.npy`), in the
order of their names.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __package__ in (None, ""):
    # When this file is run as a script, the package next to its folder may not be installed.
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.command import tool_main
from megatron.config.arguments import ToolParser, minimum_problems, prefix_problems
from megatron.durable import expect_no_file
from megatron.errors import ConfigError, DataError

if TYPE_CHECKING:
    from megatron.data.indexed import DocumentTokens
    from megatron.data.npy import Shard

_SHARD_TOKENS = 1 << 22  # tokens of short documents that are written at a time


def build_parser() -> ToolParser:
    """Build the command-line parser."""
    parser = ToolParser("convert_dataset.py", __doc__)
    group = parser.add_argument_group("Input and output")
    group.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="PATH",
        help="A dataset's path without .bin and .idx; or .npy files, glob patterns or folders of "
        "them, with token ids [tokens] or [documents, tokens].",
    )
    group.add_argument(
        "--output-prefix",
        required=True,
        metavar="PATH",
        help="Path of the output files, PATH.bin and PATH.idx; for parts, PATH_0.bin and so on.",
    )
    group.add_argument("--overwrite", action="store_true", help="Replace existing output files.")
    group.add_argument(
        "--vocab-size",
        type=int,
        metavar="N",
        help="Store ids as tools/preprocess_data.py does for a tokenizer of N entries: as uint16 "
        "below 65,500, otherwise as int32 (default: as in the input).",
    )
    group.add_argument(
        "--eod-id",
        type=int,
        metavar="ID",
        help="Id that ends a document in .npy files of [tokens] (default: a file is one document).",
    )
    group = parser.add_argument_group("Parts")
    group.add_argument(
        "--parts", type=int, metavar="N", help="Write N parts with equal numbers of documents."
    )
    group.add_argument(
        "--documents-per-part", type=int, metavar="N", help="Write parts of N documents."
    )
    return parser


def _check(options: argparse.Namespace) -> None:
    problems = minimum_problems(options, parts=1, documents_per_part=1, vocab_size=1, eod_id=0)
    problems += prefix_problems(options)
    if options.parts is not None and options.documents_per_part is not None:
        problems.append("--parts and --documents-per-part: give only one of them")
    if problems:
        raise ConfigError(problems)


def run(options: argparse.Namespace) -> None:
    """Convert the dataset and print a summary of the output.

    Raises:
        UserError: A flag or the input is invalid, or the output cannot be written.
    """
    import numpy as np

    from megatron.data.indexed import IndexedDataset, best_dtype
    from megatron.data.npy import find_shards, open_shard

    _check(options)
    shards = [path for pattern in options.input for path in find_shards(pattern)]
    is_split = options.parts is not None or options.documents_per_part is not None
    if shards:
        if is_split:
            raise ConfigError(
                "--parts and --documents-per-part split a dataset: convert the .npy files first"
            )
        open_shards = [open_shard(path) for path in shards]
        default_dtype = np.uint16 if open_shards[0].ids.dtype.itemsize <= 2 else np.int32
        dtype = (
            np.dtype(default_dtype)
            if options.vocab_size is None
            else best_dtype(options.vocab_size)
        )
        _write(options, options.output_prefix, dtype, _shard_documents(open_shards, options.eod_id))
        return
    if len(options.input) > 1:
        raise ConfigError(
            f"--input {' '.join(options.input)}: give one dataset; tools/merge_datasets.py joins "
            "several"
        )
    if options.eod_id is not None:
        raise ConfigError("--eod-id is for .npy files; a dataset already has documents: drop it")
    data = IndexedDataset(options.input[0])
    dtype = data.dtype if options.vocab_size is None else best_dtype(options.vocab_size)
    if not is_split:
        _write(options, options.output_prefix, dtype, data.documents(0, data.num_documents))
        return
    num_documents, size = data.num_documents, options.documents_per_part
    parts = options.parts or -(-num_documents // size)
    if not 1 <= parts <= num_documents:
        raise ConfigError(f"--parts {parts}: the dataset has {num_documents} documents: give fewer")
    bounds = [num_documents * i // parts for i in range(parts + 1)]
    if options.parts is None:
        bounds = [*range(0, num_documents, size), num_documents]
    digits = len(str(len(bounds) - 2))
    prefixes = [f"{options.output_prefix}_{i:0{digits}}" for i in range(len(bounds) - 1)]
    outputs = [f"{prefix}.{ending}" for prefix in prefixes for ending in ("idx", "bin")]
    expect_no_file("--output-prefix", outputs, overwrite=options.overwrite)
    for prefix, (first, end) in zip(prefixes, pairwise(bounds), strict=True):
        _write(options, prefix, dtype, data.documents(first, end))


def _shard_documents(shards: Sequence[Shard], eod: int | None) -> Iterator[DocumentTokens]:
    """Yield the documents of shards, several short documents at a time."""
    import numpy as np

    from megatron.data.indexed import DocumentTokens

    pending: list[Any] = []
    size = 0

    def join() -> DocumentTokens:
        lengths = np.array([len(ids) for ids in pending])
        return DocumentTokens(np.concatenate(pending), lengths, np.ones(len(lengths), np.int64))

    for shard in shards:
        for ids in shard.documents(eod):
            pending.append(ids)
            size += len(ids)
            if size >= _SHARD_TOKENS:
                yield join()
                pending, size = [], 0
    if pending:
        yield join()


def _write(
    options: argparse.Namespace, prefix: str, dtype: Any, documents: Iterator[DocumentTokens]
) -> None:
    """Write one dataset, and print its size."""
    from megatron.data.indexed import IndexedDatasetBuilder

    outputs = [f"{prefix}.{ending}" for ending in ("idx", "bin")]
    expect_no_file("--output-prefix", outputs, overwrite=options.overwrite)
    if options.input == [prefix]:
        raise DataError(f"--output-prefix {prefix} is the input: give another name")
    with IndexedDatasetBuilder(prefix, dtype) as builder:
        for batch in documents:
            builder.add_documents(*batch)
    print(
        f"{prefix}: {builder.num_documents:,} documents, {builder.num_sequences:,} sequences, "
        f"{builder.num_tokens:,} tokens as {builder.dtype}"
    )


main = tool_main(build_parser, run)

if __name__ == "__main__":
    sys.exit(main())
