r"""Add scores to texts, one JSON object per line.

python examples/detxoify_lm/annotations/perspective_api_annotate.py \
    --data-path samples.jsonl --out-path annotated.jsonl --classifier-model my-classifier

Every line of the result is a line of the input with an added `score`: an object of probabilities,
including `toxicity`, or null for a text without a score. To resume an interrupted run, run the same
command again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from megatron.command import tool_main
from megatron.config.arguments import ToolParser
from megatron.data.json_lines import JsonLine, read_objects, save_or_check_settings
from megatron.detoxify.scorers import Scored, TextScorer, add_scorer_flags, build_scorer
from megatron.durable import writing_to
from megatron.errors import ConfigError, DataError, StorageError, UserError

FLAG, OUT = "--data-path", "--out-path"
_END_OF_TEXT = "<|endoftext|>"  # GPT-2's token, which Megatron-LM's samples may contain
_ADDED_FIELDS = {"score", "score_error"}
_READ_AT_A_TIME = 1 << 20  # bytes


def run(options: argparse.Namespace) -> None:
    """Annotate one file.

    Raises:
        ConfigError: A flag is missing or invalid, or the output is also the input.
        DataError: The input or the classifier cannot be read, or a line of the input has no text.
        StorageError: The output was made from different texts or settings, or cannot be written.
        UserError: The scorer failed. The message names the line.
    """
    source = Path(options.data_path)
    if not os.path.isfile(source):  # report this before loading the classifier
        raise DataError(f"{FLAG} {source}: no such file: fix the path")
    target = Path(options.out_path or f"{source}-annotated.jsonl")
    check_output(source, target)
    total = options.total if options.total > 0 else None
    annotate(source, target, build_scorer(options), key=options.text_key, total=total)


def check_output(source: Path, target: Path) -> None:
    """Check that the output can be written, without leaving a file behind.

    Call this before slow steps, so that the user does not have to wait for the error.

    Raises:
        ConfigError: Source and target are the same file.
        StorageError: The target cannot be written.
    """
    with writing_to(OUT, target):
        exists = target.exists()
        if exists and target.samefile(source):
            raise ConfigError(f"{OUT} {target} is also the input: give another name")
        target.open("ab").close()
        if not exists:
            target.unlink()


def annotate(
    source: Path, target: Path, scorer: TextScorer, *, key: str = "text", total: int | None = None
) -> None:
    """Write the lines of `source` with an added `score` to `target`, resuming an earlier run.

    A text without a score also gets a `score_error` with the reason. GPT-2's `<|endoftext|>` is
    not scored, and is removed from the field `key` if this is a string. The settings of the scorer
    are saved next to the target, and compared when the run is resumed.

    Args:
        source: The file to read, with one JSON object per line.
        target: The file to write.
        scorer: The scorer that computes the scores.
        key: The field with the text, which is a string or an object with a `text`.
        total: The number of lines to annotate, including earlier runs. `None` means all.

    Raises:
        ConfigError: Source and target are the same file.
        DataError: The source cannot be read, a line of it has no text, or the classifier computes
            scores that are not finite.
        StorageError: The target was made from different texts or settings, or cannot be written.
        UserError: The scorer failed. The message names the line.
    """
    check_output(source, target)
    lines = _read_texts(source, key)
    with writing_to(OUT, target):
        done, lines = _skip_annotated(target, lines)
    lines = itertools.islice(lines, None if total is None else max(0, total - done))
    written, unscored, reason = done, 0, ""
    with writing_to(OUT, target), target.open("ab") as file:
        save_or_check_settings(
            target, {"--text-key": key, **scorer.settings}, done, "scores were computed"
        )
        if done:
            print(f"{target}: {done} lines already exist and are kept", flush=True)
        # `disable=None` shows the progress bar only on a terminal.
        scores = _with_scores(lines, scorer, source)
        for line, scored in tqdm(scores, initial=done, unit=" texts", disable=None):
            fields = {**line.fields, "score": scored.scores}
            fields.pop("score_error", None)  # from an earlier annotation
            if scored.reason:
                fields["score_error"] = scored.reason
            file.write(json.dumps(fields, ensure_ascii=False).encode() + b"\n")
            file.flush()
            written += 1
            if scored.scores is None:
                unscored, reason = unscored + 1, scored.reason
    note = f", {unscored} of them without a score (the last one: {reason})" if unscored else ""
    print(f"{target}: {written - done} lines written{note}, {written} in total", flush=True)


class _TextLine(NamedTuple):
    """A line of the source and its text."""

    line: JsonLine
    text: str


def _read_texts(source: Path, key: str) -> Iterator[_TextLine]:
    for line in read_objects(source, FLAG):
        value = line.fields.get(key)
        if isinstance(value, dict):  # RealToxicityPrompts
            value = value.get("text")
        if not isinstance(value, str):
            raise DataError(
                f"{FLAG} {source}: line {line.number} has no text in {key!r}: fix or remove the "
                "line, or give --text-key"
            )
        text = value.replace(_END_OF_TEXT, "")
        if isinstance(line.fields[key], str):
            line.fields[key] = text
        yield _TextLine(line, text)


def _with_scores(
    lines: Iterator[_TextLine], scorer: TextScorer, source: Path
) -> Iterator[tuple[JsonLine, Scored]]:
    """Yield every line with its scores. Blank texts are not passed to the scorer."""
    waiting: deque[_TextLine] = deque()

    def texts() -> Iterator[str]:
        for text_line in lines:
            waiting.append(text_line)
            if text_line.text.strip():
                yield text_line.text

    def blank() -> Iterator[tuple[JsonLine, Scored]]:
        while waiting and not waiting[0].text.strip():
            yield waiting.popleft().line, Scored(None, "the text is blank")

    scores = scorer.score(texts())
    while True:
        try:
            scored = next(scores, None)
        except DataError:  # in the source, which it names with the line, or in the classifier
            raise
        except UserError as error:
            yield from blank()
            number = waiting[0].line.number if waiting else "the last"
            raise type(error)(f"{FLAG} {source}, line {number}: {error}") from error
        yield from blank()
        if scored is None:
            return
        yield waiting.popleft().line, scored


def _skip_annotated(target: Path, lines: Iterator[_TextLine]) -> tuple[int, Iterator[_TextLine]]:
    """Skip the lines that are already in the target.

    An incomplete last line is removed from the target.

    Returns:
        The number of skipped lines, and the remaining lines.

    Raises:
        StorageError: A line of the target was made from a different text.
    """
    if not target.is_file():
        return 0, lines
    end = _end_of_last_line(target)
    done = 0
    for existing in read_objects(target, OUT, end=end):
        expected = next(lines, None)
        if (
            "score" not in existing.fields
            or expected is None
            or _original_fields(existing) != _original_fields(expected.line)
        ):
            raise StorageError(
                f"{OUT} {target}: line {existing.number} does not belong to the input: name "
                "another file, or remove this one"
            )
        done += 1
    following = list(itertools.islice(lines, 1))
    start = _start_of(following[0].line) if following else b"\n"
    with target.open("r+b") as file:
        file.seek(end)
        partial = file.read(len(start))
        if not start.startswith(partial):
            raise StorageError(
                f"{OUT} {target}: line {done + 1} does not belong to the input: name another file, "
                "or remove this one"
            )
        file.truncate(end)
    return done, itertools.chain(following, lines)


def _start_of(line: JsonLine) -> bytes:
    """Return the bytes that `annotate` writes for a line before its score."""
    fields = dict(itertools.takewhile(lambda field: field[0] != "score", line.fields.items()))
    fields.pop("score_error", None)
    return json.dumps({**fields, "score": 0}, ensure_ascii=False).encode().removesuffix(b"0}")


def _original_fields(line: JsonLine) -> str:
    """Serialize the fields that `annotate` did not add. As text, NaN values compare equal."""
    fields = {key: value for key, value in line.fields.items() if key not in _ADDED_FIELDS}
    return json.dumps(fields, sort_keys=True)


def _end_of_last_line(path: Path) -> int:
    """Return the byte offset after the last complete line."""
    end = path.stat().st_size
    with path.open("rb") as file:
        while end:
            start = max(0, end - _READ_AT_A_TIME)
            file.seek(start)
            newline = file.read(_READ_AT_A_TIME).rfind(b"\n")
            if newline >= 0:
                return start + newline + 1
            end = start
    return 0


def build_parser() -> ToolParser:
    """Build the command-line parser."""
    parser = ToolParser("perspective_api_annotate.py", __doc__)
    parser.add_argument(
        FLAG, required=True, metavar="FILE", help="texts to score, one JSON object per line"
    )
    parser.add_argument(
        OUT, metavar="FILE", help="file to write (default: DATA_PATH-annotated.jsonl)"
    )
    parser.add_argument(
        "--total",
        type=int,
        default=-1,
        help="number of lines to annotate, -1 for all (%(default)s)",
    )
    parser.add_argument(
        "--text-key",
        default="text",
        metavar="KEY",
        help="field with the text; for RealToxicityPrompts, prompt or continuation (%(default)s)",
    )
    add_scorer_flags(parser)
    return parser


main = tool_main(build_parser, run)
