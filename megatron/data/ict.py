"""Samples of the inverse cloze task: a sentence as the query, and the block around it.

    query    [CLS] sentence [SEP] [PAD] ...
    context  [CLS] title [SEP] other sentences of the block [SEP] [PAD] ...

The sentence stays in its block with a small probability, so that the model also learns to match
words. In shapes, s is the sequence length.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from megatron.config.retriever import RetrieverConfig
from megatron.data.block_map import BlockMapPlan, TitledDocuments, build_block_map
from megatron.data.datasets import DataRequest, DatasetPart, Datasets, build_datasets
from megatron.data.indexed import IndexedDataset, bin_path
from megatron.data.masking import SpecialIds
from megatron.data.mock import MockSentences
from megatron.data.sample import DescribedDataset, Sample, filled_up, outside_vocabulary
from megatron.data.sentence_map import LONGEST_SENTENCE, SentenceMapPlan
from megatron.data.sentences import Tokens, kept_map
from megatron.errors import ConfigError, DataError, warn
from megatron.tokenizer.base import Tokenizer

_ADDED_TOKENS = 3  # [CLS] and two [SEP]
_SHORTEST = 2  # the fewest tokens of text in a context, whatever its title


class TitledBlock(NamedTuple):
    """A block of text.

    Attributes:
        title: The title of its document.
        sentences: Its sentences.
        place: First sentence, last sentence + 1, document, number of the block.
    """

    title: Tokens
    sentences: list[Tokens]
    place: NDArray[np.int64]


class BlockSource(DescribedDataset, Protocol):
    """The block of each sample."""

    def __getitem__(self, i: int) -> TitledBlock:
        """Return the block of sample `i`."""


class ICTOptions(NamedTuple):
    """The settings of the samples.

    Attributes:
        seq_length: The sequence length s of queries and of contexts, special tokens included.
        query_in_block_prob: The probability that the query stays in its block.
        seed: The seed of all draws. The draws of sample i are seeded with `seed + i`.
    """

    seq_length: int
    query_in_block_prob: float
    seed: int


@dataclass(eq=False)
class ICTDataset:
    """Samples of the inverse cloze task. A sample holds int64 arrays `[s]`.

    `query_tokens`, `context_tokens`: The texts.
    `query_pad_mask`, `context_pad_mask`: 0 at padding, otherwise 1.
    `block_data`: `[4]`, the block's `place`.
    `id`: The sample's index.
    """

    source: BlockSource
    ids: SpecialIds
    options: ICTOptions

    @property
    def description(self) -> str:
        """A text that differs whenever the samples differ."""
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
        chosen = random.randint(len(block.sentences))
        stays = random.random_sample() < self.options.query_in_block_prob
        rest = (
            block.sentences if stays else block.sentences[:chosen] + block.sentences[chosen + 1 :]
        )
        title = block.title[: length - _ADDED_TOKENS - _SHORTEST]
        room = length - _ADDED_TOKENS - len(title)
        text = np.concatenate(rest)[:room] if rest else np.empty(0, np.int64)
        cls, sep = [self.ids.cls], [self.ids.sep]
        query = np.concatenate([cls, block.sentences[chosen][: length - 2], sep])
        context = np.concatenate([cls, title, sep, text, sep])
        return {
            "query_tokens": filled_up(query, length, self.ids.pad),
            "query_pad_mask": filled_up(np.ones(len(query)), length, 0),
            "context_tokens": filled_up(context, length, self.ids.pad),
            "context_pad_mask": filled_up(np.ones(len(context)), length, 0),
            "block_data": block.place,
            "id": i,
        }


@dataclass(eq=False)
class MappedBlocks:
    """The blocks that a map lists in an indexed dataset.

    Attributes:
        data: The dataset of sentences.
        titles: The dataset of titles, whose document i is the title of document i.
        rows: The map, as `build_block_map` returns it.
        description: The text that describes the map.
        vocab_size: The size of the vocabulary. Token ids of this value or above are refused.
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
        place = self.rows[i].astype(np.int64)
        first, end, document, _ = place.tolist()
        start, stop = self.titles.document_indices[document : document + 2].tolist()
        parts = [self._sentence(self.titles, number) for number in range(start, stop)]
        title = np.concatenate(parts) if parts else np.empty(0, np.int64)
        return TitledBlock(title, [self._sentence(self.data, n) for n in range(first, end)], place)

    def _sentence(self, data: IndexedDataset, number: int) -> Tokens:
        tokens = data.get(number)
        if len(tokens) and int(tokens.max()) >= self.vocab_size:
            where = f"{bin_path(data.prefix)}: sentence {number}"
            raise outside_vocabulary(where, int(tokens.max()), self.vocab_size)
        return tokens


@dataclass(eq=False)
class MockBlocks:
    """Generated blocks. All tokens of a sample count up by one step, which identifies the block."""

    sentences: MockSentences

    @property
    def description(self) -> str:
        """A text that differs whenever the samples differ."""
        return self.sentences.description

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.sentences)

    def __getitem__(self, i: int) -> TitledBlock:
        """Return the block of sample `i`, whose title is its first two tokens."""
        sentences, _ = self.sentences[i]
        place = np.array([0, len(sentences), i, i], np.int64)
        return TitledBlock(np.concatenate(sentences)[:2], sentences, place)


def build_ict_datasets(
    request: DataRequest, retriever: RetrieverConfig, *, seq_length: int, tokenizer: Tokenizer
) -> Datasets:
    """Build the datasets of the inverse cloze task. Every process calls this function.

    Args:
        request: The data that the run needs.
        retriever: The flags that name titles and say how blocks are used.
        seq_length: The number of tokens in a query and in a context, special tokens included.
        tokenizer: The tokenizer, which supplies the special ids.

    Raises:
        ConfigError: The sequence has no room for text, the vocabulary lacks a special token, no
            data or no titles are named, or --data-path or --split cannot be parsed.
        DataError: A dataset is missing, damaged, too small or from another tokenizer.
    """
    if seq_length < _ADDED_TOKENS + _SHORTEST:
        raise ConfigError(
            f"--seq-length {seq_length}: {_ADDED_TOKENS} of the tokens are reserved for special "
            f"tokens: give at least {_ADDED_TOKENS + _SHORTEST}"
        )
    data = request.data
    room, fewest = seq_length - _ADDED_TOKENS, 1 if retriever.use_one_sent_docs else 2
    is_mock = data.mock_data
    ids = SpecialIds.generated(tokenizer.vocab_size) if is_mock else SpecialIds.of_bert(tokenizer)
    options = ICTOptions(seq_length, retriever.query_in_block_prob, request.seed)

    def build_part(part: DatasetPart) -> ICTDataset:
        plan = BlockMapPlan(part.num_samples, room, request.seed, fewest)
        titles = IndexedDataset(retriever.titles_data_path or "")
        dataset = ICTDataset(map_blocks(part, titles, plan, request, ids.size), ids, options)
        _ = dataset[0]  # fail now, not at some later step, if another tokenizer made the data
        return dataset

    def build_mock(count: int, split: int) -> ICTDataset:
        plan = SentenceMapPlan(0, room, 0.0, request.seed, fewest)
        return ICTDataset(MockBlocks(MockSentences(count, plan, ids, split)), ids, options)

    return build_datasets(
        request,
        build_part,
        build_mock,
        count_documents=lambda dataset: len(dataset.document_indices) - 1,
    )


def map_blocks(
    part: DatasetPart,
    titles: IndexedDataset,
    plan: BlockMapPlan,
    request: DataRequest,
    vocab_size: int,
) -> MappedBlocks:
    """Load or build the map of a part's blocks.

    The map is kept under Megatron-LM's name next to the dataset, or in the folder of
    --data-cache-path.

    Args:
        part: The documents.
        titles: The dataset of titles.
        plan: The plan of the map.
        request: The data that the run needs.
        vocab_size: The size of the vocabulary.

    Raises:
        DataError: The titles belong to another dataset, or no document can be used.
    """
    data, (start, end) = part.data, part.bounds
    counts = [len(one.document_indices) - 1 for one in (data, titles)]
    if counts[0] != counts[1]:
        raise DataError(
            f"--titles-data-path {titles.prefix} has {counts[1]} titles for the {counts[0]} "
            f"documents of {data.prefix}: make both in one run of tools/preprocess_data.py, with "
            "--json-keys text title"
        )
    before = np.concatenate([[0], np.cumsum(titles.sequence_lengths, dtype=np.int64)])
    text = TitledDocuments(
        data.document_indices[start : end + 1],
        data.sequence_lengths,
        np.diff(before[titles.document_indices[start : end + 1]]),
        np.array([start], np.int64),
    )
    fewest = plan.min_sentences
    if not text.usable(fewest).any():
        need = "one sentence" if fewest == 1 else "two sentences (or --use-one-sent-docs)"
        raise DataError(
            f"{data.prefix}: no block can be made from the {part.split} documents {start} to "
            f"{end - 1}: a document needs at least {need}, none of more than {LONGEST_SENTENCE} "
            "tokens. Preprocess the text with --split-sentences, change --split or give more data"
        )
    lost = int(text.overlong(fewest).sum())
    if request.is_builder and lost:  # Megatron leaves them out silently
        warn(
            f"{data.prefix}: {lost} of the {end - start} {part.split} documents are left out, "
            f"because they hold a sentence of more than {LONGEST_SENTENCE} tokens: to keep them, "
            "split the text into shorter sentences when preprocessing"
        )
    longest = plan.max_length + _ADDED_TOKENS
    description = (
        f"Block map\n\nDataset name {part.split}\nDocuments {start} to {end}\n"
        f"Sentences {len(data)}\nTokens {data.num_tokens}\nTitle tokens {titles.num_tokens}\n"
        f"Number of samples {plan.num_samples}\nLongest block {longest}\n"
        f"Fewest sentences {fewest}\nRandom seed {plan.seed}\n"
    )
    name = f"{part.split}_indexmap_{plan.num_samples}mns_{longest}msl_{plan.seed}s"
    name += "_1sentok" if fewest == 1 else ""
    rows = kept_map(
        data.prefix, name, description, text, lambda: build_block_map(plan, text), request
    )
    return MappedBlocks(data, titles, rows, f"Data prefix {data.prefix}\n{description}", vocab_size)
