"""The datasets that the flags name: opened, cut into splits, blended."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from megatron.config.data import SPLIT_NAMES, DataConfig
from megatron.data.blend import blend, samples_of_each
from megatron.data.indexed import IndexedDataset, bin_path
from megatron.data.sample import DescribedDataset, SampleDataset
from megatron.data.splits import split_bounds
from megatron.errors import ConfigError, DataError, warn


class Member(NamedTuple):
    """One dataset of a split: where it comes from, and which of its documents.

    Attributes:
        documents: of the whole dataset.
    """

    weight: float
    data: IndexedDataset
    bounds: tuple[int, int]
    documents: int


BuildMember = Callable[[str, Member, int], DescribedDataset]
"""The samples of one member: from the split's name, the member, and how many are needed."""


class Datasets(NamedTuple):
    """A dataset a split; None where no samples were asked for or no documents are in the split."""

    train: SampleDataset | None
    valid: SampleDataset | None
    test: SampleDataset | None


def build_splits(
    data: DataConfig,
    samples: tuple[int, int, int],
    build_member: BuildMember,
    *,
    count_documents: Callable[[IndexedDataset], int],
    warns: bool,
) -> Datasets:
    """Training, validation and test data of the datasets that the flags name.

    Args:
        samples: needed of each split.
        count_documents: how many documents --split shares out.
        warns: whether this process reports what is left out.

    Raises:
        ConfigError: no data is named, or --data-path or --split cannot be read.
        DataError: a dataset is missing, damaged or too small.
    """
    splits = _members_of_splits(data, count_documents)
    return Datasets(
        *(
            _build_split(name, members, count, data, build_member, warns)
            for name, members, count in zip(SPLIT_NAMES, splits, samples, strict=True)
        )
    )


def parse_weighted_paths(paths: Sequence[str], flag: str) -> list[tuple[float, str]]:
    """Weights and prefixes from `PREFIX` or `WEIGHT PREFIX WEIGHT PREFIX ...`.

    Raises:
        ConfigError: a weight is missing or not a positive number.
    """
    if len(paths) == 1:
        return [(1.0, paths[0])]
    pairs = []
    for position in range(0, len(paths), 2):
        text, prefix = paths[position], paths[position + 1 : position + 2]
        try:
            weight = float(text)
        except ValueError:
            weight = math.nan
        if not prefix or not 0 < weight < math.inf:
            raise ConfigError(
                f"{flag}: value {position + 1}, {text!r}, is not a positive weight followed by a "
                "dataset: write one dataset, or WEIGHT DATASET WEIGHT DATASET ..."
            )
        pairs.append((weight, prefix[0].strip()))
    return pairs


def _members_of_splits(
    data: DataConfig, count_documents: Callable[[IndexedDataset], int]
) -> list[list[Member]]:
    """The datasets of training, validation and test, opened and cut."""
    if data.data_path is not None:
        splits: list[list[Member]] = [[], [], []]
        for weight, prefix in parse_weighted_paths(data.data_path, "--data-path"):
            opened = _open(prefix, data.mmap_warmup)
            documents = count_documents(opened)
            bounds = split_bounds(data.split, documents)
            for i, members in enumerate(splits):
                members.append(Member(weight, opened, (bounds[i], bounds[i + 1]), documents))
        return splits
    paths = (data.train_data_path, data.valid_data_path, data.test_data_path)
    if not any(paths):
        raise ConfigError(
            "no data: give --data-path, or --train-data-path with --valid-data-path and "
            "--test-data-path, or --mock-data for generated tokens"
        )
    splits = []
    for flag, path in zip(
        ("--train-data-path", "--valid-data-path", "--test-data-path"), paths, strict=True
    ):
        members = []
        for weight, prefix in parse_weighted_paths(path or (), flag):
            opened = _open(prefix, data.mmap_warmup)
            documents = count_documents(opened)
            members.append(Member(weight, opened, (0, documents), documents))
        splits.append(members)
    return splits


def _open(prefix: str, warm_up: bool) -> IndexedDataset:
    opened = IndexedDataset(prefix)
    if warm_up:
        with open(bin_path(prefix), "rb") as file:
            while file.read(1 << 24):
                pass
    return opened


def _build_split(
    name: str,
    members: Sequence[Member],
    num_samples: int,
    data: DataConfig,
    build_member: BuildMember,
    warns: bool,
) -> SampleDataset | None:
    """The dataset of one split, blended where it has several members."""
    kept = [member for member in members if member.bounds[0] < member.bounds[1]]
    if num_samples == 0 or not members:
        return None
    if not kept:
        if name == "train":  # a run can do without validation or test data
            raise _no_documents(members, num_samples, data.split)
        return None
    if len(kept) < len(members) and warns:
        left_out = [m.data.prefix for m in members if m not in kept]
        warn(
            f"--split {data.split!r} leaves no {name} document in {', '.join(left_out)}: the "
            f"{name} blend goes without"
        )
    if len(members) == 1:
        return build_member(name, kept[0], num_samples)
    weights = [member.weight for member in kept]
    counts = samples_of_each(weights, num_samples)
    datasets = [
        build_member(name, member, count) for member, count in zip(kept, counts, strict=True)
    ]
    descriptions = [dataset.description for dataset in datasets]
    return blend(datasets, descriptions, weights, sum(counts), data.data_cache_path, warns)


def _no_documents(members: Sequence[Member], num_samples: int, split: str) -> DataError:
    sizes = ", ".join(f"{member.data.prefix}: {member.documents}" for member in members)
    return DataError(
        f"{num_samples} training samples are asked for, but the training split has no document "
        f"(documents in {sizes}; --split {split!r}): change --split or give more data"
    )
