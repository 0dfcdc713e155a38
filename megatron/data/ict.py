"""Samples of the inverse cloze task: a sentence as the query, and the block that contains it.

    query    [CLS] sentence [SEP] [PAD] ...
    context  [CLS] title [SEP] other sentences of the block [SEP] [PAD] ...

With a small probability, the sentence is kept in its block, so that the model also learns to match
words. In shapes, s is the sequence length.

A block consists of consecutive sentences of a document and ends when block and title together reach
a target length. Documents that are too short, or that have a sentence of more than 512 tokens, are
dropped. A pass over the documents always gives the same blocks. Passes are repeated until there are
enough samples, and then all samples are shuffled. The map of blocks has a row `first sentence, last
sentence + 1, document, number of the block` per sample, `[n, 4]`.

The rules, the order of random draws and the maps on disk are the same as in Megatron-LM's
`build_blocks_mapping`, with one exception: a row has the document's index in the whole dataset, so
that validation and test blocks get their own titles. Megatron counts documents from the start of
the split and therefore uses the titles of other documents.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from megatron.config.retriever import RetrieverConfig
from megatron.data.datasets import DataRequest, DatasetPart, Datasets, build_datasets
from megatron.data.indexed import IndexedDataset, bin_path
from megatron.data.masking import SpecialIds
from megatron.data.mock import MockSentences
from megatron.data.sample import DescribedDataset, Sample, outside_vocabulary, pad_to
from megatron.data.sentence_map import LONGEST_SENTENCE, SentenceMapPlan, shuffled
from megatron.data.sentences import Tokens, load_or_build_map, warn_about_overlong
from megatron.errors import ConfigError, DataError
from megatron.tokenizer.base import Tokenizer

_ADDED_TOKENS = 3  # [CLS] and two [SEP]
_MIN_TEXT_TOKENS = 2  # the minimum number of text tokens in a context, however long its title is


class BlockMapPlan(NamedTuple):
    """The settings that, together with the lengths, determine a map of blocks.

    Attributes:
        num_samples: The minimum number of rows. Passes over the documents are always completed, so
            there may be more.
        max_length: The target length of a block and its title in tokens, without special tokens.
        seed: The seed of the shuffle.
        min_sentences: The minimum number of sentences in a block.
    """

    num_samples: int
    max_length: int
    seed: int
    min_sentences: int


class TitledDocuments(NamedTuple):
    """The sentences and titles of some documents of a dataset.

    Attributes:
        documents: The first sentence of each document, followed by the end of the last document,
            `[D + 1]`.
        lengths: The number of tokens in each sentence of the whole dataset, `[sentences]`.
        titles: The number of tokens in each of these documents' titles, `[D]`.
        first: The index of the first of these documents in the whole dataset, `[1]`.
    """

    documents: NDArray[np.int64]
    lengths: NDArray[np.int32]
    titles: NDArray[np.int64]
    first: NDArray[np.int64]

    def overlong(self, min_sentences: int) -> NDArray[np.bool_]:
        """Return a mask of documents dropped for a sentence longer than 512 tokens, `[D]`.

        A document with fewer than `min_sentences` sentences is not in the mask.
        """
        start, end = int(self.documents[0]), int(self.documents[-1])
        is_long = self.lengths[start:end] > LONGEST_SENTENCE
        long_so_far = np.concatenate([[0], np.cumsum(is_long)])[self.documents - start]
        return (np.diff(long_so_far) > 0) & (np.diff(self.documents) >= min_sentences)

    def usable(self, min_sentences: int) -> NDArray[np.bool_]:
        """Return a mask of documents with enough sentences, none longer than 512 tokens, `[D]`."""
        return (np.diff(self.documents) >= min_sentences) & ~self.overlong(min_sentences)


def build_block_map(plan: BlockMapPlan, text: TitledDocuments) -> NDArray[Any]:
    """Build the map, `[n, 4]`, with at least `plan.num_samples` rows.

    The dtype is uint32, or uint64 for 2^32 or more sentences.

    Args:
        plan: The settings of the map.
        text: The documents. At least one must be usable.
    """
    once = blocks_of(plan, text)
    passes = max(1, -(-plan.num_samples // len(once)))
    order = shuffled(passes * len(once), plan.seed + 1) % len(once)
    dtype = np.uint64 if len(text.lengths) > np.iinfo(np.uint32).max else np.uint32
    return once.astype(dtype)[order]


def blocks_of(plan: BlockMapPlan, text: TitledDocuments) -> NDArray[np.int64]:
    """Return the blocks of one pass over the documents, in order, `[n, 4]`."""
    min_sentences = plan.min_sentences
    usable = np.flatnonzero(text.usable(min_sentences))
    assert len(usable), "without a usable document there are no blocks"
    start, end = int(text.documents[0]), int(text.documents[-1])
    # before[i] is the number of tokens before sentence start + i. after[i] is the end (exclusive)
    # of a block that starts at this sentence and reaches its target length.
    lengths = text.lengths[start:end].astype(np.int64)
    before = np.concatenate([[0], np.cumsum(lengths)])
    counts = np.diff(text.documents)
    target = np.repeat(plan.max_length - text.titles, counts)
    after = np.searchsorted(before, before[:-1] + target)
    after = np.maximum(after, np.arange(len(lengths)) + min_sentences)
    hops, starts, ends = after.data, text.documents[:-1], text.documents[1:]
    rows: list[tuple[int, int, int, int]] = []
    for document in usable.tolist():
        sentence, last = int(starts[document]) - start, int(ends[document]) - start
        while sentence < last:
            stop = hops[sentence]
            if last - stop < min_sentences:  # the rest is too short to form a separate block
                stop = last
            rows.append((sentence + start, stop + start, document, len(rows)))
            sentence = stop
    blocks = np.array(rows, np.int64)
    blocks[:, 2] += text.first[0]
    return blocks


class TitledBlock(NamedTuple):
    """A block of text, with the title of its document.

    Attributes:
        title: The title of the document.
        sentences: The sentences of the block.
        block_data: First sentence, last sentence + 1, document, number of the block, `[4]`.
    """

    title: Tokens
    sentences: list[Tokens]
    block_data: NDArray[np.int64]


class BlockSource(DescribedDataset, Protocol):
    """A source that supplies the block of each sample."""

    def __getitem__(self, i: int) -> TitledBlock:
        """Return the block of sample `i`."""


class ICTOptions(NamedTuple):
    """Settings for ICT samples.

    Attributes:
        seq_length: The sequence length s of queries and contexts, including special tokens.
        query_in_block_prob: The probability that the query is kept in its block.
        seed: The base of the random seeds. Sample i is drawn with the seed `seed + i`.
    """

    seq_length: int
    query_in_block_prob: float
    seed: int


@dataclass(eq=False)
class ICTDataset:
    """Samples of the inverse cloze task. A sample holds int64 arrays `[s]`.

    `query_tokens`, `context_tokens`: The tokens of query and context.
    `query_pad_mask`, `context_pad_mask`: 0 at padding, otherwise 1.
    `block_data`: `[4]`, as in `TitledBlock`.
    `id`: The sample's index.
    """

    source: BlockSource
    ids: SpecialIds
    options: ICTOptions

    @property
    def description(self) -> str:
        """Text that names the data and the settings of the samples."""
        return f"ICT Dataset\n\n{self.source.description}{self.options}\n"

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.source)

    def __getitem__(self, i: int) -> Sample:
        """Return sample `i`, whose random draws are seeded with `seed + i`.

        Raises:
            DataError: A token id is outside the vocabulary.
        """
        block, length = self.source[i], self.options.seq_length
        random = np.random.RandomState((self.options.seed + i) % 2**32)
        query_index = random.randint(len(block.sentences))
        keeps_query = random.random_sample() < self.options.query_in_block_prob
        context_sentences = (
            block.sentences
            if keeps_query
            else block.sentences[:query_index] + block.sentences[query_index + 1 :]
        )
        title = block.title[: length - _ADDED_TOKENS - _MIN_TEXT_TOKENS]
        room = length - _ADDED_TOKENS - len(title)
        text = (
            np.concatenate(context_sentences)[:room] if context_sentences else np.empty(0, np.int64)
        )
        cls, sep = [self.ids.cls], [self.ids.sep]
        query = np.concatenate([cls, block.sentences[query_index][: length - 2], sep])
        context = np.concatenate([cls, title, sep, text, sep])
        return {
            "query_tokens": pad_to(query, length, self.ids.pad),
            "query_pad_mask": pad_to(np.ones(len(query)), length, 0),
            "context_tokens": pad_to(context, length, self.ids.pad),
            "context_pad_mask": pad_to(np.ones(len(context)), length, 0),
            "block_data": block.block_data,
            "id": i,
        }


@dataclass(eq=False)
class MappedBlocks:
    """The blocks that a map lists, read from an indexed dataset.

    Attributes:
        data: The dataset of sentences.
        titles: The dataset of titles, where document i is the title of document i in `data`.
        rows: The map, as returned by `build_block_map`.
        description: The text that describes the map.
        vocab_size: The size of the vocabulary. Token ids at or above it are rejected.
    """

    data: IndexedDataset
    titles: IndexedDataset
    rows: NDArray[np.int64]
    description: str
    vocab_size: int

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.rows)

    def __getitem__(self, i: int) -> TitledBlock:
        """Return the block of row `i`.

        Raises:
            DataError: A token id is outside the vocabulary.
        """
        row = self.rows[i].astype(np.int64)
        first, end, document, _ = row.tolist()
        start, stop = self.titles.document_indices[document : document + 2].tolist()
        parts = [self._sentence(self.titles, number) for number in range(start, stop)]
        title = np.concatenate(parts) if parts else np.empty(0, np.int64)
        return TitledBlock(title, [self._sentence(self.data, n) for n in range(first, end)], row)

    def _sentence(self, data: IndexedDataset, number: int) -> Tokens:
        tokens = data.get(number)
        if len(tokens) and int(tokens.max()) >= self.vocab_size:
            where = f"{bin_path(data.prefix)}: sentence {number}"
            raise outside_vocabulary(where, int(tokens.max()), self.vocab_size)
        return tokens


@dataclass(eq=False)
class MockBlocks:
    """Generated blocks, whose tokens count up by a step that is constant within a block."""

    sentences: MockSentences

    @property
    def description(self) -> str:
        """Text that names the data and the settings of the samples."""
        return self.sentences.description

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.sentences)

    def __getitem__(self, i: int) -> TitledBlock:
        """Return the block of sample `i`, whose title is its first two tokens."""
        sentences, _ = self.sentences[i]
        block_data = np.array([0, len(sentences), i, i], np.int64)
        return TitledBlock(np.concatenate(sentences)[:2], sentences, block_data)


def build_ict_datasets(
    request: DataRequest, retriever: RetrieverConfig, *, seq_length: int, tokenizer: Tokenizer
) -> Datasets:
    """Build the datasets of the inverse cloze task. Collective.

    Args:
        request: The data that the run needs.
        retriever: The flags that name the titles and determine how blocks are used.
        seq_length: The number of tokens in a query and in a context, including special tokens.
        tokenizer: The tokenizer, which supplies the special ids.

    Raises:
        ConfigError: The sequence has no room for text, the vocabulary lacks a special token, no
            data is named, the data is text, or --data-path or --split cannot be parsed.
        DataError: A dataset is missing, damaged, too small or made with a different tokenizer, or
            the titles are missing or belong to another dataset.
    """
    if seq_length < _ADDED_TOKENS + _MIN_TEXT_TOKENS:
        raise ConfigError(
            f"--seq-length {seq_length}: {_ADDED_TOKENS} of the tokens are reserved for special "
            f"tokens: give at least {_ADDED_TOKENS + _MIN_TEXT_TOKENS}"
        )
    data = request.data
    room, min_sentences = seq_length - _ADDED_TOKENS, 1 if retriever.use_one_sent_docs else 2
    is_mock = data.mock_data
    ids = SpecialIds.generated(tokenizer.vocab_size) if is_mock else SpecialIds.for_bert(tokenizer)
    options = ICTOptions(seq_length, retriever.query_in_block_prob, request.seed)

    def build_part(part: DatasetPart) -> ICTDataset:
        plan = BlockMapPlan(part.num_samples, room, request.seed, min_sentences)
        titles = IndexedDataset(retriever.titles_data_path or "")
        dataset = ICTDataset(map_blocks(part, titles, plan, request, ids.size), ids, options)
        _ = dataset[0]  # fail now rather than at a later step if another tokenizer made the data
        return dataset

    def build_mock(count: int, split: int) -> ICTDataset:
        plan = SentenceMapPlan(0, room, 0.0, request.seed, min_sentences)
        return ICTDataset(MockBlocks(MockSentences(count, plan, ids, split)), ids, options)

    return build_datasets(request, build_part, build_mock, has_sentences=True)


def map_blocks(
    part: DatasetPart,
    titles: IndexedDataset,
    plan: BlockMapPlan,
    request: DataRequest,
    vocab_size: int,
) -> MappedBlocks:
    """Load or build the map of a part's blocks.

    The map is saved under Megatron-LM's name next to the dataset, or in --data-cache-path.

    Args:
        part: The documents.
        titles: The dataset of titles.
        plan: The settings of the map.
        request: The data that the run needs.
        vocab_size: The size of the vocabulary.

    Raises:
        DataError: The titles belong to another dataset, or no document is usable.
    """
    data, (start, end) = part.data, part.bounds
    if data.num_documents != titles.num_documents:
        raise DataError(
            f"--titles-data-path {titles.prefix} has {titles.num_documents} titles for the "
            f"{data.num_documents} documents of {data.prefix}: make both in one run of "
            "tools/preprocess_data.py, with --json-keys text title"
        )
    before = np.concatenate([[0], np.cumsum(titles.sequence_lengths, dtype=np.int64)])
    text = TitledDocuments(
        data.document_indices[start : end + 1],
        data.sequence_lengths,
        np.diff(before[titles.document_indices[start : end + 1]]),
        np.array([start], np.int64),
    )
    min_sentences = plan.min_sentences
    if not text.usable(min_sentences).any():
        need = "one sentence" if min_sentences == 1 else "two sentences (or --use-one-sent-docs)"
        raise DataError(
            f"{data.prefix}: no block can be made from the {part.split} documents {start} to "
            f"{end - 1}: a document needs at least {need}, each of at most {LONGEST_SENTENCE} "
            "tokens. Preprocess the text with --split-sentences, change --split or give more data"
        )
    if request.is_builder:
        warn_about_overlong(part, int(text.overlong(min_sentences).sum()))
    longest = plan.max_length + _ADDED_TOKENS
    description = (
        f"Block map\n\nDataset name {part.split}\nDocuments {start} to {end}\n"
        f"Sentences {len(data)}\nTokens {data.num_tokens}\nTitle tokens {titles.num_tokens}\n"
        f"Number of samples {plan.num_samples}\nLongest block {longest}\n"
        f"Fewest sentences {min_sentences}\nRandom seed {plan.seed}\n"
    )
    name = f"{part.split}_indexmap_{plan.num_samples}mns_{longest}msl_{plan.seed}s"
    name += "_1sentok" if min_sentences == 1 else ""
    rows = load_or_build_map(
        data.prefix, name, description, text, lambda: build_block_map(plan, text), request
    )
    return MappedBlocks(data, titles, rows, f"Data prefix {data.prefix}\n{description}", vocab_size)
