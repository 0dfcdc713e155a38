"""Which sentences make up sample k of a BERT or T5 run: pure functions of lengths, seed and counts.

A sample is a run of sentences of one document, cut where it reaches a target length. The target is
the longest sample but for about one in `1 / short_seq_prob`, which is drawn evenly between 2 and
the longest. All documents are gone through again and again until there are enough samples; then the
samples are shuffled. The map holds a row `first sentence, last sentence + 1, target length` a
sample, `[n, 3]`. The rules and the order of random draws are those of Megatron-LM, so the samples
are the same, and its cached maps fit ours.

How that is fast without a compiler: the sentences of the documents in use, with one more place at
the end of each document, are numbered as *places*. One random draw is made at every place that a
sample starts at, and one, unused, at the end of each document. Where the longest target sends each
place is computed for all of them at once; what is left is to hop from place to place, one draw a
hop, and only the short targets need a search.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron.data.mersenne_twister import mt19937, mt19937_64

LONGEST_SENTENCE = 512  # tokens; a document of several sentences with a longer one is left out
_DRAWS = 1 << 16  # of a step, so that memory stays flat


@dataclass(frozen=True)
class SentenceMapPlan:
    """What decides a map, beside the lengths.

    Attributes:
        num_samples: rows that are needed; whole passes over the documents give more.
        max_length: longest sample in tokens, special tokens not counted.
        short_seq_prob: share of samples that are made shorter.
        min_sentences: fewest sentences of a sample: 2 where it is cut in two segments, else 1.
    """

    num_samples: int
    max_length: int
    short_seq_prob: float
    seed: int
    min_sentences: int

    @property
    def short_ratio(self) -> int:
        """One in so many samples is short, on average; 0: none is."""
        return int(1 / self.short_seq_prob + 0.5) if self.short_seq_prob > 0 else 0


class _Places(NamedTuple):
    """Where samples can start and documents end, `[places]` each."""

    sentence: NDArray[np.int64]  # at a document's end: the sentence after its last
    tokens: NDArray[np.int64]  # of all documents in use up to here
    end: NDArray[np.int64]  # place of the document's end


class _PlaceViews(NamedTuple):
    """The same without numpy's cost of reading one number."""

    sentence: memoryview
    tokens: memoryview
    end: memoryview


def usable_documents(
    documents: NDArray[np.int64], lengths: NDArray[np.int32], min_sentences: int
) -> NDArray[np.bool_]:
    """Whether samples are taken from each document, `[D]`.

    A document needs `min_sentences`, and, where it has several, none above 512 tokens.

    Args:
        documents: first sentence of each document, then the end of the last, `[D + 1]`.
        lengths: tokens of every sentence of the dataset.
    """
    counts = np.diff(documents)
    return (counts >= min_sentences) & ~overlong_documents(documents, lengths)


def overlong_documents(
    documents: NDArray[np.int64], lengths: NDArray[np.int32]
) -> NDArray[np.bool_]:
    """Whether each document has several sentences, one of them above 512 tokens, `[D]`."""
    first, last = int(documents[0]), int(documents[-1])
    long_so_far = np.zeros(last - first + 1, np.int64)
    np.cumsum(lengths[first:last] > LONGEST_SENTENCE, out=long_so_far[1:])
    return (np.diff(long_so_far[documents - first]) > 0) & (np.diff(documents) > 1)


def build_sentence_map(
    plan: SentenceMapPlan, documents: NDArray[np.int64], lengths: NDArray[np.int32]
) -> NDArray[Any]:
    """The map, `[n, 3]` uint32, uint64 from 2^32 sentences on; n is at least `plan.num_samples`.

    Args:
        documents: as for `usable_documents`, at least one of them usable.
        lengths: as there.
    """
    rows = _rows_in_order(plan, _places(plan, documents, lengths))
    wide = len(lengths) > np.iinfo(np.uint32).max
    parts = [part.astype(np.uint64 if wide else np.uint32) for part in rows]
    in_order = np.concatenate(parts)
    return in_order[_shuffled(len(in_order), plan.seed + 1)]


def _places(
    plan: SentenceMapPlan, documents: NDArray[np.int64], lengths: NDArray[np.int32]
) -> _Places:
    """Number the sentences and ends of the usable documents."""
    usable = usable_documents(documents, lengths, plan.min_sentences)
    assert usable.any(), "without a usable document there is no map"
    starts, counts = documents[:-1][usable], np.diff(documents)[usable]
    ends = np.cumsum(counts + 1) - 1
    number = np.arange(int(ends[-1]) + 1)
    shift = np.repeat(starts - (ends - counts), counts + 1)
    is_end = np.zeros(len(number), bool)
    is_end[ends] = True
    sentence = number + shift
    sizes = np.zeros(len(number), np.int64)
    sizes[~is_end] = lengths[sentence[~is_end]]
    return _Places(sentence, np.cumsum(sizes) - sizes, np.repeat(ends, counts + 1))


def _rows_in_order(plan: SentenceMapPlan, places: _Places) -> Iterator[NDArray[np.int64]]:
    """Rows `[some, 3]`, whole passes over the documents until there are enough."""
    hops = _longest_hops(plan, places).data
    views = _PlaceViews(*(array.data for array in places))
    place = found = 0
    for draws in mt19937(plan.seed, _DRAWS):
        targets = _targets(plan, draws)
        path, place = _walk(place, targets, plan, hops, views)
        visited = np.array([*path, place])
        is_row = visited[:-1] != places.end[visited[:-1]]
        before = found + np.cumsum(is_row) - is_row  # rows before each visit
        over = np.flatnonzero((visited[:-1] == 0) & (before >= plan.num_samples))
        stop = int(over[0]) if len(over) else len(targets)
        kept = np.flatnonzero(is_row[:stop])
        first, last = places.sentence[visited[kept]], places.sentence[visited[kept + 1]]
        yield np.stack([first, last, targets[kept]], axis=1)
        found += len(kept)
        if len(over):
            return


def _longest_hops(plan: SentenceMapPlan, places: _Places) -> NDArray[np.int64]:
    """Where a sample of the longest target that starts at each place ends, `[places]`.

    That is after the sentence that reaches the target, if two more are left; else with the
    document. The end of a document leads to the next one, the last end to the first place.
    """
    number = np.arange(len(places.end))
    reached = np.searchsorted(places.tokens, places.tokens + plan.max_length)
    reached = np.maximum(reached, number + plan.min_sentences)
    hops = np.where(places.end - reached > 1, reached, places.end)
    is_end = number == places.end
    hops[is_end] = number[is_end] + 1
    hops[-1] = 0
    return hops


def _targets(plan: SentenceMapPlan, draws: NDArray[np.uint32]) -> NDArray[np.int64]:
    """Target length by each draw."""
    targets = np.full(len(draws), plan.max_length, np.int64)
    if plan.short_ratio:
        short = draws % plan.short_ratio == 0
        targets[short] = 2 + draws[short] % (plan.max_length - 1)
    return targets


def _walk(
    place: int,
    targets: NDArray[np.int64],
    plan: SentenceMapPlan,
    hops: memoryview,
    places: _PlaceViews,
) -> tuple[list[int], int]:
    """Hop once for each target from `place` on: the places left behind, and the one reached."""
    path: list[int] = []
    visit = path.append
    short = np.flatnonzero(targets != plan.max_length)
    done = 0
    for i, target in zip(short.tolist(), targets[short].tolist(), strict=True):
        for _ in range(i - done):
            visit(place)
            place = hops[place]
        visit(place)
        end = places.end[place]
        if place == end:
            place = hops[place]
        else:
            tokens = places.tokens[place] + target
            reached = bisect_left(places.tokens, tokens, place + plan.min_sentences, end)
            place = reached if end - reached > 1 else end
        done = i + 1
    for _ in range(len(targets) - done):
        visit(place)
        place = hops[place]
    return path, place


def _shuffled(count: int, seed: int) -> NDArray[np.int64]:
    """The numbers below `count` after C++'s Fisher-Yates shuffle from the end."""
    order = list(range(count))
    i = count - 1
    for draws in mt19937_64(seed):
        steps = min(len(draws), i)
        if not steps:
            break
        others = draws[:steps] % np.arange(i + 1, i + 1 - steps, -1, dtype=np.uint64)
        for other in others.tolist():
            order[i], order[other] = order[other], order[i]
            i -= 1
    return np.array(order, np.int64)


def is_sound_sentence_map(
    plan: SentenceMapPlan,
    rows: NDArray[Any],
    documents: NDArray[np.int64],
    lengths: NDArray[np.int32],
) -> bool:
    """Whether rows read from a file can be the plan's, as far as sums and bounds tell.

    The rows of one pass over the documents hold every sentence of the usable ones once.
    """
    if len(rows) < plan.num_samples:
        return False
    usable = usable_documents(documents, lengths, plan.min_sentences)
    starts, ends = documents[:-1][usable], documents[1:][usable]
    first, last, target = rows.T
    sizes = last.astype(np.int64) - first.astype(np.int64)
    return bool(
        (int(first.min()), int(last.max())) == (int(starts[0]), int(ends[-1]))
        and int(sizes.min()) >= plan.min_sentences
        and int(sizes.sum()) % int((ends - starts).sum()) == 0
        and (int(target.min()) >= 2 and int(target.max()) <= plan.max_length)
    )
