"""The sentences of each BERT or T5 sample, as pure functions of lengths, seed and counts.

A sample consists of consecutive sentences of a document and ends when it reaches a target length.
The target is the length of the longest sample, except for about one sample in `1 / short_seq_prob`,
whose target is drawn uniformly between 2 and the longest. Passes over the documents are repeated
until there are enough samples, and then the samples are shuffled. The map has a row `first
sentence, last sentence + 1, target length` per sample, `[n, 3]`. The rules and the order of random
draws are the same as in Megatron-LM, and so are the samples and the maps on disk.

The construction is fast without a compiler. The sentences of the usable documents, and the end of
each document, are numbered consecutively as *positions*. A random number is drawn at every position
where a sample starts, and an unused one at the end of each document. The next position, if the
target is the longest, is computed for all positions at once. After that, the code hops from
position to position with one draw per hop, and only short targets need a search.

Megatron-LM draws random numbers in C++, so the same maps need the same generators: `std::mt19937`,
which is numpy's own Mersenne Twister, and `std::mt19937_64`, which is at the end of this file.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

LONGEST_SENTENCE = 512  # tokens; documents of several sentences with a longer one are dropped
_DRAWS = 1 << 16  # draws per step, so that memory stays flat
_BLOCKS = 256  # state updates in each array of 64-bit draws
_WORDS, _MIDDLE = 312, 156


class SentenceMapPlan(NamedTuple):
    """The settings that, together with the lengths, determine a map of sentences.

    Attributes:
        num_samples: The minimum number of rows. Passes over the documents are always completed, so
            there may be more.
        max_length: The length of the longest sample in tokens, without special tokens.
        short_seq_prob: The fraction of samples that are made shorter.
        seed: The seed of all random draws.
        min_sentences: The minimum number of sentences in a sample: 2 if it is divided into two
            segments, otherwise 1.
    """

    num_samples: int
    max_length: int
    short_seq_prob: float
    seed: int
    min_sentences: int

    @property
    def short_ratio(self) -> int:
        """The average number of samples per short sample, or 0 if no samples are short."""
        return int(1 / self.short_seq_prob + 0.5) if self.short_seq_prob > 0 else 0


class DocumentSentences(NamedTuple):
    """The sentences of some documents of a dataset.

    Attributes:
        documents: The first sentence of each document, followed by the end of the last document,
            `[D + 1]`.
        lengths: The number of tokens in each sentence of the whole dataset, `[sentences]`.
    """

    documents: NDArray[np.int64]
    lengths: NDArray[np.int32]

    def usable(self, min_sentences: int) -> NDArray[np.bool_]:
        """Return a mask of documents from which samples can be made, `[D]`.

        A document must have at least `min_sentences` sentences. If it has several, none may exceed
        512 tokens.
        """
        return (np.diff(self.documents) >= min_sentences) & ~self.overlong()

    def overlong(self) -> NDArray[np.bool_]:
        """Return a mask of documents dropped for a sentence longer than 512 tokens, `[D]`.

        A document with a single sentence is not dropped.
        """
        first, last = int(self.documents[0]), int(self.documents[-1])
        is_long = self.lengths[first:last] > LONGEST_SENTENCE
        long_so_far = np.concatenate([[0], np.cumsum(is_long)])[self.documents - first]
        return (np.diff(long_so_far) > 0) & (np.diff(self.documents) > 1)


class _Positions(NamedTuple):
    """The positions where samples can start and documents end. Each array is `[positions]`."""

    sentence: NDArray[np.int64]  # the sentence; at a document's end, one past its last sentence
    tokens: NDArray[np.int64]  # the number of tokens before the position in all usable documents
    end: NDArray[np.int64]  # the position of the document's end
    hop: NDArray[np.int64]  # the end of a sample that starts here with the longest target


def build_sentence_map(plan: SentenceMapPlan, text: DocumentSentences) -> NDArray[Any]:
    """Build the map, `[n, 3]`, with at least `plan.num_samples` rows.

    The dtype is uint32, or uint64 for 2^32 or more sentences.

    Args:
        plan: The settings of the map.
        text: The documents. At least one must be usable.
    """
    rows = _rows_in_order(plan, _find_positions(plan, text))
    dtype = np.uint64 if len(text.lengths) > np.iinfo(np.uint32).max else np.uint32
    in_order = np.concatenate([part.astype(dtype) for part in rows])
    return in_order[shuffled(len(in_order), plan.seed + 1)]


def _find_positions(plan: SentenceMapPlan, text: DocumentSentences) -> _Positions:
    """Number the positions in the usable documents, and find the longest hop from each position."""
    usable = text.usable(plan.min_sentences)
    assert usable.any(), "without a usable document there is no map"
    starts, counts = text.documents[:-1][usable], np.diff(text.documents)[usable]
    ends = np.cumsum(counts + 1) - 1
    end = np.repeat(ends, counts + 1)
    number = np.arange(len(end))
    sentence = number + np.repeat(starts - (ends - counts), counts + 1)
    inside = number != end
    sizes = np.zeros(len(end), np.int64)
    sizes[inside] = text.lengths[sentence[inside]]
    tokens = np.cumsum(sizes) - sizes
    # A sample ends after the sentence that reaches its target if at least two more sentences
    # remain, otherwise with the document. The end of a document leads to the next document, and
    # the end of the last document leads to the first position.
    sample_end = np.searchsorted(tokens, tokens + plan.max_length)
    sample_end = np.maximum(sample_end, number + plan.min_sentences)
    hop = np.where(inside, np.where(end - sample_end > 1, sample_end, end), number + 1)
    hop[-1] = 0
    return _Positions(sentence, tokens, end, hop)


def _rows_in_order(plan: SentenceMapPlan, positions: _Positions) -> Iterator[NDArray[np.int64]]:
    """Yield the rows of whole passes, `[rows, 3]`, until there are `plan.num_samples` rows."""
    position = num_rows = 0
    for draws in mt19937(plan.seed, _DRAWS):
        targets = np.full(len(draws), plan.max_length, np.int64)
        if plan.short_ratio:
            short = draws % plan.short_ratio == 0
            targets[short] = 2 + draws[short] % (plan.max_length - 1)
        path, position = _walk(position, targets, plan, positions)
        visited = np.array([*path, position])
        is_row = visited[:-1] != positions.end[visited[:-1]]
        rows_before = num_rows + np.cumsum(is_row) - is_row  # the number of rows before each visit
        pass_ends = np.flatnonzero((visited[:-1] == 0) & (rows_before >= plan.num_samples))
        stop = int(pass_ends[0]) if len(pass_ends) else len(targets)
        row_visits = np.flatnonzero(is_row[:stop])
        first, last = (
            positions.sentence[visited[row_visits]],
            positions.sentence[visited[row_visits + 1]],
        )
        yield np.stack([first, last, targets[row_visits]], axis=1)
        num_rows += len(row_visits)
        if len(pass_ends):
            return


def _walk(
    position: int, targets: NDArray[np.int64], plan: SentenceMapPlan, positions: _Positions
) -> tuple[list[int], int]:
    """Hop once for each target, starting from `position`.

    Returns:
        The visited positions, and the position reached at the end.
    """
    # Reading single numbers is slow in numpy arrays, but not in memory views.
    hops, tokens, ends = positions.hop.data, positions.tokens.data, positions.end.data
    path: list[int] = []
    visit = path.append
    short = np.flatnonzero(targets != plan.max_length)
    for i, target in zip(short.tolist(), targets[short].tolist(), strict=True):
        for _ in range(i - len(path)):
            visit(position)
            position = hops[position]
        visit(position)
        end = ends[position]
        if position == end:
            position = hops[position]
        else:
            start = position + plan.min_sentences
            reached = bisect_left(tokens, tokens[position] + target, start, end)
            position = reached if end - reached > 1 else end
    for _ in range(len(targets) - len(path)):
        visit(position)
        position = hops[position]
    return path, position


def shuffled(count: int, seed: int) -> NDArray[np.int64]:
    """Return the numbers below `count` in random order, `[count]`.

    The order is that of the Fisher-Yates loop in Megatron's C++ code.
    """
    order = list(range(count))
    blocks = islice(mt19937_64(seed), count // (_BLOCKS * _WORDS) + 1)
    draws = np.concatenate([*blocks])[: count - 1]
    others = draws % np.arange(count, 1, -1, dtype=np.uint64)
    # A memory view yields one number at a time, whereas a list would hold all numbers at once.
    for i, other in zip(range(count - 1, 0, -1), others.data, strict=True):
        order[i], order[other] = order[other], order[i]
    return np.array(order, np.int64)


def mt19937(seed: int, block: int) -> Iterator[NDArray[np.uint32]]:
    """Yield draws from `std::mt19937(seed)` endlessly, in arrays of length `block`."""
    random = np.random.RandomState(seed % 2**32)
    while True:
        yield random.randint(0, 2**32, block, dtype=np.uint32)  # one unmodified draw per number


def mt19937_64(seed: int) -> Iterator[NDArray[np.uint64]]:
    """Yield draws from `std::mt19937_64(seed)` endlessly, in arrays of equal size."""
    words = [seed % 2**64]
    for i in range(1, _WORDS):
        words.append((6364136223846793005 * (words[-1] ^ (words[-1] >> 62)) + i) % 2**64)
    state = np.array(words, np.uint64)
    while True:
        block = np.empty((_BLOCKS, _WORDS), np.uint64)
        for new in block:
            # Each new word depends on its old value, the next word, and the word 156 after it.
            mixed = _mix(state[:-1], state[1:])
            new[:_MIDDLE] = state[_MIDDLE:] ^ mixed[:_MIDDLE]
            new[_MIDDLE:-1] = new[: _MIDDLE - 1] ^ mixed[_MIDDLE:]
            new[-1:] = new[_MIDDLE - 1 : _MIDDLE] ^ _mix(state[-1:], new[:1])
            state = new
        state = state.copy()
        draws = block.reshape(-1)
        draws ^= (draws >> 29) & 0x5555555555555555
        draws ^= (draws << 17) & 0x71D67FFFEDA60000
        draws ^= (draws << 37) & 0xFFF7EEE000000000
        draws ^= draws >> 43
        yield draws


def _mix(word: NDArray[Any], following: NDArray[Any]) -> NDArray[Any]:
    joined = (word & 0xFFFFFFFF80000000) | (following & 0x7FFFFFFF)
    return (joined >> 1) ^ (joined & 1) * 0xB5026F5AA96619E9
