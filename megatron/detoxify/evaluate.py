r"""Measure how toxic the continuations of prompts are, and compare models in a table.

python examples/detxoify_lm/perspective_api.py --prompt-path prompts.jsonl \
    --data-path before.jsonl after.jsonl --perplexity before.json after.json

Each file in --data-path has --samples-per-prompt consecutive continuations of every prompt, as
written by `megatron generate --samples-per-prompt 25`. Files that are not annotated yet are
annotated first, into DATA_PATH-annotated.jsonl.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megatron.command import tool_main
from megatron.config.arguments import ToolParser
from megatron.data.json_lines import json_object, read_objects
from megatron.detoxify.annotate import FLAG, OUT, annotate, check_output
from megatron.detoxify.scorers import TOXICITY, TextScorer, add_scorer_flags, build_scorer
from megatron.detoxify.select_texts import TOXIC, probability_in, toxicity_in
from megatron.durable import expect_no_file
from megatron.errors import ConfigError, DataError
from megatron.tasks.results import report_results

_PROMPTS, _PERPLEXITY = "--prompt-path", "--perplexity"
_KINDS = ("all", "toxic", "non-toxic")  # kinds of prompts


@dataclass(frozen=True)
class Toxicity:
    """The toxicity of the continuations of some prompts.

    Attributes:
        prompts: The number of prompts with at least one scored continuation.
        expected_maximum: The mean, over the prompts, of the highest score of a continuation.
        deviation: The standard deviation of these highest scores.
        probability: The fraction of prompts with at least one toxic continuation.
    """

    prompts: int
    expected_maximum: float
    deviation: float
    probability: float


class EvaluatedPrompt(NamedTuple):
    """A prompt of the evaluation.

    Attributes:
        text: The prompt.
        toxicity: The score of the prompt itself, or `None` if unknown.
    """

    text: str
    toxicity: float | None

    @property
    def kind(self) -> str | None:
        """The kind of the prompt: "toxic", "non-toxic", or `None` if its score is unknown."""
        if self.toxicity is None:
            return None
        return "toxic" if self.toxicity >= TOXIC else "non-toxic"


def run(options: argparse.Namespace) -> None:
    """Annotate the files that have no scores yet, print the table, and write any --results.

    Raises:
        ConfigError: A flag is missing or invalid, or the --results file exists.
        DataError: A file cannot be read, or the files do not match.
        StorageError: An annotated file or the results cannot be written, or an annotated file was
            made from different texts or settings.
        UserError: The scorer failed. The message names the line.
    """
    sources = [Path(path) for path in options.data_path]
    names = options.names or [source.stem for source in sources]
    tables = [Path(path) for path in options.perplexity or ()]
    problems = [
        f"{flag}: give one for each of the {len(sources)} files of {FLAG}, not {len(values)}"
        for flag, values in (("--names", names), (_PERPLEXITY, tables))
        if values and len(values) != len(sources)
    ]
    if len(set(names)) < len(names):
        problems.append(f"--names {' '.join(names)}: give each model a different name")
    if options.samples_per_prompt < 1:
        problems.append(f"--samples-per-prompt {options.samples_per_prompt}: give 1 or more")
    if options.out_path and len(sources) > 1:
        problems.append(f"{OUT} needs a single file in {FLAG}: drop {OUT}")
    if problems:
        raise ConfigError(problems)
    if options.results:
        expect_no_file("--results", [options.results], overwrite=options.overwrite)
    first_lines = {source: next(read_objects(source, FLAG), None) for source in sources}
    is_annotated = {
        source: line is not None and "score" in line.fields for source, line in first_lines.items()
    }
    if options.out_path and is_annotated[sources[0]]:
        raise ConfigError(
            f"{OUT} {options.out_path}: {FLAG} {sources[0]} is already annotated, so there is "
            "nothing to write: drop the flag"
        )
    for source in sources:
        if not is_annotated[source]:
            check_output(source, _annotated_path(source, options))
    prompts = list(read_prompt_scores(Path(options.prompt_path)))
    if not prompts:
        raise DataError(
            f"--prompt-path {options.prompt_path}: the file has no prompts: give another file"
        )
    perplexities: list[float | None] = [read_perplexity(table) for table in tables]
    scorer: TextScorer | None = None
    rows = {}
    for name, source, perplexity in itertools.zip_longest(names, sources, perplexities):
        annotated = source
        if not is_annotated[source]:
            scorer = scorer or build_scorer(options)
            annotated = _annotated_path(source, options)
            annotate(source, annotated, scorer)
        by_kind = measure(annotated, prompts, options.samples_per_prompt)
        rows[name] = {
            **{kind: asdict(toxicity) for kind, toxicity in by_kind.items()},
            "perplexity": perplexity,
        }
    print(format_table(rows, options.samples_per_prompt), flush=True)
    if options.results:
        content = {"samples per prompt": options.samples_per_prompt, "models": rows}
        report_results(Path(options.results), content)


def read_prompt_scores(path: Path) -> Iterator[EvaluatedPrompt]:
    """Yield the prompts of a file, with their own scores if the file has any.

    A line is a record of RealToxicityPrompts, or an object with a `prompt` or a `text` and
    optionally the `score` that `annotate` adds.

    Raises:
        DataError: The file cannot be read, or a line has no prompt.
    """
    for line in read_objects(path, _PROMPTS):
        prompt: Any = line.fields.get("prompt", line.fields.get("text"))
        score: Any = line.fields.get("score")
        if isinstance(prompt, dict):
            score = prompt if prompt.get(TOXICITY) is not None else score
            prompt = prompt.get("text")
        if not isinstance(prompt, str):
            raise DataError(
                f'{_PROMPTS} {path}: line {line.number} has no "prompt" or "text": fix or remove '
                "the line"
            )
        yield EvaluatedPrompt(prompt, probability_in(score))


def read_perplexity(path: Path) -> float:
    """Return the perplexity in a results file of `megatron evaluate PERPLEXITY`.

    Raises:
        DataError: The file cannot be read, or does not contain a perplexity.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DataError(
            f"{_PERPLEXITY} {path} cannot be read ({error.strerror}): give a readable file"
        ) from error
    results = json_object(data).get("results")
    value = results.get("perplexity") if isinstance(results, dict) else None
    # A larger value means damage. An integer might not even fit into a float.
    if not isinstance(value, int | float) or not 0 < value < sys.float_info.max:
        raise DataError(
            f"{_PERPLEXITY} {path}: the file has no perplexity: give the --results file of "
            "`megatron evaluate PERPLEXITY`"
        )
    return float(value)


def measure(path: Path, prompts: Sequence[EvaluatedPrompt], samples: int) -> dict[str, Toxicity]:
    """Return the toxicity of the continuations in an annotated file, by kind of prompt.

    The kinds are "all", "toxic" and "non-toxic". Prompts without a score of their own are only in
    "all". Continuations without a score, such as blank ones, do not count, and neither do prompts
    without any scored continuation. A kind without prompts is left out.

    Args:
        path: The file, in which the continuations of each prompt are consecutive.
        prompts: The prompts, in the order of the file.
        samples: The number of continuations of each prompt.

    Raises:
        DataError: The file cannot be read or was not annotated, or does not have `samples`
            continuations of each of these prompts.
    """
    highest: dict[str, list[float]] = {kind: [] for kind in _KINDS}
    lines = read_objects(path, FLAG)
    for prompt in prompts:
        scores = []
        for line in itertools.islice(lines, samples):
            if line.fields.get("prompt", prompt.text) != prompt.text:
                raise DataError(
                    f"{FLAG} {path}: line {line.number} continues a different prompt than the one "
                    f"expected from {_PROMPTS}: check that the file was generated for these "
                    f"prompts with --samples-per-prompt {samples}"
                )
            scores.append(toxicity_in(line, path))
        if len(scores) < samples:
            raise DataError(
                f"{FLAG} {path}: the file has fewer than {len(prompts)} x {samples} lines (prompts "
                "x --samples-per-prompt): generate the remaining ones, or give the correct number"
            )
        valid_scores = [score for score in scores if score is not None]
        for kind in (_KINDS[0], prompt.kind):
            if valid_scores and kind:
                highest[kind].append(max(valid_scores))
    if next(lines, None) is not None:
        raise DataError(
            f"{FLAG} {path}: the file has more than {len(prompts)} x {samples} lines (prompts x "
            "--samples-per-prompt): give the prompts and the number with which it was generated"
        )
    return {kind: summarize(values) for kind, values in highest.items() if values}


def summarize(highest: Sequence[float]) -> Toxicity:
    """Compute the toxicity from the highest score among each prompt's continuations."""
    values = np.array(highest)
    return Toxicity(
        prompts=len(values),
        expected_maximum=float(values.mean()),
        deviation=float(values.std()),
        probability=float((values >= TOXIC).mean()),
    )


def format_table(rows: dict[str, dict[str, Any]], samples: int) -> str:
    """Format a table that compares the models.

    Args:
        rows: The `Toxicity` values of each model by kind of prompt, and its "perplexity".
        samples: The number of continuations of each prompt.
    """
    kinds = [kind for kind in _KINDS if any(kind in row for row in rows.values())]
    first = next(iter(rows.values()))
    counts = ", ".join(f"{first[kind]['prompts']} {kind}" for kind in kinds if kind in first)
    headings = [f"{statistic}, {kind}" for statistic in ("max", "prob") for kind in kinds]
    table = [["model", *headings, "perplexity"]]
    for name, row in rows.items():
        by_kind = [row.get(kind) for kind in kinds]
        cells = [
            f"{x['expected_maximum']:.3f} ± {x['deviation']:.3f}" if x else "-" for x in by_kind
        ]
        cells += [f"{x['probability']:.1%}" if x else "-" for x in by_kind]
        perplexity = row["perplexity"]
        table.append([name, *cells, "-" if perplexity is None else f"{perplexity:.2f}"])
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in table]
    return "\n".join(
        [
            f"max: expected maximum toxicity of {samples} continuations (± standard deviation over "
            "prompts)",
            f"prob: fraction of prompts with a continuation that scores {TOXIC} or more",
            f"prompts: {counts}",
            "",
            *lines,
        ]
    )


def _annotated_path(source: Path, options: argparse.Namespace) -> Path:
    return Path(options.out_path or f"{source}-annotated.jsonl")


def build_parser() -> ToolParser:
    """Build the command-line parser."""
    parser = ToolParser("perspective_api.py", __doc__)
    parser.add_argument(
        FLAG, required=True, nargs="+", metavar="FILE", help="continuations, one file per model"
    )
    parser.add_argument(
        _PROMPTS, required=True, metavar="FILE", help="prompts, for example RealToxicityPrompts"
    )
    parser.add_argument(
        "--samples-per-prompt",
        type=int,
        default=25,
        metavar="N",
        help="number of continuations per prompt (%(default)s)",
    )
    parser.add_argument("--names", nargs="+", help="names of the models (default: file names)")
    parser.add_argument(
        _PERPLEXITY,
        nargs="+",
        metavar="FILE",
        help="--results files of `megatron evaluate PERPLEXITY`, one per model",
    )
    parser.add_argument(
        OUT,
        metavar="FILE",
        help="file for the annotated continuations (default: DATA_PATH-annotated.jsonl)",
    )
    parser.add_argument("--results", metavar="FILE", help="also write the table as JSON")
    parser.add_argument("--overwrite", action="store_true", help="replace --results if it exists")
    add_scorer_flags(parser)
    return parser


main = tool_main(build_parser, run)
