"""What can be said of guesses that are numbers, such as how alike two sentences are."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tasks.results import Number, Numbers

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


def summary(labels: Sequence[float], guesses: Sequence[float]) -> Numbers:
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
