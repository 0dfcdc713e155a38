"""Blends: datasets that draw from several others in fixed proportions.

Sample i of a blend comes from the dataset that lags furthest behind its share. If a dataset has
weight w, and t samples have been taken from it so far, that is the dataset with the largest
`w * max(i, 1) - t`, or the first of several with the same value. The order is the same as in
Megatron-LM, computed with the same floating-point operations. Indexed GPT datasets without weights
are blended as in Megatron Core, by the numbers of samples that they have, and other data without
weights by size. With --blend-schedule, the weights change during the run. Each phase is then a
blend that continues in every dataset where the previous phase stopped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron.data.cache import ArraySpec, IndexCache
from megatron.data.sample import DescribedDataset, Sample, SampleDataset
from megatron.data.text_stream import TextDataset, text_members
from megatron.errors import ConfigError

_MAX_DATASETS = np.iinfo(np.int16).max
_BLOCK = 4096  # samples in the shortest block of a blend
_MAX_ELEMENTS = 1 << 20  # limit for the arrays of a step, so that they stay in the processor cache


class BlendPhase(NamedTuple):
    """A phase of --blend-schedule, in which the weights of a blend are constant.

    Attributes:
        start: The first sample of the phase.
        weights: The proportions in which to draw from the datasets, `[d]`. Some may be 0.
        are_sizes: Whether the weights are the datasets' sizes, because the user gave none.
    """

    start: int
    weights: tuple[float, ...]
    are_sizes: bool = False

    @property
    def shares(self) -> NDArray[np.float64]:
        """The weights divided by their sum, with the operations of Megatron, `[d]`."""
        if self.are_sizes:  # as in Megatron Core; Megatron-LM requires weights
            sizes = np.array(self.weights, np.float64)
            return sizes / sizes.sum()
        return normalize(self.weights)


def parse_blend_schedule(values: Sequence[str], datasets: int, unit: int) -> list[BlendPhase]:
    """Parse phases from `START:WEIGHT,WEIGHT,... START:WEIGHT,WEIGHT,...`.

    Args:
        values: The phases in --blend-schedule.
        datasets: The number of training datasets, d.
        unit: The number of samples in a unit of START.

    Raises:
        ConfigError: A phase is malformed, the starts do not ascend from 0, or a phase does
            not have a weight for each dataset.
    """
    phases: list[BlendPhase] = []
    for value in values:
        start, _, text = value.partition(":")
        try:
            weights = tuple(float(weight) for weight in text.split(","))
        except ValueError:
            weights = ()
        previous = phases[-1].start // unit if phases else -1
        if (
            not (start.isascii() and start.isdigit() and int(start) > previous)
            or not (phases or int(start) == 0)
            or len(weights) != datasets
            or not (min(weights) >= 0 and 0 < sum(weights) < math.inf)
        ):
            raise ConfigError(
                f"--blend-schedule: {value!r} is not a phase for {datasets} datasets: write "
                "START:WEIGHT,WEIGHT,... with a weight for each dataset, none negative and at "
                "least one above 0; the first START is 0, and each is above the previous one"
            )
        phases.append(BlendPhase(int(start) * unit, weights))
    return phases


def samples_per_dataset(phases: Sequence[BlendPhase], num_samples: int) -> list[int]:
    """Return the number of samples to prepare from each dataset: its share plus half a percent.

    A blend never draws a whole sample more than a dataset's share, but may draw a fraction more in
    each phase. The result is therefore at least the sum of the dataset's shares in the phases, each
    rounded up.
    """
    ends = [*(phase.start for phase in phases[1:]), num_samples]
    shares = [0.0] * len(phases[0].weights)
    minimums = [0] * len(shares)
    for (start, weights, _), end in zip(phases, ends, strict=True):
        total = sum(weights, 0.0)
        for i, weight in enumerate(weights):
            share = (end - start) * (weight / total)
            shares[i] += share
            minimums[i] += math.ceil(share)
    with_margin = (math.ceil(share * 1.005) for share in shares)
    return [max(1, *counts) for counts in zip(minimums, with_margin, strict=True)]


def blend(
    datasets: Sequence[DescribedDataset], phases: Sequence[BlendPhase], size: int, cache: IndexCache
) -> BlendedDataset:
    """Return a dataset that draws from several others in given proportions.

    Args:
        datasets: The datasets to draw from. Their descriptions are part of the index's name.
        phases: The proportions in which to draw from the datasets, phase by phase.
        size: The number of samples in the blend.
        cache: The cache for the index. If it has no folder, the index is kept only in memory.

    Raises:
        ConfigError: There are too many datasets.
        DataError: The index does not fit in memory.
    """
    if len(datasets) > _MAX_DATASETS:
        raise ConfigError(
            f"--data-path: {len(datasets)} datasets are given, but at most {_MAX_DATASETS} can be "
            "blended: join some of them with tools/merge_datasets.py"
        )
    shares = [phase.shares for phase in phases]
    starts = np.array([phase.start for phase in phases])
    members = "".join(f"{dataset.description}\n\n" for dataset in datasets)
    description = f"Blendable dataset\n\nDatasets:\n{members}Weights: {shares[0]}\nSize: {size}\n"
    if len(phases) > 1:
        description += f"Starts: {starts}\n"
    dtype = np.dtype(np.uint8 if len(datasets) < 255 else np.int16)
    specs = [ArraySpec("index", dtype, (size,)), ArraySpec("sample_index", np.dtype("i8"), (size,))]
    # As in Megatron, the description gives the shares to eight digits, but ties depend on all.
    arrays = cache.load_or_build(
        description, specs, lambda: build_phases(phases, size), inputs=(*shares, starts)
    )
    return BlendedDataset(datasets, BlendIndex(*arrays))


class BlendIndex(NamedTuple):
    """The origin of each sample of a blend.

    Attributes:
        datasets: The dataset of each sample, `[n]` uint8 (int16 for 255 or more datasets).
        samples: The index of each sample within its dataset, `[n]`.
    """

    datasets: NDArray[Any]
    samples: NDArray[np.int64]


def normalize(weights: Sequence[float]) -> NDArray[np.float64]:
    """Return weights divided by their sum, `[d]`.

    As in Megatron, the weights are divided twice, first by Python's sum and then by numpy's,
    because the last bit breaks ties.
    """
    total = sum(weights, 0.0)
    shares = np.array([weight / total for weight in weights], np.float64)
    return shares / shares.sum()


def build_phases(phases: Sequence[BlendPhase], size: int) -> BlendIndex:
    """Return the first `size` samples of a blend whose weights may change.

    Args:
        phases: The phases; the last one continues to the end.
        size: The number of samples n.
    """
    count = len(phases[0].weights)
    if len(phases) == 1:
        return build_blend_index(phases[0].shares, size)
    datasets = np.empty(size, np.uint8 if count < 255 else np.int16)
    samples = np.empty(size, np.int64)
    num_drawn = np.zeros(count, np.int64)
    ends = [*(phase.start for phase in phases[1:]), size]
    for (start, weights, _), end in zip(phases, ends, strict=True):
        active = np.flatnonzero(weights)
        index = build_blend_index(normalize([weights[i] for i in active]), end - start)
        datasets[start:end] = active[index.datasets]
        samples[start:end] = index.samples + num_drawn[datasets[start:end]]
        num_drawn += np.bincount(datasets[start:end], minlength=count)
    return BlendIndex(datasets, samples)


def build_blend_index(weights: NDArray[np.float64], size: int) -> BlendIndex:
    """Return the first `size` samples of the blend.

    Each choice depends on all previous choices. To make many choices at a time, the sequence of
    samples is cut into blocks that advance in parallel from guessed counts. The guesses are the
    integers nearest to the shares, which are nearly always correct. A block whose guess differs
    from the counts at the end of the previous block is computed again from those counts, until all
    blocks agree. The result is exact for any guess.

    Args:
        weights: The shares, which add up to one, `[d]`.
        size: The number of samples n.
    """
    count = len(weights)
    blocks = max(1, min(size // _BLOCK, _MAX_ELEMENTS // count))
    length = -(-size // blocks)
    starts = np.arange(blocks) * length
    counts = _nearest_counts(weights, starts)
    datasets = np.empty((blocks, length), np.uint8 if count < 255 else np.int16)
    ends = np.empty_like(counts)
    stale = np.arange(blocks)
    while len(stale):
        datasets[stale], ends[stale] = _advance(weights, starts[stale], counts[stale], length)
        stale = 1 + np.flatnonzero((counts[1:] != ends[:-1]).any(axis=1))
        counts[stale] = ends[stale - 1]
    flat = datasets.reshape(-1)[:size]
    # A sample's index in its dataset is the number of earlier samples from that dataset.
    sample_indices = np.empty(size, np.int64)
    sizes = np.bincount(flat, minlength=count)
    firsts = np.repeat(np.cumsum(sizes) - sizes, sizes)
    sample_indices[np.argsort(flat, kind="stable")] = np.arange(size) - firsts
    return BlendIndex(flat, sample_indices)


def _nearest_counts(weights: NDArray[np.float64], totals: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the integers nearest to the shares that add up to each total, `[blocks, d]`."""
    exact = weights * totals[:, None]
    counts = np.floor(exact)
    shortfall = totals - counts.sum(axis=1)
    rank = np.argsort(np.argsort(counts - exact, axis=1, kind="stable"), axis=1, kind="stable")
    return counts + (rank < shortfall[:, None])


def _advance(
    weights: NDArray[np.float64],
    starts: NDArray[np.int64],
    counts: NDArray[np.float64],
    length: int,
) -> tuple[NDArray[Any], NDArray[np.float64]]:
    """Choose the dataset of each of the next `length` samples in every block.

    Args:
        weights: The shares of the datasets, `[d]`.
        starts: The index of each block's first sample, `[blocks]`.
        counts: The number of samples taken from each dataset before that sample, `[blocks, d]`.
        length: The number of samples in each block.

    Returns:
        The index of each sample's dataset, `[blocks, length]`, and the counts after the block,
        `[blocks, d]`.
    """
    num_drawn = counts.copy()
    rows = np.arange(len(starts))
    choices = np.empty((length, len(starts)), np.int16)
    for step in range(length):
        position = np.maximum(starts + step, 1).astype(np.float64)
        choice = (position[:, None] * weights - num_drawn).argmax(axis=1)
        num_drawn[rows, choice] += 1
        choices[step] = choice
    return choices.T, num_drawn


@dataclass(eq=False)
class BlendedDataset:
    """A dataset that draws from several others in the order of a blend index.

    Only the requested samples are guaranteed to exist in every dataset. In the extra half percent
    that follows, a dataset that is exhausted starts again.
    """

    datasets: Sequence[SampleDataset]
    index: BlendIndex

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.index.datasets)

    def __getitem__(self, i: int) -> Sample:
        """Return sample `i`; its `id` is its index in the blend, not in its own dataset."""
        dataset = self.datasets[int(self.index.datasets[i])]
        sample = dataset[int(self.index.samples[i]) % len(dataset)]
        return {**sample, "id": i}

    def text_members(self, samples: int) -> list[tuple[TextDataset, int]]:
        """Return the text datasets, each with its number of samples (see `ReadsText`)."""
        if not any(text_members(dataset, 0) for dataset in self.datasets):
            return []
        counts = np.zeros(len(self.datasets), np.int64)
        for start in range(0, samples, _MAX_ELEMENTS):  # bincount takes 8 bytes per sample
            piece = self.index.datasets[start : min(start + _MAX_ELEMENTS, samples)]
            counts += np.bincount(piece, minlength=len(self.datasets))
        pairs = zip(self.datasets, counts.tolist(), strict=True)
        return [member for dataset, count in pairs for member in text_members(dataset, count)]


@dataclass(eq=False)
class JoinedDataset:
    """All samples of several datasets, one dataset after the other."""

    datasets: Sequence[SampleDataset]

    def __len__(self) -> int:
        """Return the number of samples."""
        return sum(map(len, self.datasets))

    def __getitem__(self, i: int) -> Sample:
        """Return sample `i`; its `id` is its index in the joined dataset.

        Raises:
            IndexError: There is no such sample.
        """
        index = i
        for dataset in self.datasets:
            if index < len(dataset):
                return {**dataset[index], "id": i}
            index -= len(dataset)
        raise IndexError(f"sample {i} of {len(self)}")
