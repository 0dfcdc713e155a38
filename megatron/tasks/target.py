"""Prediction targets of finetuned models, and metrics of the predictions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megatron.models.plan import HeadSpec
from megatron.tasks.results import Metrics, MetricValue, format_table

HEADS = ("classification_head", "multichoice_head")  # Megatron's names


@dataclass(frozen=True)
class Predictions:
    """The labels and predictions of the same samples, as class indices or values."""

    labels: tuple[float, ...]
    predictions: tuple[float, ...]

    @staticmethod
    def joined(parts: Iterable[Predictions]) -> Predictions:
        """Return the labels and predictions of all parts, concatenated."""
        parts_list = list(parts)
        return Predictions(
            tuple(label for part in parts_list for label in part.labels),
            tuple(prediction for part in parts_list for prediction in part.predictions),
        )


@dataclass(frozen=True)
class Target:
    """The prediction target: one of several classes, or a value.

    Attributes:
        task: The task's name.
        classes: The names of the classes, in order. Empty for a value.
        span: The lowest and highest value. `None` for classes.
        texts: The number of texts in a sample: 1, or one per class, of which one is correct.
        scores: The names of the metrics whose mean determines the best checkpoint.
    """

    task: str
    classes: tuple[str, ...] = ()
    span: tuple[int, int] | None = None
    texts: int = 1
    scores: tuple[str, ...] = ("accuracy",)

    @property
    def head_name(self) -> str:
        """The name of the head's layer."""
        return HEADS[self.texts > 1]

    @property
    def head(self) -> HeadSpec:
        """The spec of the head that predicts the target."""
        outputs = 1 if self.span is not None else len(self.classes) // self.texts
        return HeadSpec(outputs, self.texts)

    @property
    def score_name(self) -> str:
        """The name of the score, for messages."""
        return self.scores[0] if len(self.scores) == 1 else f"mean of {' and '.join(self.scores)}"

    def score(self, metrics: Metrics) -> float:
        """Return the task's score, which is the mean of the metrics in `scores`, as in GLUE."""
        return sum(float(metrics[name]) for name in self.scores) / len(self.scores)

    def metrics(self, predictions: Predictions) -> Metrics:
        """Return the metrics over all samples by name."""
        if self.span is not None:
            return value_metrics(predictions.labels, predictions.predictions)
        return class_metrics(self._matrix(predictions))

    def table(self, predictions: Predictions) -> str:
        """Return a table with one row per class, or per unit interval of the labels' span."""
        if self.span is not None:
            rows = band_rows(predictions.labels, predictions.predictions, self.span)
            return format_table(BAND_TITLES, rows)
        rows = class_rows(self._matrix(predictions), self.classes)
        return format_table(CLASS_TITLES, rows)

    def details(self, predictions: Predictions) -> dict[str, Any]:
        """Return the class names and the confusion matrix, `[class][prediction]`.

        The dictionary is empty if the target is a value.
        """
        if self.span is not None:
            return {}
        return {"classes": list(self.classes), "counts": self._matrix(predictions)}

    def _matrix(self, predictions: Predictions) -> Matrix:
        return count_classes(predictions.labels, predictions.predictions, len(self.classes))


Matrix = Sequence[Sequence[int]]  # [class][prediction]
CLASS_TITLES = ("class", "examples", "correct", "precision", "recall", "F1")


def count_classes(labels: Sequence[float], predictions: Sequence[float], size: int) -> Matrix:
    """Return the confusion matrix of `size` classes, `[class][prediction]`."""
    matrix = [[0] * size for _ in range(size)]
    for label, prediction in zip(labels, predictions, strict=True):
        matrix[int(label)][int(prediction)] += 1
    return matrix


def accuracy(matrix: Matrix) -> float:
    """Return the fraction of correct predictions."""
    return sum(matrix[i][i] for i in range(len(matrix))) / _total(matrix)


def matthews(matrix: Matrix) -> float:
    """Return the Matthews correlation coefficient for any number of classes; 0 is chance level."""
    total, correct = _total(matrix), sum(matrix[i][i] for i in range(len(matrix)))
    true = [sum(row) for row in matrix]
    predicted = [sum(column) for column in zip(*matrix, strict=True)]
    numerator = correct * total - sum(t * g for t, g in zip(true, predicted, strict=True))
    denominator = (total**2 - sum(g * g for g in predicted)) * (total**2 - sum(t * t for t in true))
    return numerator / math.sqrt(denominator) if denominator else 0.0


def class_metrics(matrix: Matrix) -> Metrics:
    """Return the metrics over all classes. With two classes, include the F1 of the second."""
    metrics: Metrics = {
        "number correct": sum(matrix[i][i] for i in range(len(matrix))),
        "total examples": _total(matrix),
        "accuracy": accuracy(matrix),
        "largest class": max(map(sum, matrix)) / _total(matrix),
        "matthews": matthews(matrix),
    }
    if len(matrix) == 2:
        metrics["F1"] = _class_row("", 1, matrix)[-1]  # type: ignore[assignment]
    return metrics


def class_rows(matrix: Matrix, names: Sequence[str]) -> list[list[str | MetricValue]]:
    """Return one row per class, with the columns of `CLASS_TITLES`."""
    return [_class_row(name, i, matrix) for i, name in enumerate(names)]


def _class_row(name: str, index: int, matrix: Matrix) -> list[str | MetricValue]:
    correct, true = matrix[index][index], sum(matrix[index])
    predicted = sum(row[index] for row in matrix)
    f1 = 2 * correct / (true + predicted) if true + predicted else 0.0
    return [name, true, correct, _ratio(correct, predicted), _ratio(correct, true), f1]


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def _total(matrix: Matrix) -> int:
    return sum(map(sum, matrix))


BAND_TITLES = ("label", "examples", "mean label", "mean prediction", "mean squared error")


def pearson(x: ArrayLike, y: ArrayLike) -> float:
    """Return the Pearson correlation of two lists `[n]`, or 0 if one of them is constant."""
    a, b = np.asarray(x, np.float64), np.asarray(y, np.float64)
    a, b = a - a.mean(), b - b.mean()
    denominator = np.sqrt((a @ a) * (b @ b))
    return 0.0 if denominator == 0 else float(a @ b / denominator)


def spearman(x: ArrayLike, y: ArrayLike) -> float:
    """Return the Spearman correlation of two lists `[n]`: the Pearson correlation of the ranks."""
    return pearson(ranks(x), ranks(y))


def ranks(values: ArrayLike) -> NDArray[np.float64]:
    """Return the rank of each value, `[n]`, counted from 1. Equal values share their mean rank."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    mean: NDArray[np.float64] = np.cumsum(counts) - (counts - 1) / 2
    return mean[inverse]


def value_metrics(labels: Sequence[float], predictions: Sequence[float]) -> Metrics:
    """Return the metrics of predicted values over all samples by name."""
    return {
        "total examples": len(labels),
        "pearson": pearson(labels, predictions),
        "spearman": spearman(labels, predictions),
        "mean squared error": _squared_error(np.array(labels), np.array(predictions)),
    }


def band_rows(
    labels: Sequence[float], predictions: Sequence[float], span: tuple[int, int]
) -> list[list[str | MetricValue]]:
    """Return one row per non-empty unit interval of the span, with the columns of `BAND_TITLES`.

    Args:
        labels: The correct values.
        predictions: The predictions, in the same order.
        span: The lowest and highest label. The highest label belongs to the last row.
    """
    x, y = np.array(labels), np.array(predictions)
    low, high = span
    band = np.minimum(np.floor(x), high - 1)
    return [
        [
            f"{start} to {start + 1}",
            int(in_band.sum()),
            float(x[in_band].mean()),
            float(y[in_band].mean()),
            _squared_error(x[in_band], y[in_band]),
        ]
        for start in range(low, high)
        if (in_band := band == start).any()
    ]


def _squared_error(x: NDArray[np.float64], y: NDArray[np.float64]) -> float:
    return float(((x - y) ** 2).mean())
