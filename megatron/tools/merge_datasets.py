"""Join indexed datasets: all those in a folder, in alphabetical order, or a given list.

    python tools/merge_datasets.py --input shards --output-prefix whole
    python tools/merge_datasets.py --datasets a_text_document b_text_document --output-prefix whole

This writes whole.bin and whole.idx. All datasets must come from the same tokenizer and have ids of
the same type. tools/convert_dataset.py does the reverse and splits a dataset.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron.command import tool_main
from megatron.config.arguments import ToolParser, prefix_problems
from megatron.durable import expect_no_file
from megatron.errors import ConfigError, DataError

if TYPE_CHECKING:
    from megatron.data.indexed import IndexedDataset


def build_parser() -> ToolParser:
    """Build the command-line parser."""
    unsupported = {"--multimodal": "image models are not supported: omit it"}
    parser = ToolParser("merge_datasets.py", __doc__, unsupported)
    group = parser.add_argument_group("Input and output")
    group.add_argument(
        "--input", metavar="DIR", help="Folder with the .bin and .idx files to join."
    )
    group.add_argument(
        "--datasets",
        nargs="+",
        metavar="PATH",
        help="Paths of the datasets to join, without .bin and .idx, in this order.",
    )
    group.add_argument(
        "--output-prefix",
        required=True,
        metavar="PATH",
        help="Path of the output files, PATH.bin and PATH.idx.",
    )
    group.add_argument("--overwrite", action="store_true", help="Replace existing output files.")
    return parser


def find_prefixes(folder: str, output_prefix: str) -> list[str]:
    """Return the prefixes of the datasets in `folder`, sorted, without an earlier run's output.

    Raises:
        DataError: There is no such folder, it has no dataset, or a dataset lacks a file.
    """
    if not os.path.isdir(folder):
        raise DataError(f"--input {folder}: not a folder; give the folder with the datasets")
    stems: dict[str, set[str]] = {}
    for entry in sorted(os.listdir(folder)):
        stem, suffix = os.path.splitext(entry)
        if suffix in (".bin", ".idx"):
            stems.setdefault(os.path.join(folder, stem), set()).add(suffix)
    stems = {
        stem: suffixes
        for stem, suffixes in stems.items()
        if os.path.abspath(stem) != os.path.abspath(output_prefix)
    }
    for stem, suffixes in stems.items():
        if len(suffixes) < 2:
            missing = ({".bin", ".idx"} - suffixes).pop()
            raise DataError(
                f"--input {folder}: {stem}{missing} is missing; restore it, or remove "
                f"{stem}{suffixes.pop()}"
            )
    if not stems:
        raise DataError(
            f"--input {folder}: there are no .bin and .idx files; give the folder with the datasets"
        )
    return sorted(stems)


def _expect_output_not_input(
    options: argparse.Namespace, members: Sequence[IndexedDataset]
) -> None:
    """Check that the output is not one of the inputs. The result of an earlier run may be replaced.

    Raises:
        DataError: The output would replace a dataset that is not the result of an earlier run.
    """
    import numpy as np

    from megatron.data.indexed import IndexedDataset

    folder, name = os.path.split(options.output_prefix)
    if options.datasets is not None:
        if os.path.abspath(options.output_prefix) in map(os.path.abspath, options.datasets):
            raise DataError(
                f"--output-prefix {options.output_prefix} is one of --datasets: give another name"
            )
        return
    if f"{name}.idx" not in os.listdir(options.input) or not os.path.samefile(
        folder or ".", options.input
    ):
        return
    lengths = [data.sequence_lengths for data in members]
    if not np.array_equal(
        IndexedDataset(options.output_prefix).sequence_lengths, np.concatenate(lengths)
    ):
        raise DataError(
            f"--output-prefix {options.output_prefix} is a dataset in --input {options.input} that "
            "is not the result of joining the others: give another name, or move it to another "
            "folder"
        )


def run(options: argparse.Namespace) -> None:
    """Join the datasets.

    Raises:
        UserError: A flag is invalid, a dataset is damaged or has ids of a different type, or the
            output exists or cannot be written.
    """
    from megatron.data.indexed import IndexedDataset, IndexedDatasetBuilder

    if (options.input is None) == (options.datasets is None):
        raise ConfigError("give either --input DIR or --datasets PATH PATH ...")
    if problems := prefix_problems(options):
        raise ConfigError(problems)
    prefixes = options.datasets or find_prefixes(options.input, options.output_prefix)
    # Opening a dataset checks it, so damage is found before anything is written.
    datasets = [IndexedDataset(prefix) for prefix in prefixes]
    dtypes = {data.prefix: data.dtype for data in datasets}
    _expect_output_not_input(options, datasets)
    outputs = [f"{options.output_prefix}.{ending}" for ending in ("idx", "bin")]
    expect_no_file("--output-prefix", outputs, overwrite=options.overwrite)
    for prefix, dtype in dtypes.items():
        if dtype != dtypes[prefixes[0]]:
            raise DataError(
                f"{prefix} contains {dtype}, but {prefixes[0]} contains {dtypes[prefixes[0]]}: "
                f"only datasets from the same tokenizer can be joined; omit {prefix} or, if it is "
                "from the same tokenizer, convert it with tools/convert_dataset.py --vocab-size"
            )
    with IndexedDatasetBuilder(options.output_prefix, dtypes[prefixes[0]]) as builder:
        for prefix in prefixes:
            builder.add_index(prefix)
            print(prefix)
    print(
        f"{options.output_prefix}: {len(prefixes)} datasets, {builder.num_documents:,} documents, "
        f"{builder.num_sequences:,} sequences, {builder.num_tokens:,} tokens"
    )


main = tool_main(build_parser, run)
