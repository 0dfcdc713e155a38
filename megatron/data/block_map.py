"""The blocks of text that a bi-encoder retrieves, as pure functions of lengths, seed and counts.

A block is a run of sentences of one document, cut when block and title together reach a target
length. Documents that are too short, or that hold a sentence of more than 512 tokens, are left
out. Each pass over the documents gives the same blocks; passes are repeated until there are enough
samples, and then all are shuffled. The map holds a row `first sentence, last sentence + 1,
document, number of the block` per sample, `[n, 4]`.

The rules, the order of random draws and the maps on disk are those of Megatron-LM's
`build_blocks_mapping`, with one exception: a row has the document's index in the whole dataset, so
that validation and test blocks get their own titles. Megatron counts from the start of the split,
and takes the titles of other documents.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron.data.sentence_map import LONGEST_SENTENCE, shuffled


class BlockMapPlan(NamedTuple):
    """Everything, except the lengths, that determines a map.

    Attributes:
        num_samples: The number of rows that are needed. Whole passes over the documents give more.
        max_length: The length of a block with its title in tokens, without special tokens.
        seed: The seed of the shuffle.
        min_sentences: The fewest sentences in a block.
    """

    num_samples: int
    max_length: int
    seed: int
    min_sentences: int


class TitledDocuments(NamedTuple):
    """The sentences and titles of some documents of a dataset.

    Attributes:
        documents: The first sentence of each document, then the end of the last, `[D + 1]`.
        lengths: The number of tokens in each sentence of the whole dataset.
        titles: The number of tokens in the title of each of these documents, `[D]`.
        first: The index of the first of these documents in the whole dataset, `[1]`.
    """

    documents: NDArray[np.int64]
    lengths: NDArray[np.int32]
    titles: NDArray[np.int64]
    first: NDArray[np.int64]

    def overlong(self, min_sentences: int) -> NDArray[np.bool_]:
        """Return which documents have enough sentences, but one above 512 tokens, `[D]`."""
        start, end = int(self.documents[0]), int(self.documents[-1])
        is_long = self.lengths[start:end] > LONGEST_SENTENCE
        long_so_far = np.concatenate([[0], np.cumsum(is_long)])[self.documents - start]
        return (np.diff(long_so_far) > 0) & (np.diff(self.documents) >= min_sentences)

    def usable(self, min_sentences: int) -> NDArray[np.bool_]:
        """Return which documents can give blocks of at least `min_sentences` sentences, `[D]`."""
        return (np.diff(self.documents) >= min_sentences) & ~self.overlong(min_sentences)


def build_block_map(plan: BlockMapPlan, text: TitledDocuments) -> NDArray[Any]:
    """Build the map, `[n, 4]` uint32, or uint64 from 2^32 sentences on.

    It has at least `plan.num_samples` rows.

    Args:
        plan: Everything, except the lengths, that determines the map.
        text: The documents. At least one must be usable.
    """
    once = blocks_of(plan, text)
    passes = max(1, -(-plan.num_samples // len(once)))
    order = shuffled(passes * len(once), plan.seed + 1) % len(once)
    dtype = np.uint64 if len(text.lengths) > np.iinfo(np.uint32).max else np.uint32
    return once.astype(dtype)[order]


def blocks_of(plan: BlockMapPlan, text: TitledDocuments) -> NDArray[np.int64]:
    """Return the blocks of one pass over the documents in order, `[n, 4]`."""
    fewest = plan.min_sentences
    usable = np.flatnonzero(text.usable(fewest))
    assert len(usable), "without a usable document there are no blocks"
    start, end = int(text.documents[0]), int(text.documents[-1])
    # before[i] is the number of tokens before sentence start + i, and after[i] the sentence at
    # which a block that starts there reaches its target.
    lengths = text.lengths[start:end].astype(np.int64)
    before = np.concatenate([[0], np.cumsum(lengths)])
    counts = np.diff(text.documents)
    target = np.repeat(plan.max_length - text.titles, counts)
    after = np.searchsorted(before, before[:-1] + target)
    after = np.maximum(after, np.arange(len(lengths)) + fewest)
    hops, starts, ends = after.data, text.documents[:-1], text.documents[1:]
    rows: list[tuple[int, int, int, int]] = []
    for document in usable.tolist():
        place, last = int(starts[document]) - start, int(ends[document]) - start
        while place < last:
            stop = hops[place]
            if last - stop < fewest:  # too few are left for a block of their own
                stop = last
            rows.append((place + start, stop + start, document, len(rows)))
            place = stop
    found = np.array(rows, np.int64)
    found[:, 2] += text.first[0]
    return found
