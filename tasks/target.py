"""What a finetuned model has to find, and measures of how good its guesses are."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megatron.models.plan import HeadSpec
from tasks.results import Number, Numbers, format_table

HEADS = ("classification_head", "multichoice_head")  # Megatron's names


@dataclass(frozen=True)
class Guesses:
    """Labels and guesses of some samples, in their order: numbers of classes, or numbers."""

    labels: tuple[float, ...]
    guesses: tuple[float, ...]

    @staticmethod
    def joined(parts: Iterable[Guesses]) -> Guesses:
        """Those of all parts."""
        every = list(parts)
        return Guesses(
            tuple(label for part in every for label in part.labels),
            tuple(guess for part in every for guess in part.guesses),
        )


@dataclass(frozen=True)
class Target:
    """One of some classes, or a number.

    Attributes:
        task: its name.
        classes: their names, in order; none: a number.
        span: lowest and highest number; None: classes.
        texts: of a sample: 1, or as many as there are classes, one of which is right.
        scores: names in `numbers` whose mean the best checkpoint is chosen by.
    """

    task: str
    classes: tuple[str, ...] = ()
    span: tuple[int, int] | None = None
    texts: int = 1
    scores: tuple[str, ...] = ("accuracy",)

    @property
    def head_name(self) -> str:
        """The name of the last layer."""
        return HEADS[self.texts > 1]

    @property
    def head(self) -> HeadSpec:
        """The head of the model that is to find it."""
        outputs = 1 if self.span is not None else len(self.classes) // self.texts
        return HeadSpec(outputs, self.texts)

    @property
    def score_name(self) -> str:
        """What `score` is, in words."""
        return self.scores[0] if len(self.scores) == 1 else f"mean of {' and '.join(self.scores)}"

    def score(self, numbers: Numbers) -> float:
        """The task's score in GLUE: the mean where it names two."""
        return sum(float(numbers[name]) for name in self.scores) / len(self.scores)

    def numbers(self, found: Guesses) -> Numbers:
        """Of all samples together, by name."""
        if self.span is not None:
            return value_numbers(found.labels, found.guesses)
        return class_numbers(self._matrix(found))

    def table(self, found: Guesses) -> str:
        """A row a class, or a row for the labels from each whole number to the next."""
        if self.span is not None:
            rows = band_rows(found.labels, found.guesses, self.span)
            return format_table(BAND_TITLES, rows)
        rows = class_rows(self._matrix(found), self.classes)
        return format_table(CLASS_TITLES, rows)

    def details(self, found: Guesses) -> dict[str, Any]:
        """What the numbers do not say: how often each class was taken for each, [class][guess]."""
        if self.span is not None:
            return {}
        return {"classes": list(self.classes), "counts": self._matrix(found)}

    def _matrix(self, found: Guesses) -> Matrix:
        return count_classes(found.labels, found.guesses, len(self.classes))


Matrix = Sequence[Sequence[int]]  # [class][guess]
CLASS_TITLES = ("class", "examples", "correct", "precision", "recall", "F1")


def count_classes(labels: Sequence[float], guesses: Sequence[float], size: int) -> Matrix:
    """How often each of `size` classes was taken for each."""
    matrix = [[0] * size for _ in range(size)]
    for label, guess in zip(labels, guesses, strict=True):
        matrix[int(label)][int(guess)] += 1
    return matrix


def accuracy(matrix: Matrix) -> float:
    """Share of right guesses."""
    return sum(matrix[i][i] for i in range(len(matrix))) / _total(matrix)


def matthews(matrix: Matrix) -> float:
    """Matthews' correlation of guesses and classes, of any number of classes; 0: by chance."""
    total, right = _total(matrix), sum(matrix[i][i] for i in range(len(matrix)))
    true = [sum(row) for row in matrix]
    guessed = [sum(column) for column in zip(*matrix, strict=True)]
    above = right * total - sum(t * g for t, g in zip(true, guessed, strict=True))
    below = (total**2 - sum(g * g for g in guessed)) * (total**2 - sum(t * t for t in true))
    return above / math.sqrt(below) if below else 0.0


def class_numbers(matrix: Matrix) -> Numbers:
    """Of all classes together; with two, F1 of the second."""
    numbers: Numbers = {
        "number correct": sum(matrix[i][i] for i in range(len(matrix))),
        "total examples": _total(matrix),
        "accuracy": accuracy(matrix),
        "largest class": max(map(sum, matrix)) / _total(matrix),
        "matthews": matthews(matrix),
    }
    if len(matrix) == 2:
        numbers["F1"] = _class_row("", 1, matrix)[-1]  # type: ignore[assignment]
    return numbers


def class_rows(matrix: Matrix, names: Sequence[str]) -> list[list[str | Number]]:
    """A row a class under `CLASS_TITLES`."""
    return [_class_row(name, i, matrix) for i, name in enumerate(names)]


def _class_row(name: str, index: int, matrix: Matrix) -> list[str | Number]:
    right, true = matrix[index][index], sum(matrix[index])
    guessed = sum(row[index] for row in matrix)
    f1 = 2 * right / (true + guessed) if true + guessed else 0.0
    return [name, true, right, _share(right, guessed), _share(right, true), f1]


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def _total(matrix: Matrix) -> int:
    return sum(map(sum, matrix))


BAND_TITLES = ("label", "examples", "mean label", "mean guess", "mean squared error")


def pearson(x: ArrayLike, y: ArrayLike) -> float:
    """Pearson's correlation of two lists `[n]`: 1 on a rising line; 0 where one is constant."""
    a, b = (_centred(values) for values in (x, y))
    below = np.sqrt((a @ a) * (b @ b))
    return 0.0 if below == 0 else float(a @ b / below)


def spearman(x: ArrayLike, y: ArrayLike) -> float:
    """Spearman's correlation: Pearson's of the ranks, 1 where the two have one order."""
    return pearson(ranks(x), ranks(y))


def ranks(values: ArrayLike) -> NDArray[np.float64]:
    """Place of each value in their order, from 1, `[n]`; equal ones share the mean of theirs."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    mean: NDArray[np.float64] = np.cumsum(counts) - (counts - 1) / 2
    return mean[place]


def value_numbers(labels: Sequence[float], guesses: Sequence[float]) -> Numbers:
    """Of all samples together."""
    return {
        "total examples": len(labels),
        "pearson": pearson(labels, guesses),
        "spearman": spearman(labels, guesses),
        "mean squared error": _squared_error(np.array(labels), np.array(guesses)),
    }


def band_rows(
    labels: Sequence[float], guesses: Sequence[float], span: tuple[int, int]
) -> list[list[str | Number]]:
    """A row for the labels from each whole number to the next, under `BAND_TITLES`.

    Args:
        span: lowest and highest label; the highest belongs to the last row. A row without
            examples is left out.
    """
    x, y = np.array(labels), np.array(guesses)
    low, high = span
    band = np.minimum(np.floor(x), high - 1)
    return [
        [
            f"{start} to {start + 1}",
            int(here.sum()),
            float(x[here].mean()),
            float(y[here].mean()),
            _squared_error(x[here], y[here]),
        ]
        for start in range(low, high)
        if (here := band == start).any()
    ]


def _centred(values: ArrayLike) -> NDArray[np.float64]:
    array = np.asarray(values, np.float64)
    return array - array.mean()


def _squared_error(x: NDArray[np.float64], y: NDArray[np.float64]) -> float:
    return float(((x - y) ** 2).mean())
