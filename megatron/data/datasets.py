"""The datasets that the flags name: opened, cut into splits, blended.

Each kind of sample (`gpt`, `bert`, `t5`) calls `build_datasets` with a function that makes the
samples of one part of one indexed dataset.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron.config.data import SPLIT_NAMES, DataConfig
from megatron.data.blend import blend, samples_of_each
from megatron.data.cache import builder_first
from megatron.data.indexed import IndexedDataset, bin_path, idx_path
from megatron.data.sample import DescribedDataset, SampleDataset
from megatron.errors import ConfigError, DataError, warn

_BLOCKS, _BLOCK = 64, 4096  # read of each file for a fingerprint: places, bytes at each


@dataclass(frozen=True)
class DataRequest:
    """What a run asks of its data, whatever the kind of sample.

    Attributes:
        data: The flags that name datasets, splits and caches.
        seed: Seed of every shuffle and draw.
        samples: Numbers of training, validation and test samples that the run takes.
        is_builder: True in a single process, which writes caches before the others look for them
            and prints the warnings.
        barrier: Waits until every process has called it; called once.
    """

    data: DataConfig
    seed: int
    samples: tuple[int, int, int]
    is_builder: bool = True
    barrier: Callable[[], None] = lambda: None


class DatasetPart(NamedTuple):
    """The documents of one indexed dataset that belong to one split.

    Attributes:
        split: The split: train, valid or test.
        data: The whole dataset.
        bounds: First document, and the one after the last.
        num_samples: How many samples the split needs of it.
    """

    split: str
    data: IndexedDataset
    bounds: tuple[int, int]
    num_samples: int


class Datasets(NamedTuple):
    """One dataset per split; `None` if a split has no documents or no samples were requested."""

    train: SampleDataset | None
    valid: SampleDataset | None
    test: SampleDataset | None


class _Member(NamedTuple):
    """One dataset of a split's blend. `documents` counts those of the whole dataset."""

    weight: float
    data: IndexedDataset
    bounds: tuple[int, int]
    documents: int


def build_datasets(
    request: DataRequest,
    build_part: Callable[[DatasetPart], DescribedDataset],
    build_mock: Callable[[int, int], SampleDataset],
    *,
    count_documents: Callable[[IndexedDataset], int] = len,
) -> Datasets:
    """Build the training, validation and test data that the flags name. Every process calls this.

    Args:
        request: What the run asks for.
        build_part: Makes the samples of one part of one dataset.
        build_mock: Makes the samples of --mock-data, from their number and the split's number.
        count_documents: Counts the documents that --split shares out. By default each sequence is
            a document, as in Megatron's GPT.

    Raises:
        ConfigError: No data is named, or --data-path or --split cannot be read.
        DataError: A dataset is missing, damaged, too small or of another tokenizer.
    """
    if request.data.mock_data:
        counts = enumerate(request.samples)
        return Datasets(*(build_mock(count, i) if count else None for i, count in counts))
    with builder_first(request.is_builder, request.barrier):
        members = _open_members(request.data, count_documents)
        return Datasets(
            *(
                _build_split(split, of_split, count, request, build_part)
                for split, of_split, count in zip(
                    SPLIT_NAMES, members, request.samples, strict=True
                )
            )
        )


def parse_weighted_paths(paths: Sequence[str], flag: str) -> list[tuple[float, str]]:
    """Return weights and prefixes from `PREFIX` or `WEIGHT PREFIX WEIGHT PREFIX ...`.

    Raises:
        ConfigError: A weight is missing or not a positive number.
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


def parse_split(text: str) -> tuple[float, float, float]:
    """Return the shares of training, validation and test, adding up to one, from "969, 30, 1".

    Numbers are separated by "," or "/"; missing ones are zero.

    Raises:
        ConfigError: The text is not one to three non-negative numbers with a positive sum.
    """
    try:
        shares = [float(part) for part in text.split("," if "," in text else "/")]
    except ValueError:
        shares = []
    total = sum(shares)
    if not (1 <= len(shares) <= 3 and min(shares) >= 0 and 0 < total < math.inf):
        raise ConfigError(
            f"--split {text!r} is not one to three numbers, none negative and one above zero: "
            'write the shares of training, validation and test, for example "969, 30, 1"'
        )
    train, valid, test = (*(share / total for share in shares), 0.0, 0.0)[:3]
    return train, valid, test


def split_bounds(text: str, num_documents: int) -> tuple[int, int, int, int]:
    """Return document bounds: training `[b0, b1)`, validation `[b1, b2)`, test `[b2, b3)`.

    Each share is rounded to whole documents (halves to even). Any surplus or shortfall of the sum
    is then taken from every bound but the first, as Megatron does.

    Raises:
        ConfigError: The text is not a split, as for `parse_split`.
    """
    bounds = [0]
    for share in parse_split(text):
        bounds.append(bounds[-1] + round(share * float(num_documents)))
    surplus = bounds[-1] - num_documents
    # A bound cannot leave [0, num_documents], where rounding and a zero share would push it.
    _, first, second, last = (max(0, min(bound - surplus, num_documents)) for bound in bounds)
    return 0, first, second, last


def corpus_fingerprint(data: DataConfig) -> str | None:
    """Return a digest of the training datasets, in their order; `None` for generated tokens.

    A position in the data is a count of samples, which means nothing over another corpus, and a
    corpus that was preprocessed again has the same name and often the same size. The digest covers
    sizes and 256 KiB of each file. That is enough to notice other text, another tokenizer or
    another order of documents, but not a few tokens that were changed in place.

    Raises:
        DataError: A file cannot be read.
    """
    paths = data.train_data_path or data.data_path
    if data.mock_data or not paths:
        return None
    whole = hashlib.sha256()
    for _, prefix in parse_weighted_paths(paths, "--data-path"):
        for path in (idx_path(prefix), bin_path(prefix)):
            try:
                with path.open("rb", buffering=0) as file:
                    size = os.fstat(file.fileno()).st_size
                    digest = hashlib.sha256(str(size).encode())
                    last = max(0, size - _BLOCK)
                    for place in sorted({last * i // (_BLOCKS - 1) for i in range(_BLOCKS)}):
                        file.seek(place)
                        digest.update(file.read(_BLOCK))
            except OSError as error:
                raise DataError(f"{path}: cannot be read: {error.strerror}") from error
            whole.update(digest.digest())
    return whole.hexdigest()[:32]


def _open_members(
    data: DataConfig, count_documents: Callable[[IndexedDataset], int]
) -> tuple[list[_Member], list[_Member], list[_Member]]:
    """Open the datasets of training, validation and test, and cut those that --split shares."""
    paths = (data.train_data_path, data.valid_data_path, data.test_data_path)
    if data.data_path is None and not any(paths):
        raise ConfigError(
            "no data: give --data-path, or --train-data-path with --valid-data-path and "
            "--test-data-path, or --mock-data for generated tokens"
        )
    named = [(f"--{SPLIT_NAMES[i]}-data-path", path or (), [i]) for i, path in enumerate(paths)]
    if data.data_path is not None:
        named = [("--data-path", data.data_path, [0, 1, 2])]
    splits: tuple[list[_Member], list[_Member], list[_Member]] = ([], [], [])
    for flag, path, takers in named:
        for weight, prefix in parse_weighted_paths(path, flag):
            opened = IndexedDataset(prefix)
            if data.mmap_warmup:
                with open(bin_path(prefix), "rb") as file:
                    while file.read(1 << 24):
                        pass
            documents = count_documents(opened)
            bounds = [(0, documents)] * 3
            if len(takers) > 1:
                bounds = list(itertools.pairwise(split_bounds(data.split, documents)))
            for i in takers:
                splits[i].append(_Member(weight, opened, bounds[i], documents))
    return splits


def _build_split(
    split: str,
    members: Sequence[_Member],
    num_samples: int,
    request: DataRequest,
    build_part: Callable[[DatasetPart], DescribedDataset],
) -> SampleDataset | None:
    """Build the dataset of one split, a blend if it has several members."""
    flag = request.data.split
    kept = [member for member in members if member.bounds[0] < member.bounds[1]]
    if num_samples == 0 or not members:
        return None
    if not kept:
        if split != "train":  # a run can do without validation or test data
            return None
        sizes = ", ".join(f"{member.data.prefix}: {member.documents}" for member in members)
        raise DataError(
            f"{num_samples} training samples are requested, but the training split has no document "
            f"(documents in {sizes}; --split {flag!r}): change --split or give more data"
        )
    if len(kept) < len(members) and request.is_builder:
        left_out = ", ".join(m.data.prefix for m in members if m not in kept)
        warn(
            f"--split {flag!r} leaves no {split} document in {left_out}: the {split} blend is "
            "made without it"
        )
    if len(members) == 1:
        return build_part(DatasetPart(split, kept[0].data, kept[0].bounds, num_samples))
    weights = [member.weight for member in kept]
    counts = samples_of_each(weights, num_samples)
    datasets = [
        build_part(DatasetPart(split, member.data, member.bounds, count))
        for member, count in zip(kept, counts, strict=True)
    ]
    cache_path = request.data.data_cache_path
    return blend(datasets, weights, sum(counts), cache_path, warns=request.is_builder)
