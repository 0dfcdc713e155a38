"""From flags to the datasets of training, validation and test."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import NamedTuple

from megatron.config.data import DataConfig
from megatron.data.blend import blend, samples_of_each
from megatron.data.cache import builder_first
from megatron.data.gpt import GPTDataset, SampleDataset, build_gpt_dataset
from megatron.data.indexed import IndexedDataset, bin_path
from megatron.data.mock import MockDataset
from megatron.data.splits import SPLIT_NAMES, split_bounds
from megatron.errors import ConfigError, DataError


class GPTDatasets(NamedTuple):
    """A dataset a split; None where no samples were asked for or no documents are in the split."""

    train: SampleDataset | None
    valid: SampleDataset | None
    test: SampleDataset | None


class _Request(NamedTuple):
    """What every dataset of a run has in common."""

    seq_length: int
    seed: int
    split: str
    vocab_size: int
    data_cache_path: str | None
    warns: bool


class _Member(NamedTuple):
    """One dataset of a split: where it comes from, and which of its documents."""

    weight: float
    data: IndexedDataset
    bounds: tuple[int, int]


def build_gpt_datasets(
    data: DataConfig,
    *,
    seed: int,
    seq_length: int,
    samples: tuple[int, int, int],
    vocab_size: int,
    is_builder: bool = True,
    barrier: Callable[[], None] = lambda: None,
) -> GPTDatasets:
    """Build the datasets that the flags name. Every process calls this.

    Args:
        samples: numbers of training, validation and test samples that the run takes.
        vocab_size: entries of the tokenizer; larger ids in the data are refused.
        is_builder: true in one process, which writes the index caches before the others look.
        barrier: waits until every process has called it; called once.

    Raises:
        ConfigError: no data is named, or --data-path or --split cannot be read.
        DataError: a dataset is missing, damaged, too small or of another tokenizer.
    """
    if data.mock_data:
        return GPTDatasets(
            *(
                MockDataset(count, seq_length=seq_length, vocab_size=vocab_size, seed=seed, split=i)
                if count
                else None
                for i, count in enumerate(samples)
            )
        )
    request = _Request(
        seq_length, seed, data.split, vocab_size, data.data_cache_path, warns=is_builder
    )
    with builder_first(is_builder, barrier):
        splits = _members_of_splits(data)
        return GPTDatasets(
            *(
                _build_split(name, members, count, request)
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


def _members_of_splits(data: DataConfig) -> list[list[_Member]]:
    """The datasets of training, validation and test, opened and cut."""
    if data.data_path is not None:
        splits: list[list[_Member]] = [[], [], []]
        for weight, prefix in parse_weighted_paths(data.data_path, "--data-path"):
            opened = _open(prefix, data.mmap_warmup)
            bounds = split_bounds(data.split, len(opened))
            for i, members in enumerate(splits):
                members.append(_Member(weight, opened, (bounds[i], bounds[i + 1])))
        return splits
    paths = (data.train_data_path, data.valid_data_path, data.test_data_path)
    if not any(paths):
        raise ConfigError(
            "no data: give --data-path, or --train-data-path with --valid-data-path and "
            "--test-data-path, or --mock-data for generated tokens"
        )
    return [
        [_whole(weight, prefix, data) for weight, prefix in parse_weighted_paths(path, flag)]
        for flag, path in zip(
            ("--train-data-path", "--valid-data-path", "--test-data-path"),
            (path or () for path in paths),
            strict=True,
        )
    ]


def _whole(weight: float, prefix: str, data: DataConfig) -> _Member:
    opened = _open(prefix, data.mmap_warmup)
    return _Member(weight, opened, (0, len(opened)))


def _open(prefix: str, warm_up: bool) -> IndexedDataset:
    opened = IndexedDataset(prefix)
    if warm_up:
        with open(bin_path(prefix), "rb") as file:
            while file.read(1 << 24):
                pass
    return opened


def _build_split(
    name: str, members: Sequence[_Member], num_samples: int, request: _Request
) -> SampleDataset | None:
    """The dataset of one split, blended where it has several members."""
    kept = [member for member in members if member.bounds[0] < member.bounds[1]]
    if num_samples == 0 or not members:
        return None
    if not kept:
        if name == "train":  # a run can do without validation or test data
            raise _no_documents(members, num_samples, request)
        return None
    if len(kept) < len(members) and request.warns:
        left_out = [m.data.prefix for m in members if m not in kept]
        warnings.warn(
            f"--split {request.split!r} leaves no {name} document in {', '.join(left_out)}: the "
            f"{name} blend goes without",
            stacklevel=2,
        )
    if len(members) == 1:
        return _build_member(name, kept[0], num_samples, request)
    weights = [member.weight for member in kept]
    counts = samples_of_each(weights, num_samples)
    datasets = [
        _build_member(name, member, count, request)
        for member, count in zip(kept, counts, strict=True)
    ]
    descriptions = [dataset.description for dataset in datasets]
    return blend(
        datasets, descriptions, weights, sum(counts), request.data_cache_path, request.warns
    )


def _build_member(name: str, member: _Member, num_samples: int, request: _Request) -> GPTDataset:
    return build_gpt_dataset(
        member.data,
        member.bounds,
        name=name,
        num_samples=num_samples,
        **request._asdict(),
    )


def _no_documents(members: Sequence[_Member], num_samples: int, request: _Request) -> DataError:
    sizes = ", ".join(f"{member.data.prefix}: {len(member.data)}" for member in members)
    return DataError(
        f"{num_samples} training samples of {request.seq_length} tokens are asked for, but the "
        f"training split has no document (documents in {sizes}; --split {request.split!r}): "
        "change --split or give more data"
    )
