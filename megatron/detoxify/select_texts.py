r"""Select the texts with the lowest toxicity.

python examples/detxoify_lm/annotations/filter-selfgeneration.py \
    --data-path annotated.jsonl --out-path nontoxic.jsonl

The input is the output of perspective_api_annotate.py. By default, half of the lines are kept, in
random order.
"""

from __future__ import annotations

import argparse
import os
import random
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron.command import tool_main
from megatron.config.arguments import ToolParser
from megatron.data.json_lines import JsonLine, read_objects
from megatron.detoxify.annotate import FLAG, OUT
from megatron.detoxify.scorers import TOXICITY
from megatron.durable import atomic_file, expect_no_file, sync_folder, writing_to
from megatron.errors import ConfigError, DataError

TOXIC = 0.5  # texts with at least this score count as toxic


def run(options: argparse.Namespace) -> None:
    """Write the least toxic texts of a file to another one in random order, and print statistics.

    Raises:
        ConfigError: A flag is out of range, or the output exists or is also the input.
        DataError: The input cannot be read or was not annotated, or none of its lines can be kept.
        StorageError: The output cannot be written.
    """
    if not 0 < options.keep <= 1:
        raise ConfigError(f"--keep {options.keep:g}: give a fraction above 0, at most 1")
    source = Path(options.data_path)
    target = Path(options.out_path or f"{source}-nontoxic.jsonl")
    expect_no_file(OUT, [target], overwrite=options.overwrite)
    scored = read_scored(source)
    if os.path.exists(target) and target.samefile(source):
        raise ConfigError(f"{OUT} {target} is also the input: give another name")
    # Round first, because 0.29 * 100 is 28.999999999999996.
    selected = lowest_indices(scored.scores, int(round(scored.lines * options.keep, 6)))
    if not len(selected):
        raise DataError(
            f"{FLAG} {source}: none of its {scored.lines} lines can be kept: raise --keep or give "
            "more texts"
        )
    order = selected.tolist()
    random.Random(options.seed).shuffle(order)
    with (
        writing_to(OUT, target),
        source.open("rb") as file,
        atomic_file(target) as result,
    ):
        for index in order:
            file.seek(int(scored.starts[index]))
            result.write(file.readline().rstrip(b"\n") + b"\n")
    sync_folder(target.parent)
    print(f"{source}: {scored.lines} lines, {len(scored.scores)} of them with a score")
    _describe("all", scored.scores)
    _describe("kept", scored.scores[selected])
    print(f"{target}: {len(selected)} lines written")


class ScoredLines(NamedTuple):
    """The scored lines of a file.

    Attributes:
        lines: The number of lines in the file, with or without a score.
        scores: The toxicity of each line that has a score, `[n]`.
        starts: The byte offset at which each scored line begins, `[n]`.
    """

    lines: int
    scores: NDArray[np.float64]
    starts: NDArray[np.int64]


def read_scored(path: Path) -> ScoredLines:
    """Read the scores in a file that `annotate` wrote.

    Raises:
        DataError: The file cannot be read, or a line was not annotated.
    """
    scores, starts, lines = [], [], 0
    for line in read_objects(path, FLAG):
        lines += 1
        score = toxicity_in(line, path)
        if score is not None:
            scores.append(score)
            starts.append(line.start)
    return ScoredLines(lines, np.array(scores, np.float64), np.array(starts, np.int64))


def toxicity_in(line: JsonLine, path: Path) -> float | None:
    """Return the toxicity of an annotated line, or `None` if its text has no score.

    Raises:
        DataError: The line was not annotated, or its toxicity is not a number from 0 to 1.
    """
    score: Any = line.fields.get("score", "missing")
    if score is None:
        return None
    value = probability_in(score)
    if value is None:
        raise DataError(
            f'{FLAG} {path}: line {line.number} has no "score" with a "{TOXICITY}" from 0 to 1: '
            "annotate the file first with perspective_api_annotate.py"
        )
    return value


def probability_in(score: Any) -> float | None:
    """Return the toxicity in an object of scores, or `None` if it is missing or invalid."""
    value = score.get(TOXICITY) if isinstance(score, dict) else None
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= 1:
        return None
    return float(value)


def lowest_indices(scores: NDArray[np.float64], count: int) -> NDArray[np.intp]:
    """Return the sorted indices of the `count` lowest scores, preferring earlier ones on ties."""
    return np.sort(np.argsort(scores, kind="stable")[:count])


def _describe(name: str, scores: NDArray[np.float64]) -> None:
    toxic = float(np.mean(scores >= TOXIC))
    print(
        f"  {name.ljust(4)}  mean toxicity {scores.mean():.4f} (standard deviation "
        f"{scores.std():.4f}), from {scores.min():.4f} to {scores.max():.4f}; "
        f"{toxic:.1%} are at least {TOXIC}"
    )


def build_parser() -> ToolParser:
    """Build the command-line parser."""
    parser = ToolParser("filter-selfgeneration.py", __doc__)
    parser.add_argument(FLAG, required=True, metavar="FILE", help="annotated texts")
    parser.add_argument(
        OUT, metavar="FILE", help="file to write (default: DATA_PATH-nontoxic.jsonl)"
    )
    parser.add_argument(
        "--keep",
        type=float,
        default=0.5,
        metavar="SHARE",
        help="fraction of all lines to keep (%(default)s)",
    )
    parser.add_argument(
        "--seed", type=int, default=1234, help="seed of the random order (%(default)s)"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace the result if it exists")
    for name in ("--prompt-path", "--workers"):
        parser.add_argument(name, help="accepted for compatibility; no effect")
    return parser


main = tool_main(build_parser, run)
