"""The datasets that the flags name: opened, divided into splits, blended.

Each kind of sample (`gpt`, `bert`, `t5`) calls `build_datasets` with a function that makes the
samples of one part of one indexed dataset.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from megatron.config import RunConfig
from megatron.config.data import SPLIT_NAMES, DataConfig, is_number
from megatron.data.blend import (
    BlendPhase,
    JoinedDataset,
    blend,
    parse_blend_schedule,
    samples_per_dataset,
)
from megatron.data.cache import IndexCache, builder_first
from megatron.data.indexed import IndexedDataset, bin_path, idx_path
from megatron.data.named import paths_of
from megatron.data.sample import DescribedDataset, SampleDataset
from megatron.data.text_stream import NoTokensError, TextCorpus, is_text
from megatron.data.tfrecord import TFRecords, find_tfrecords
from megatron.errors import ConfigError, DataError, warn
from megatron.parallel.layout import Layout

_BLOCKS, _BLOCK = 64, 4096  # blocks of each file that a fingerprint reads, and bytes per block
_ADDRESS = "://"  # part of every URL, and of no path


class DataRequest(NamedTuple):
    """The data that a run needs, for any kind of sample.

    Attributes:
        data: The flags that name datasets, splits and caches.
        seed: The seed of every shuffle and draw.
        samples: The numbers of training, validation and test samples that the run needs. `None` for
            validation means every sample of the validation data, once.
        is_builder: True in exactly one process, which writes caches before the others look for them
            and prints the warnings.
        barrier: A function that waits until every process has called it. It is called once, or not
            at all for --mock-data.
        unit: The number of samples in a unit of --blend-schedule: the global batch size, or 1.
        blends_single: Whether to treat a single dataset as a blend, with half a percent of extra
            samples, as Megatron-LM does if the dataset has a weight. This changes the order of
            samples.
    """

    data: DataConfig
    seed: int
    samples: tuple[int, int | None, int]
    is_builder: bool = True
    barrier: Callable[[], None] = lambda: None
    unit: int = 1
    blends_single: bool = False

    @staticmethod
    def of(config: RunConfig, samples: tuple[int, int | None, int], layout: Layout) -> DataRequest:
        """Return the request of a run for these numbers of samples."""
        return DataRequest(
            config.data,
            config.training.seed,
            samples,
            is_builder=layout.world.rank == 0,
            barrier=layout.world.barrier,
            unit=config.training.samples_per_unit,
        )

    def cache(self, *folders: Path) -> IndexCache:
        """Return the cache in `folders`, and in --data-cache-path if it is given."""
        cache_path = self.data.data_cache_path
        if cache_path is not None:
            folders = (*folders, Path(cache_path))
        return IndexCache(folders, self.is_builder)


class DatasetPart(NamedTuple):
    """The documents of one dataset that belong to one split.

    Attributes:
        split: The split: train, valid or test.
        data: The whole dataset: an `IndexedDataset`, or another source for this kind of sample.
        bounds: The half-open range of the part's documents.
        num_samples: The number of samples that the split needs from this part.
    """

    split: str
    data: Any
    bounds: tuple[int, int]
    num_samples: int


BuildPart = Callable[[DatasetPart], DescribedDataset]
# A function that returns the number of samples in an epoch of a part of a dataset, from the dataset
# and the part's bounds.
EpochSamples = Callable[[Any, tuple[int, int]], int]
# A function that makes the samples of text from the corpus, the bounds of the split's pieces, the
# number of samples and the index of the dataset in its blend.
BuildText = Callable[[TextCorpus, tuple[int, int], int, int], DescribedDataset]


class Datasets(NamedTuple):
    """One dataset per split.

    A split is `None` if no samples were requested or no data was named for it. Validation and test
    are also `None` if --split leaves them no documents, or no tokens of a text.
    """

    train: SampleDataset | None
    valid: SampleDataset | None
    test: SampleDataset | None

    def map(self, wrap: Callable[[SampleDataset], SampleDataset]) -> Datasets:
        """Apply a function to each dataset, and return the results.

        If a split consists of several separate datasets, the function is applied to each of them.
        """

        def wrap_each(split: SampleDataset | None) -> SampleDataset | None:
            if isinstance(split, JoinedDataset):
                return JoinedDataset([wrap(dataset) for dataset in split.datasets])
            return None if split is None else wrap(split)

        return Datasets(*map(wrap_each, self))


class DataSource(Protocol):
    """The data that an entry of --data-path names."""

    @property
    def prefix(self) -> str:
        """The path of the data, as given in the flag."""

    @property
    def size(self) -> int:
        """The size in tokens, records or bytes, used if a blend has no weights."""

    def __len__(self) -> int:
        """Return the number of documents that --split divides."""


class _Member(NamedTuple):
    """One dataset in the blend of a split.

    Attributes:
        weight: The weight of the dataset in the blend; `None` if the user gave none.
        data: The dataset.
        bounds: The half-open range of the split's documents.
        documents: The number of documents in the whole dataset.
    """

    weight: float | None
    data: DataSource
    bounds: tuple[int, int]
    documents: int


def build_datasets(
    request: DataRequest,
    build_part: BuildPart,
    build_mock: Callable[[int, int], SampleDataset] | None = None,
    *,
    has_sentences: bool = False,
    build_text: BuildText | None = None,
    reads_tfrecords: bool = False,
    open_source: Callable[[str, str], DataSource] | None = None,
    epoch_samples: EpochSamples | None = None,
) -> Datasets:
    """Build the training, validation and test data that the flags name.

    Collective.

    Args:
        request: The data that the run needs.
        build_part: A function that makes the samples of one part of one dataset.
        build_mock: A function that makes the samples of --mock-data, from the number of samples and
            the index of the split. `None` if a rule rejects --mock-data.
        has_sentences: Whether the sequences of an indexed dataset are sentences, so that --split
            divides documents. By default each sequence is a document, as in Megatron's GPT.
        build_text: A function that makes the samples of text. Without it, text is rejected.
        reads_tfrecords: Whether `build_part` also makes samples from TFRecords, one per record.
        open_source: A function that opens the path in a flag as a custom source, instead of any of
            the above. `build_part` makes the samples.
        epoch_samples: A function that returns the number of samples in an epoch of a part of a
            dataset. Indexed datasets without weights are blended by these numbers. By default, they
            are blended by their numbers of tokens, and --full-validation is rejected.

    Raises:
        ConfigError: No data is named, --data-path, --split or --blend-schedule cannot be parsed or
            does not fit the datasets, or text or --full-validation is not supported here.
        DataError: A dataset is missing, damaged, too small or made with a different tokenizer.
    """
    if request.data.mock_data:
        assert build_mock is not None, "a rule refuses --mock-data"
        counts = enumerate(request.samples)
        return Datasets(*(build_mock(count, i) if count else None for i, count in counts))
    if request.samples[1] is None and epoch_samples is None:
        raise ConfigError(
            "--full-validation: the number of validation samples in this kind of data is unknown: "
            "use --eval-iters, and drop the flag"
        )
    if open_source is None:
        reads_text = build_text is not None
        open_source = partial(_open, request.data, reads_text, reads_tfrecords)
    with builder_first(request.is_builder, request.barrier):
        members = _open_members(request.data, open_source, has_sentences=has_sentences)

        def build(split: str, member: _Member, count: int, dataset_index: int) -> DescribedDataset:
            if not isinstance(member.data, TextCorpus):
                return build_part(DatasetPart(split, member.data, member.bounds, count))
            assert build_text is not None, "text was refused"
            return build_text(member.data, member.bounds, count, dataset_index)

        return Datasets(
            *(_build_split(*split, request, build, epoch_samples) for split in enumerate(members))
        )


def parse_weighted_paths(paths: Sequence[str], flag: str) -> list[tuple[float | None, str]]:
    """Parse weights and prefixes from `PREFIX PREFIX ...` or `WEIGHT PREFIX WEIGHT PREFIX ...`.

    Args:
        paths: The words in the value of the flag.
        flag: The flag, for messages.

    Returns:
        The weight and prefix of each dataset. If no weights are given, each weight is `None`, and
        the datasets are blended in proportion to their sizes.

    Raises:
        ConfigError: A weight or prefix is missing, a weight is not a positive number, or a name
            stands for several paths.
        DataError: The user's file of corpus names is unusable (see `paths_of`).
    """
    if len(paths) == 1 or not any(map(is_number, paths)):
        return [(None, _only_path(path.strip(), flag)) for path in paths]
    pairs: list[tuple[float | None, str]] = []
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
        pairs.append((weight, _only_path(prefix[0].strip(), flag)))
    return pairs


def _only_path(entry: str, flag: str) -> str:
    paths = paths_of(entry)
    if len(paths) > 1:
        raise ConfigError(
            f"{flag} {entry}: this name stands for {len(paths)} paths: give the prefix of the "
            "dataset that was made from them"
        )
    return paths[0]


def parse_split(text: str) -> tuple[float, ...]:
    """Return the shares of training, validation and test from a string such as "969, 30, 1".

    The shares add up to one. Numbers are separated by "," or "/"; missing numbers are zero.

    Raises:
        ConfigError: The string is not one to three non-negative numbers with a positive sum.
    """
    try:
        shares = [float(part) for part in text.split("," if "," in text else "/")]
    except ValueError:
        shares = []
    total = sum(shares)
    if not (1 <= len(shares) <= 3 and min(shares) >= 0 and 0 < total < math.inf):
        raise ConfigError(
            f"--split {text!r} is not a list of one to three numbers, none negative and at least "
            'one above zero: write the shares of training, validation and test, such as "969,30,1"'
        )
    return (*(share / total for share in shares), 0.0, 0.0)[:3]


def split_bounds(text: str, num_documents: int, rounding: str = "sizes") -> tuple[int, ...]:
    """Return document bounds b0 to b3: training `[b0, b1)`, validation `[b1, b2)`, test `[b2, b3)`.

    Halves are rounded to even numbers of documents.

    Args:
        text: The shares, as in --split.
        num_documents: The number of documents.
        rounding: Which numbers are rounded. With "sizes", as in Megatron-LM 23.08, each share is
            rounded, and any surplus or shortfall of the sum is then taken from every bound except
            the first. With "bounds", as in Megatron Core, the sums of the shares are rounded.

    Raises:
        ConfigError: `parse_split` cannot parse `text`.
    """
    shares = parse_split(text)
    if rounding == "bounds":
        return 0, *(round(end * float(num_documents)) for end in itertools.accumulate(shares))
    sizes = [round(share * float(num_documents)) for share in shares]
    surplus = sum(sizes) - num_documents
    # Rounding and a zero share could push a bound out of [0, num_documents].
    ends = (max(0, min(end - surplus, num_documents)) for end in itertools.accumulate(sizes))
    return 0, *ends


def corpus_fingerprint(data: DataConfig) -> str | None:
    """Return a digest of the training datasets, in order; `None` for generated tokens or no data.

    A position in the data is a count of samples, which has no meaning for another corpus. A corpus
    that was preprocessed again has the same name and often the same size. The digest covers the
    size and 256 KiB of each file. This detects different text, a different tokenizer and a
    different order of documents, but not a change of a few tokens in place. Files at a URL are
    copied first.

    Raises:
        ConfigError: `parse_weighted_paths` cannot parse the flag.
        DataError: A file cannot be read.
    """
    paths = data.train_data_path or data.data_path
    if data.mock_data or not paths:
        return None
    fingerprint = hashlib.sha256()
    flag = "--train-data-path" if data.train_data_path else "--data-path"
    for _, name in parse_weighted_paths(paths, flag):
        prefix = local_path(name, flag, data)
        files: Sequence[Path] = find_tfrecords(prefix)
        if not files and is_text(prefix):
            files = [Path(file) for file in TextCorpus(prefix, data.text_key, flag).files]
        for path in files or (idx_path(prefix), bin_path(prefix)):
            try:
                with path.open("rb", buffering=0) as file:
                    size = os.fstat(file.fileno()).st_size
                    digest = hashlib.sha256(str(size).encode())
                    last_offset = max(0, size - _BLOCK)
                    for offset in sorted(
                        {last_offset * i // (_BLOCKS - 1) for i in range(_BLOCKS)}
                    ):
                        file.seek(offset)
                        digest.update(file.read(_BLOCK))
            except OSError as error:
                raise DataError(f"{path}: cannot be read: {error.strerror}") from error
            fingerprint.update(digest.digest())
    return fingerprint.hexdigest()[:32]


def local_path(name: str, flag: str, data: DataConfig) -> str:
    """Return the local path of an entry of --data-path, after copying the files at a URL.

    Args:
        name: The path or URL.
        flag: The flag that contains the entry, for messages.
        data: The flags of the data, which set the folder for copies.

    Raises:
        ConfigError: There is no folder for copies, or the library for the URL is not installed.
        DataError: There are no files at the URL, or a file cannot be read.
        StorageError: The copy cannot be written.
    """
    if _ADDRESS not in name:
        return name
    from megatron.data.remote import local_copy  # few runs need its libraries

    return local_copy(name, flag, data.data_cache_path)


def _open_members(
    data: DataConfig, open_source: Callable[[str, str], DataSource], *, has_sentences: bool
) -> tuple[list[_Member], list[_Member], list[_Member]]:
    """Open the training, validation and test datasets, and split those of --data-path."""
    paths = (data.train_data_path, data.valid_data_path, data.test_data_path)
    if data.data_path is None and not any(paths):
        raise ConfigError(
            "no data: give --data-path, or --train-data-path with --valid-data-path and "
            "--test-data-path, or --mock-data for generated tokens"
        )
    entries = [(f"--{SPLIT_NAMES[i]}-data-path", path or (), [i]) for i, path in enumerate(paths)]
    if data.data_path is not None:
        entries = [("--data-path", data.data_path, [0, 1, 2])]
    splits: tuple[list[_Member], list[_Member], list[_Member]] = ([], [], [])
    for flag, path, split_indices in entries:
        pairs = parse_weighted_paths(path, flag)
        for weight, name in pairs:
            source = open_source(local_path(name, flag, data), flag)
            documents = len(source)
            if has_sentences and isinstance(source, IndexedDataset):
                documents = source.num_documents
            bounds = [(0, documents)] * 3
            if len(split_indices) > 1:
                ends = split_bounds(data.split, documents, data.split_rounding or "sizes")
                bounds = list(itertools.pairwise(ends))
            for i in split_indices:
                splits[i].append(_Member(weight, source, bounds[i], documents))
        if (
            len({type(member.data) for member in splits[split_indices[0]]}) > 1
            and pairs[0][0] is None
        ):
            raise ConfigError(
                f"{flag} blends text and indexed datasets, whose sizes cannot be compared: give "
                "WEIGHT PREFIX WEIGHT PREFIX ..."
            )
    return splits


def _open(
    data: DataConfig, reads_text: bool, reads_tfrecords: bool, prefix: str, flag: str
) -> DataSource:
    """Open a dataset, or list the files of a text corpus."""
    if reads_tfrecords and (records := find_tfrecords(prefix)):
        return TFRecords(prefix, records)
    if not is_text(prefix):
        dataset = IndexedDataset(prefix)
        if data.mmap_warmup:
            with bin_path(prefix).open("rb") as file:
                while file.read(1 << 24):
                    pass
        return dataset
    if not reads_text:
        raise ConfigError(
            f"{flag} {prefix}: only pretrain_gpt.py trains on text files; this program needs "
            "sentences: run tools/preprocess_data.py --split-sentences first"
        )
    if data.dataloader_type == "cyclic":
        raise ConfigError(
            f"--dataloader-type cyclic: {flag} {prefix} is text, which is read in streams that "
            "have their own order: drop --dataloader-type"
        )
    return TextCorpus(prefix, data.text_key, flag)


def _build_split(
    split_index: int,
    members: Sequence[_Member],
    request: DataRequest,
    build: Callable[[str, _Member, int, int], DescribedDataset],
    epoch_samples: EpochSamples | None,
) -> SampleDataset | None:
    """Build the dataset of split `split_index`, as a blend if it has several members."""
    split, num_samples = SPLIT_NAMES[split_index], request.samples[split_index]
    flag = request.data.split
    if num_samples is None:
        assert epoch_samples is not None, "--full-validation was refused"
        return _build_whole(split, members, request, build, epoch_samples)
    nonempty = [member for member in members if member.bounds[0] < member.bounds[1]]
    if num_samples == 0 or not members:
        return None
    if not nonempty:
        sizes = ", ".join(f"{member.data.prefix}: {member.documents}" for member in members)
        if split != "train":  # a run can do without validation or test data
            # A small corpus has no test data under the default --split. That needs no warning.
            is_split = request.data.data_path is not None and parse_split(flag)[1] > 0
            if split == "valid" and is_split and request.is_builder:
                warn(
                    f"this run has no validation data: --split {flag!r} leaves no documents for it "
                    f"(documents in {sizes}; a .txt, compressed or parquet file counts as one): "
                    "change --split, or give --train-data-path and --valid-data-path"
                )
            return None
        raise DataError(
            f"{num_samples} training samples are requested, but the training split has no "
            f"documents (documents in {sizes}; --split {flag!r}): change --split or give more data"
        )
    if len(nonempty) < len(members) and request.is_builder:
        empty = ", ".join(m.data.prefix for m in members if m not in nonempty)
        warn(f"--split {flag!r} leaves no {split} documents in {empty}: not part of the blend")
    if len(members) == 1 and not request.blends_single:
        try:
            return build(split, nonempty[0], num_samples, 0)
        except NoTokensError as error:
            # A run can do without this split too: --split may leave no tokens of a small text.
            if split == "train" or nonempty[0].bounds == (0, nonempty[0].documents):
                raise
            if request.is_builder:
                name = "validation" if split == "valid" else split
                warn(f"this run has no {name} data: {error}")
            return None
    phase, counts = _constant_blend(nonempty, num_samples, epoch_samples)
    phases = [phase]
    if split == "train" and request.data.blend_schedule is not None:
        schedule = parse_blend_schedule(request.data.blend_schedule, len(members), request.unit)
        if len(nonempty) < len(members):
            raise ConfigError(
                f"--blend-schedule: --split {flag!r} leaves a dataset without training documents: "
                "drop the dataset, or change --split"
            )
        phases = [phase for phase in schedule if phase.start < num_samples]
        counts = samples_per_dataset(phases, num_samples)
    datasets = [
        build(split, member, count, index)
        for index, (member, count) in enumerate(zip(nonempty, counts, strict=True))
    ]
    size = num_samples if phases[0].are_sizes else sum(counts)
    return blend(datasets, phases, size, request.cache())


def _build_whole(
    split: str,
    members: Sequence[_Member],
    request: DataRequest,
    build: Callable[[str, _Member, int, int], DescribedDataset],
    epoch_samples: EpochSamples,
) -> JoinedDataset:
    """Build the dataset of --full-validation: every sample of the split's datasets, once.

    Raises:
        ConfigError: Datasets have weights, or one is text, whose number of samples is unknown until
            it has been read.
        DataError: A dataset of --valid-data-path has no sample, or --split leaves no sample at all.
    """
    counts = []
    for member in members:
        if member.weight is not None:  # a program's own flag; a rule checks the usual ones
            raise ConfigError(
                f"--full-validation uses every sample of {member.data.prefix}, but it has the "
                f"weight {member.weight:g}: give validation data without weights, or drop the flag"
            )
        if isinstance(member.data, TextCorpus):
            raise ConfigError(
                f"--full-validation: {member.data.prefix} is text, whose number of samples is not "
                "known before it is read: run tools/preprocess_data.py first, or drop the flag"
            )
        is_empty = member.bounds[0] == member.bounds[1]
        counts.append(0 if is_empty else max(0, epoch_samples(member.data, member.bounds)))
    empty = [member.data.prefix for member, count in zip(members, counts, strict=True) if not count]
    if not any(counts) or (empty and request.data.valid_data_path is not None):
        cause = "too few tokens for a sample"
        if request.data.data_path is not None:
            cause = f"--split {request.data.split!r} leaves {cause}"
        raise DataError(
            f"--full-validation: {cause} of the validation data in {', '.join(empty)}: give more "
            "validation data, or drop the flag"
        )
    if empty and request.is_builder:
        warn(
            f"--split {request.data.split!r} leaves too few validation tokens for a sample in "
            f"{', '.join(empty)}: not part of the validation"
        )
    return JoinedDataset(
        [
            build(split, member, count, index)
            for index, (member, count) in enumerate(zip(members, counts, strict=True))
            if count
        ]
    )


def _constant_blend(
    members: Sequence[_Member], num_samples: int, epoch_samples: EpochSamples | None
) -> tuple[BlendPhase, list[int]]:
    """Return the proportions of a blend, and the number of samples to prepare from each dataset.

    Without weights, GPT datasets are blended by the samples that they have in the split. If these
    are enough for the run, one epoch of each dataset is prepared, as in Megatron Core. A longer run
    repeats the datasets; Megatron Core has no samples for it.
    """
    weights = [member.weight for member in members if member.weight is not None]
    if len(weights) == len(members):
        phase = BlendPhase(0, tuple(weights))
        return phase, samples_per_dataset([phase], num_samples)
    indexed = [(m.data, m.bounds) for m in members if isinstance(m.data, IndexedDataset)]
    if epoch_samples is None or not 1 < len(indexed) == len(members):
        phase = BlendPhase(0, tuple(member.data.size for member in members))
        return phase, samples_per_dataset([phase], num_samples)
    sizes = [max(1, epoch_samples(data, bounds)) for data, bounds in indexed]
    phase = BlendPhase(0, tuple(sizes), are_sizes=True)
    if num_samples <= sum(sizes):
        return phase, sizes
    return phase, samples_per_dataset([phase], num_samples)
