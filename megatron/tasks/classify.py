"""Labeled texts: readers of GLUE and RACE files, and samples made from their examples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron.command import print_line
from megatron.data.sample import Sample, SampleDataset, pad_to
from megatron.data.text_input import load_line
from megatron.errors import DataError
from megatron.tasks.target import Target
from megatron.tasks.texts import read_text
from megatron.tokenizer import Tokenizer

# The fraction of lines that may be broken, because QQP's own file has some.
_MAX_BROKEN_LINES = 0.01
_LETTERS = "ABCD"


@dataclass(frozen=True)
class Example:
    """A labeled text, pair of texts, or question with choices.

    Attributes:
        texts: One pair of texts, or one pair per choice. The second text of a pair is `None` if
            there is a single text.
        label: The index of the class or of the correct choice, or the value to predict.
    """

    texts: tuple[tuple[str, str | None], ...]
    label: int | float


@dataclass(frozen=True)
class Columns:
    """The columns of a GLUE task's tab-separated files. -1 is the last column.

    Attributes:
        counts: The allowed numbers of columns. There are several if the task's files differ.
        first: The column of the first text.
        second: The column of the second text, or `None` if there is a single text.
        label: The column of the label.
    """

    counts: tuple[int, ...]
    first: int
    second: int | None
    label: int


_YES_NO = ("0", "1")
_ENTAILS = ("entailment", "not_entailment")
_NLI = ("contradiction", "entailment", "neutral")
_TWO_SCORES = ("accuracy", "F1")
# Each task's target, with the labels as written in its files, and the columns of these files.
GLUE = {
    target.task: (target, columns)
    for target, columns in (
        (Target("MNLI", _NLI), Columns((12, 16), 8, 9, -1)),
        (Target("QQP", _YES_NO, scores=_TWO_SCORES), Columns((6,), 3, 4, 5)),
        (Target("SST-2", _YES_NO), Columns((2,), 0, None, 1)),
        (Target("CoLA", _YES_NO, scores=("matthews",)), Columns((4,), 3, None, 1)),
        (Target("MRPC", _YES_NO, scores=_TWO_SCORES), Columns((5,), 3, 4, 0)),
        (Target("STS-B", span=(0, 5), scores=("pearson", "spearman")), Columns((10,), 7, 8, 9)),
        (Target("QNLI", _ENTAILS), Columns((4,), 1, 2, 3)),
        (Target("RTE", _ENTAILS), Columns((4,), 1, 2, 3)),
        (Target("WNLI", _YES_NO), Columns((4,), 1, 2, 3)),
    )
}


def read_glue(task: str, path: str, flag: str = "--valid-data") -> list[Example]:
    """Return the examples in a file of a GLUE task. A header line is skipped.

    Broken lines are skipped with a warning if they are at most 1% of the good lines.

    Args:
        task: The name of the task.
        path: The tab-separated file.
        flag: The flag that names the file, for error messages.

    Raises:
        DataError: The file cannot be read, has no examples or has too many broken lines. The
            message names the first broken line.
    """
    target, columns = GLUE[task]
    examples: list[Example] = []
    broken_lines: list[str] = []
    for index, (number, line) in enumerate(_lines(path, flag)):
        cells = line.rstrip("\r").split("\t")
        problem = _problem(cells, target, columns)
        if problem is None:
            second = None if columns.second is None else _tidy(cells[columns.second])
            label = cells[columns.label]
            value = float(label) if target.span is not None else target.classes.index(label)
            examples.append(Example(((_tidy(cells[columns.first]), second),), value))
        elif index or not (
            len(cells) in columns.counts and any(map(str.isalpha, cells[columns.label]))
        ):
            broken_lines.append(f"{path}, line {number}: {problem}")
    if broken_lines and len(broken_lines) > _MAX_BROKEN_LINES * len(examples):
        raise DataError(
            f"--task {task}: {broken_lines[0]} ({len(broken_lines):,} broken lines in total): give "
            "a file in the format of this task"
        )
    if broken_lines:
        print_line(f"WARNING: {len(broken_lines):,} broken lines are skipped: {broken_lines[0]}")
    if not examples:
        raise DataError(f"--task {task}: {path}: this file has no examples: give another file")
    return examples


def _lines(path: str, flag: str) -> list[tuple[int, str]]:
    """Return the non-blank lines with their line numbers, counted from 1."""
    lines = enumerate(read_text(path, flag).split("\n"), start=1)
    return [(number, line) for number, line in lines if line.strip()]


def _problem(cells: Sequence[str], target: Target, columns: Columns) -> str | None:
    """Describe the error in a line's cells, or return `None` if there is no error."""
    if len(cells) not in columns.counts:
        expected = " or ".join(map(str, columns.counts))
        return f"{len(cells)} tab-separated columns, expected {expected}"
    label = cells[columns.label]
    if target.span is not None:
        low, high = target.span
        try:
            is_inside = low <= float(label) <= high
        except ValueError:
            is_inside = False
        if not is_inside:
            return f"label {label!r}, expected a number from {low} to {high}"
    elif label not in target.classes:
        return f"label {label!r}, expected one of {', '.join(target.classes)}"
    texts = [columns.first] if columns.second is None else [columns.first, columns.second]
    return None if all(cells[column].strip() for column in texts) else "an empty text"


def read_race(folder: str, flag: str = "--valid-data") -> list[Example]:
    """Return the questions in the `*.txt` files of a folder and its subfolders.

    Each question has four choices. A choice replaces the question's `_`, or follows the question.

    Args:
        folder: The folder, or a single file.
        flag: The flag that names the folder, for error messages.

    Raises:
        DataError: A file cannot be read, a line is not an article in RACE's format, or there are no
            articles. The message names the line.
    """
    files = sorted(Path(folder).rglob("*.txt")) if Path(folder).is_dir() else [Path(folder)]
    examples = [
        example
        for file in files
        for number, line in _lines(str(file), flag)
        for example in _questions(line, f"{file}, line {number}")
    ]
    if not examples:
        raise DataError(
            f"--task RACE: {folder}: there are no articles: give a folder with RACE's *.txt files"
        )
    return examples


def _questions(line: str, where: str) -> Iterator[Example]:
    try:
        article = load_line(line.encode())
        text = _tidy(article["article"])
        items = zip(article["questions"], article["options"], article["answers"], strict=True)
        for question, options, answer in items:
            label = _LETTERS.index(answer)
            if len(options) != len(_LETTERS):
                raise ValueError(f"{len(options)} options")
            yield Example(tuple((_joined(question, option), text) for option in options), label)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"--task RACE: {where}: not an article in RACE's format ({type(error).__name__}: "
            f"{error}): give JSON with article, questions, options (four each) and answers (A to D)"
        ) from None


def _joined(question: str, option: str) -> str:
    """Return a question whose blank is replaced by an answer, or with the answer appended."""
    return _tidy(question.replace("_", option) if "_" in question else f"{question} {option}")


def _tidy(text: str) -> str:
    """Return the text on one line, with single spaces."""
    return " ".join(text.split())


_MAX_CHOICE_TOKENS = 128  # token limit for a question with an answer, as in Megatron-LM


class TextSamples:
    """Examples in BERT's input format: [CLS] first [SEP] second [SEP], truncated at the end.

    A sample has `text`, `types` and `padding_mask`, `[c, s]` with one row per choice, and `label`.
    With several choices, each first text (question and answer) has at most 128 tokens.

    Args:
        examples: The labeled texts, one for each sample.
        tokenizer: A tokenizer with the special tokens cls, sep and pad.
        length: The sequence length s.
    """

    def __init__(self, examples: Sequence[Example], tokenizer: Tokenizer, length: int) -> None:
        """Store the examples, the tokenizer and the length."""
        self.examples = examples
        self._tokenizer = tokenizer
        self._length = length

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.examples)

    def __getitem__(self, i: int) -> Sample:
        """Return sample `i`, with one row per choice."""
        example = self.examples[i]
        limit = _MAX_CHOICE_TOKENS if len(example.texts) > 1 else None
        rows = [self._row(first, second, limit) for first, second in example.texts]
        text, types, padding = (np.stack(column) for column in zip(*rows, strict=True))
        return {
            "id": i,
            "text": text,
            "types": types,
            "padding_mask": padding,
            "label": np.array(example.label),
        }

    def _row(
        self, first: str, second: str | None, limit: int | None
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        tokenizer = self._tokenizer
        ids = [tokenizer.cls, *tokenizer.tokenize_with_special(first)[:limit], tokenizer.sep]
        types = [0] * len(ids)
        if second is not None:
            second_ids = [*tokenizer.tokenize_with_special(second), tokenizer.sep]
            ids, types = ids + second_ids, types + [1] * len(second_ids)
        if len(ids) > self._length:
            ids, types = [*ids[: self._length - 1], tokenizer.sep], types[: self._length]
        return (
            pad_to(ids, self._length, tokenizer.pad),
            pad_to(types, self._length, 0),
            pad_to([1] * len(ids), self._length, 0),
        )


class Epochs:
    """A dataset that is reshuffled in every epoch, presented as one long dataset.

    Sample k of the training run is a pure function of seed and k.

    Args:
        dataset: The samples of one epoch.
        seed: The seed for shuffling.
        length: The total number of samples.
        samples_per_epoch: The number of samples to use in each epoch, so that the epoch ends with a
            full batch. `None` uses all.
    """

    def __init__(
        self,
        dataset: SampleDataset,
        *,
        seed: int,
        length: int,
        samples_per_epoch: int | None = None,
    ) -> None:
        """Store the dataset, the seed and the lengths."""
        self._dataset = dataset
        self._seed = seed
        self._length = length
        self._samples_per_epoch = samples_per_epoch or len(dataset)
        self._order: tuple[int, NDArray[np.int64]] | None = None  # the latest epoch and its order

    def __len__(self) -> int:
        """Return the number of samples."""
        return self._length

    def __getitem__(self, i: int) -> Sample:
        """Return sample `i` of the training run."""
        epoch, index = divmod(i, self._samples_per_epoch)
        if self._order is None or self._order[0] != epoch:
            generator = np.random.default_rng((self._seed, epoch))
            self._order = epoch, generator.permutation(len(self._dataset))
        sample: Sample = self._dataset[int(self._order[1][index])]
        return sample


class _FixedLength:
    def __init__(self, dataset: SampleDataset, length: int) -> None:
        self._dataset = dataset
        self._length = length

    def __len__(self) -> int:
        return self._length


class Padded(_FixedLength):
    """A dataset padded to `length` with copies of its first sample, each with its own `id`.

    Args:
        dataset: A dataset with at least one sample.
        length: The total number of samples, at least the dataset's length.
    """

    def __getitem__(self, i: int) -> Sample:
        """Return sample `i`, or the first sample if `i` is beyond the dataset."""
        sample: Sample = self._dataset[i if i < len(self._dataset) else 0]
        return {**sample, "id": i}


class Repeated(_FixedLength):
    """A dataset repeated up to `length` samples, for the validation loss between epochs.

    Args:
        dataset: A dataset with at least one sample.
        length: The total number of samples.
    """

    def __getitem__(self, i: int) -> Sample:
        """Return sample `i` of the repeated dataset."""
        sample: Sample = self._dataset[i % len(self._dataset)]
        return sample
