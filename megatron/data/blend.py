"""Blends: several datasets, drawn from in fixed proportions.

Sample i comes from the dataset that lags furthest behind its share: with weights w and t samples
taken from each so far, the one whose `w * max(i, 1) - t` is largest, or the first of equals. The
order is Megatron-LM's, computed in the same floating-point operations.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron.data.cache import ArraySpec, IndexCache
from megatron.data.sample import DescribedDataset, Sample, SampleDataset
from megatron.errors import ConfigError

_MAX_DATASETS = np.iinfo(np.int16).max
_BLOCK = 4096  # samples of the shortest block
_MAX_ELEMENTS = 1 << 20  # of a step's arrays, so that they stay in a processor's cache


class BlendIndex(NamedTuple):
    """Dataset of each sample, `[n]` uint8 (int16 from 255 datasets on), and its number there."""

    datasets: NDArray[Any]
    samples: NDArray[np.int64]


def normalize(weights: Sequence[float]) -> NDArray[np.float64]:
    """Return the weights divided by their sum, `[d]`.

    They are divided twice, once by Python's sum and once by numpy's: Megatron does so too, and the
    last bit decides ties.
    """
    total = sum(weights, 0.0)
    shares = np.array([weight / total for weight in weights], np.float64)
    return shares / shares.sum()


def samples_of_each(weights: Sequence[float], num_samples: int) -> list[int]:
    """Return the samples to prepare of each dataset: its share and half a percent more."""
    total = sum(weights, 0.0)
    return [math.ceil(num_samples * (weight / total) * 1.005) for weight in weights]


def build_blend_index(weights: NDArray[np.float64], size: int) -> BlendIndex:
    """Return the first `size` samples of the blend.

    Each choice depends on all choices before it. To make many at a time, the run is cut into
    blocks that advance side by side from guessed counts: those nearest to the shares, which are
    nearly always the true ones. A block whose guess differs from what the block before it ended
    with is then done again from there, until all fit. The result is exact for any guess.

    Args:
        weights: Shares that add up to one, `[d]`.
        size: n, the number of samples.
    """
    count = len(weights)
    blocks = max(1, min(size // _BLOCK, _MAX_ELEMENTS // count))
    length = -(-size // blocks)
    starts = np.arange(blocks) * length
    counts = _nearest_counts(weights, starts)
    datasets = np.empty((blocks, length), np.uint8 if count < 255 else np.int16)
    ends = np.empty_like(counts)
    wrong = np.arange(blocks)
    while len(wrong):
        datasets[wrong], ends[wrong] = _advance(weights, starts[wrong], counts[wrong], length)
        wrong = 1 + np.flatnonzero((counts[1:] != ends[:-1]).any(axis=1))
        counts[wrong] = ends[wrong - 1]
    flat = datasets.reshape(-1)[:size]
    # A sample's number in its dataset is how often that dataset occurred before.
    numbers = np.empty(size, np.int64)
    sizes = np.bincount(flat, minlength=count)
    firsts = np.repeat(np.cumsum(sizes) - sizes, sizes)
    numbers[np.argsort(flat, kind="stable")] = np.arange(size) - firsts
    return BlendIndex(flat, numbers)


def _nearest_counts(weights: NDArray[np.float64], totals: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return whole numbers that add up to each total, nearest to the shares, `[blocks, d]`."""
    exact = weights * totals[:, None]
    counts = np.floor(exact)
    missing = totals - counts.sum(axis=1)
    rank = np.argsort(np.argsort(counts - exact, axis=1, kind="stable"), axis=1, kind="stable")
    return counts + (rank < missing[:, None])


def _advance(
    weights: NDArray[np.float64],
    starts: NDArray[np.int64],
    counts: NDArray[np.float64],
    length: int,
) -> tuple[NDArray[Any], NDArray[np.float64]]:
    """Make `length` choices in every block.

    Args:
        weights: Shares of the datasets, `[d]`.
        starts: Number of each block's first sample, `[blocks]`.
        counts: Samples taken from each dataset before it, `[blocks, d]`.
        length: Choices to make in each block.

    Returns:
        The choices `[blocks, length]`, and the counts after them.
    """
    taken = counts.copy()
    rows = np.arange(len(starts))
    choices = np.empty((length, len(starts)), np.int16)
    for step in range(length):
        position = np.maximum(starts + step, 1).astype(np.float64)
        choice = (position[:, None] * weights - taken).argmax(axis=1)
        taken[rows, choice] += 1
        choices[step] = choice
    return choices.T, taken


class BlendedDataset:
    """Several datasets, drawn from in the order of a blend index.

    Only the samples that were requested are sure to exist in every dataset. In the half percent
    behind them, a dataset that has run out starts again.
    """

    def __init__(self, datasets: Sequence[SampleDataset], index: BlendIndex) -> None:
        self.datasets = tuple(datasets)
        self.index = index

    def __len__(self) -> int:
        return len(self.index.datasets)

    def __getitem__(self, i: int) -> Sample:
        """Return sample `i`; its `id` counts in the blend, not in the dataset it came from."""
        dataset = self.datasets[int(self.index.datasets[i])]
        sample = dataset[int(self.index.samples[i]) % len(dataset)]
        return {**sample, "id": i}


def blend(
    datasets: Sequence[DescribedDataset],
    weights: Sequence[float],
    size: int,
    data_cache_path: str | None,
    *,
    warns: bool = True,
) -> BlendedDataset:
    """Blend datasets; the index is kept on disk only if --data-cache-path is given.

    Args:
        datasets: What to draw from. Their descriptions are part of the index's name.
        weights: Proportions in which to draw from them.
        size: Samples of the blend.
        data_cache_path: Folder for the index, or `None`.
        warns: Whether this process reports a cache folder that cannot be written to.

    Raises:
        ConfigError: There are too many datasets.
    """
    if len(datasets) > _MAX_DATASETS:
        raise ConfigError(
            f"--data-path: {len(datasets)} datasets, at most {_MAX_DATASETS} can be blended: join "
            "some of them into one"
        )
    shares = normalize(weights)
    members = "".join(f"{dataset.description}\n\n" for dataset in datasets)
    description = f"Blendable dataset\n\nDatasets:\n{members}Weights: {shares}\nSize: {size}\n"
    dtype = np.dtype(np.uint8 if len(datasets) < 255 else np.int16)
    specs = [
        ArraySpec("index", dtype, (size,)),
        ArraySpec("sample_index", np.dtype(np.int64), (size,)),
    ]
    folders = () if data_cache_path is None else (Path(data_cache_path),)
    arrays = IndexCache(folders, warns).load_or_build(
        description, specs, lambda: build_blend_index(shares, size)
    )
    return BlendedDataset(datasets, BlendIndex(*arrays))
