r"""Split JSON lines at random into train.json, dev.json and test.json.

    python tools/split_json.py --input_files a.json b.json --output_dir split \
        --test_percent 0.05 0.01

This puts 5% of the lines into dev.json, 1% into test.json and the rest into train.json. For each of
these, a file with .map appended to its name records where each line comes from: the number of the
input file and the number of the line, both counted from 0. Lines are shuffled; the same seed always
gives the same files.
"""

from __future__ import annotations

import argparse
import contextlib
import math
from pathlib import Path

from megatron.command import tool_main
from megatron.config.arguments import ToolParser
from megatron.durable import atomic_file, expect_no_file, writing_to
from megatron.errors import ConfigError, DataError

_NAMES = ("train.json", "dev.json", "test.json")


def build_parser() -> ToolParser:
    """Build the command-line parser, with the flags of Megatron-LM's script."""
    parser = ToolParser("split_json.py", __doc__)
    add = parser.add_argument
    add(
        "--input_files",
        "--input",
        nargs="+",
        required=True,
        metavar="PATH",
        help="Uncompressed files of JSON lines.",
    )
    add("--output_dir", "--output-dir", required=True, metavar="DIR", help="Folder to write to.")
    add(
        "--test_percent",
        nargs="+",
        type=float,
        default=[0.05, 0.0],
        metavar="X",
        help="Fractions for dev.json and (optionally) test.json, from 0 to 1 (default: 0.05 0).",
    )
    add("--seed", type=int, default=1234, help="Seed of the shuffle (default: 1234).")
    add("--overwrite", action="store_true", help="Replace existing output files.")
    return parser


def run(options: argparse.Namespace) -> None:
    """Write the three files and their maps.

    Raises:
        UserError: A flag or the input is invalid, or the output cannot be written.
    """
    import numpy as np

    fractions = (*options.test_percent, 0.0)[:2]
    if len(options.test_percent) > 2 or min(fractions) < 0 or sum(fractions) > 1:
        values = " ".join(map(str, options.test_percent))
        raise ConfigError(
            f"--test_percent {values}: give the shares of dev.json and test.json, from 0 to 1, "
            "together at most 1"
        )
    paths = [Path(options.output_dir) / name for name in _NAMES]
    maps = [path.with_name(f"{path.name}.map") for path in paths]
    expect_no_file("--output_dir", [*paths, *maps], overwrite=options.overwrite)
    starts = [_line_starts(path) for path in options.input_files]
    total = sum(len(line_starts) - 1 for line_starts in starts)
    dev, test = (math.ceil(fraction * total) for fraction in fractions)
    if dev + test > total:
        test = total - dev
    files = np.repeat(np.arange(len(starts)), [len(line_starts) - 1 for line_starts in starts])
    lines = np.concatenate([np.arange(len(line_starts) - 1) for line_starts in starts])
    order = np.random.RandomState(options.seed).permutation(total)
    train = total - dev - test
    with contextlib.ExitStack() as stack:
        stack.enter_context(writing_to("--output_dir", options.output_dir))
        Path(options.output_dir).mkdir(parents=True, exist_ok=True)
        inputs = [stack.enter_context(open(path, "rb")) for path in options.input_files]
        for path, map_path, indices in zip(
            paths, maps, np.split(order, [train, train + dev]), strict=True
        ):
            output = stack.enter_context(atomic_file(path))
            map_file = stack.enter_context(atomic_file(map_path))
            map_file.write(b"file\tline #\n")
            for file, line in zip(files[indices].tolist(), lines[indices].tolist(), strict=True):
                start, end = starts[file][line : line + 2].tolist()
                inputs[file].seek(start)
                output.write(inputs[file].read(end - start).strip() + b"\n")
                map_file.write(f"{file}\t{line}\n".encode())
    for path, count in zip(paths, (train, dev, test), strict=True):
        print(f"{path}: {count:,} lines")


def _line_starts(path: str):  # type: ignore[no-untyped-def]  # numpy is imported inside
    """Return the byte offset of each line in a file, followed by the file's size in bytes.

    Raises:
        DataError: The file cannot be read, is compressed, or has no lines.
    """
    import numpy as np

    starts, size = [0], 0
    try:
        with open(path, "rb") as file:
            if file.read(4).startswith((b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"BZh")):
                raise DataError(
                    f"--input_files {path}: this file is compressed: decompress it first"
                )
            file.seek(0)
            for line in file:
                size += len(line)
                starts.append(size)
    except OSError as error:
        raise DataError(f"--input_files {path}: {error.strerror}; give a readable file") from error
    if not size:
        raise DataError(f"--input_files {path}: this file is empty: omit it")
    return np.array(starts, np.int64)


main = tool_main(build_parser, run)
