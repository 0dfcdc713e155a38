"""What can be said of guesses, from how often each class was taken for each."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tasks.results import Number, Numbers

Matrix = Sequence[Sequence[int]]  # [class][guess]
CLASS_TITLES = ("class", "examples", "correct", "precision", "recall", "F1")


def count(labels: Sequence[float], guesses: Sequence[float], size: int) -> Matrix:
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


def summary(matrix: Matrix) -> Numbers:
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
