"""Sentences for BERT and T5 samples: maps of sentences, and the datasets that are based on them.

Sentence maps are saved under Megatron-LM's names:

    <prefix>_<split>_indexmap_<samples>mns_<longest>msl_<short share>ssp_<seed>s.npy

The name does not contain everything that determines a map: --split, the number of segments, and the
data itself are missing. A digest in `<name without .npy>.sha256` covers these and the rows, so that
one map is never mistaken for another (`cache.ArrayFiles`). If a map's name is already in use for
another map, a digest of its description is added to the name. Maps that Megatron wrote have no
digest, so they are built again.
"""

from __future__ import annotations

import dataclasses
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from megatron.data.cache import ArrayFiles, digest_of, open_array, warning_if_unwritable
from megatron.data.datasets import DataRequest, DatasetPart, Datasets, build_datasets
from megatron.data.indexed import IndexedDataset, bin_path, idx_path
from megatron.data.masking import SpecialIds, choose_spans, masking_budget, whole_words
from megatron.data.mock import MockSentences
from megatron.data.sample import DescribedDataset, Sample, outside_vocabulary
from megatron.data.sentence_map import (
    LONGEST_SENTENCE,
    DocumentSentences,
    SentenceMapPlan,
    build_sentence_map,
)
from megatron.data.tfrecord import TFRecords
from megatron.errors import ConfigError, DataError, warn
from megatron.tokenizer.base import Tokenizer

_MIN_TEXT_TOKENS = 2  # the minimum number of text tokens in a sample
Tokens = NDArray[Any]


class SentenceSource(DescribedDataset, Protocol):
    """A source that supplies the sentences and the target length of each sample."""

    def __getitem__(self, i: int) -> tuple[list[Tokens], int]:
        """Return the sentences of sample `i`, and how many of their tokens it may use."""


@dataclasses.dataclass(eq=False)
class MappedSentences:
    """The sentences in an indexed dataset that a map assigns to each sample.

    Attributes:
        data: The dataset.
        rows: The map, as returned by `build_sentence_map`.
        description: The text that describes the map.
        vocab_size: The size of the vocabulary. Token ids at or above it are rejected.
    """

    data: IndexedDataset
    rows: NDArray[Any]
    description: str
    vocab_size: int

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.rows)

    def __getitem__(self, i: int) -> tuple[list[Tokens], int]:
        """Return the sentences and the target length of row `i`.

        Raises:
            DataError: A token id is outside the vocabulary.
        """
        first, end, target = self.rows[i].tolist()
        sentences = [self.data.get(number) for number in range(first, end)]
        for number, sentence in enumerate(sentences, start=first):
            if len(sentence) and int(sentence.max()) >= self.vocab_size:
                where = f"{bin_path(self.data.prefix)}: sentence {number}"
                raise outside_vocabulary(where, int(sentence.max()), self.vocab_size)
        return sentences, target


@dataclasses.dataclass(eq=False)
class SentenceSamples(ABC):
    """A dataset of samples that are made from sentences.

    Attributes:
        source: The sentences of each sample.
        ids: The special ids for this kind of sample.
        options: The settings for this kind of sample, with at least `mask_prob` and `seed`.
    """

    source: SentenceSource
    ids: SpecialIds
    options: Any
    _random: np.random.RandomState = dataclasses.field(default_factory=np.random.RandomState)
    kind: ClassVar[str]

    @property
    def description(self) -> str:
        """Text that names the data and the settings of the samples."""
        return f"{self.kind} Dataset\n\n{self.source.description}{self.options}\n"

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.source)

    def __getitem__(self, i: int) -> Sample:
        """Return sample `i`, whose random draws are seeded with `seed + i`.

        Raises:
            DataError: A token id is outside the vocabulary.
        """
        sentences, target = self.source[i]
        # Seeding takes a fifth of the time that creating a generator takes.
        self._random.seed((self.options.seed + i) % 2**32)
        return {**self._make(sentences, target, self._random), "id": i}

    @abstractmethod
    def _make(self, sentences: list[Tokens], target: int, random: np.random.RandomState) -> Sample:
        """Make a sample, without its `id`, from at most `target` tokens of the sentences."""

    def _choose_spans(
        self, text: NDArray[np.int64], target: int, draw_words: Callable[[], int]
    ) -> Iterator[list[int]]:
        """Yield the positions in `text` of each span of words to mask."""
        budget = masking_budget(self.options.mask_prob, len(text), target)
        return choose_spans(whole_words(text, self.ids), budget, draw_words, self._random)


def build_sentence_datasets(
    request: DataRequest,
    plan: SentenceMapPlan,
    tokenizer: Tokenizer,
    find_ids: Callable[[Tokenizer], SpecialIds],
    build: Callable[[SentenceSource, SpecialIds], DescribedDataset],
    build_from_tfrecords: Callable[[DatasetPart], DescribedDataset] | None = None,
) -> Datasets:
    """Build the datasets that `build` makes from sentences. Collective.

    Args:
        request: The data that the run needs.
        plan: The settings of the sentence map, from `plan_sentences`.
        tokenizer: The tokenizer, which supplies the special ids.
        find_ids: A function that finds the special ids for this kind of sample in a tokenizer.
        build: A function that makes the samples from sentences and special ids.
        build_from_tfrecords: A function that makes the samples from TFRecords, or `None` if they
            are not supported.

    Raises:
        ConfigError: The vocabulary lacks a special token, no data is named, the data is text, or
            --data-path or --split cannot be parsed.
        DataError: A dataset is missing, damaged, too small or made with a different tokenizer.
    """
    is_mock = request.data.mock_data
    ids = SpecialIds.generated(tokenizer.vocab_size) if is_mock else find_ids(tokenizer)

    def build_part(part: DatasetPart) -> DescribedDataset:
        if build_from_tfrecords is not None and isinstance(part.data, TFRecords):
            dataset = build_from_tfrecords(part)
        else:
            part_plan = plan._replace(num_samples=part.num_samples)
            dataset = build(map_sentences(part, part_plan, request, vocab_size=ids.size), ids)
        _ = dataset[0]  # fail now rather than at a later step if another tokenizer made the data
        return dataset

    def build_mock(count: int, split: int) -> DescribedDataset:
        return build(MockSentences(count, plan, ids, split), ids)

    return build_datasets(
        request,
        build_part,
        build_mock,
        has_sentences=True,
        reads_tfrecords=build_from_tfrecords is not None,
    )


def plan_sentences(
    request: DataRequest, flag: str, length: int, reserved: int, min_sentences: int = 1
) -> SentenceMapPlan:
    """Return the settings of a sentence map. The number of samples is filled in later.

    Args:
        request: The data that the run needs.
        flag: The flag that sets the length, for messages.
        length: The number of tokens in a sample, including special tokens.
        reserved: The number of special tokens in a sample.
        min_sentences: The minimum number of sentences in a sample.

    Raises:
        ConfigError: The sequence has no room for text.
    """
    if length < reserved + _MIN_TEXT_TOKENS:
        raise ConfigError(
            f"{flag} {length}: {reserved} of the tokens are reserved for special tokens: give at "
            f"least {reserved + _MIN_TEXT_TOKENS}"
        )
    short = request.data.short_seq_prob
    return SentenceMapPlan(0, length - reserved, short, request.seed, min_sentences)


def map_sentences(
    part: DatasetPart, plan: SentenceMapPlan, request: DataRequest, *, vocab_size: int
) -> MappedSentences:
    """Load or build the sentence map of a part of a dataset.

    The map is saved next to the dataset, or in --data-cache-path. The builder warns about documents
    that are dropped for a long sentence.

    Args:
        part: The documents of the split, and the number of samples.
        plan: The settings of the map.
        request: The data that the run needs.
        vocab_size: The number of entries in the vocabulary.

    Raises:
        DataError: No document is usable.
    """
    data, (start, end) = part.data, part.bounds
    text = DocumentSentences(data.document_indices[start : end + 1], data.sequence_lengths)
    if not text.usable(plan.min_sentences).any():
        two = plan.min_sentences > 1
        need = "two sentences (or --bert-no-binary-head)" if two else "one sentence"
        raise DataError(
            f"{data.prefix}: no sample can be made from the {part.split} documents {start} to "
            f"{end - 1}: a document needs at least {need}, each of at most {LONGEST_SENTENCE} "
            "tokens. Preprocess the text with --split-sentences, change --split or give more data"
        )
    if request.is_builder:
        warn_about_overlong(part, int(text.overlong().sum()))
    description = (
        f"Sentence map\n\nDataset name {part.split}\nDocuments {start} to {end}\n"
        f"Sentences {len(data)}\nTokens {data.num_tokens}\n"
        f"Number of samples {plan.num_samples}\nLongest sample {plan.max_length}\n"
        f"One short in {plan.short_ratio}\nFewest sentences {plan.min_sentences}\n"
        f"Random seed {plan.seed}\n"
    )
    name = (
        f"{part.split}_indexmap_{plan.num_samples}mns_{plan.max_length}msl_"
        f"{plan.short_seq_prob:0.2f}ssp_{plan.seed}s"
    )
    rows = load_or_build_map(
        data.prefix, name, description, text, lambda: build_sentence_map(plan, text), request
    )
    return MappedSentences(data, rows, f"Data prefix {data.prefix}\n{description}", vocab_size)


def warn_about_overlong(part: DatasetPart, count: int) -> None:
    """Warn about documents that are dropped for a long sentence. Megatron drops them silently.

    Args:
        part: The documents of the split.
        count: The number of dropped documents.
    """
    if count:
        first, end = part.bounds
        warn(
            f"{part.data.prefix}: {count} of the {end - first} {part.split} documents are dropped, "
            f"because they have a sentence of more than {LONGEST_SENTENCE} tokens: to keep them, "
            "split the text into shorter sentences when preprocessing"
        )


def load_or_build_map(
    prefix: str,
    name: str,
    description: str,
    inputs: Sequence[NDArray[Any]],
    build: Callable[[], NDArray[Any]],
    request: DataRequest,
) -> NDArray[Any]:
    """Load a map of sentences, or build and save it, `[n, columns]`.

    The map is saved next to the dataset, or in --data-cache-path. If it cannot be saved, the
    builder prints a warning.

    Args:
        prefix: The dataset's prefix, with which the name of the map's file begins.
        name: The remainder of the file's name, without `.npy`.
        description: The text that describes the map.
        inputs: The arrays that, together with the description, determine the map.
        build: A function that builds the map.
        request: The data that the run needs.
    """
    stem = f"{prefix}_{name}"
    digest = hashlib.md5(description.encode(), usedforsecurity=False).hexdigest()[:8]
    # The second name is used if the first one belongs to a different map.
    names = [Path(stem), Path(f"{stem}_{digest}")]
    cache_path = request.data.data_cache_path
    writable = names if cache_path is None else [Path(cache_path) / path.name for path in names]
    source, inputs_digest = idx_path(prefix), digest_of(description, inputs)
    candidates = [
        ArrayFiles(path, ("",), inputs_digest, source)
        for path in dict.fromkeys([*names, *writable])
    ]
    for files in candidates:
        cached = files.load()
        if cached is not None:
            return cached[0]
    rows = build()
    existing = open_array(Path(f"{writable[0]}.npy"), source)
    path = writable[0] if existing is None or np.array_equal(existing, rows) else writable[1]
    with warning_if_unwritable(f"sentence map {path}.npy", warns=request.is_builder):
        (rows,) = ArrayFiles(path, ("",), inputs_digest, source).save((rows,))
    return rows
