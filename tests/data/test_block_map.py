"""Block maps: Megatron-LM's own rows, and those of the rules applied sentence by sentence."""

from __future__ import annotations

import numpy as np
import pytest

from megatron.data.ict import BlockMapPlan, TitledDocuments, build_block_map
from megatron.data.sentence_map import LONGEST_SENTENCE, mt19937_64


def documents_of(counts, lengths, titles, first=0):
    bounds = np.concatenate([[0], np.cumsum(counts)])
    return TitledDocuments(
        bounds, np.array(lengths, np.int32), np.array(titles, np.int64), np.array([first])
    )


@pytest.mark.parametrize(
    ("fewest", "want"),
    [
        (
            2,
            [[6, 10, 3, 2], [3, 5, 1, 1], [3, 5, 1, 1], [0, 3, 0, 0], [6, 10, 3, 2]]
            + [[0, 3, 0, 0], [3, 5, 1, 1], [6, 10, 3, 2], [0, 3, 0, 0]],
        ),
        (
            1,
            [[0, 2, 0, 0], [6, 9, 3, 5], [4, 5, 1, 3], [3, 4, 1, 2], [5, 6, 2, 4]]
            + [[9, 10, 3, 6], [2, 3, 0, 1]],
        ),
    ],
)
def test_megatrons_own_rows(fewest, want):
    """The rows that the compiled `build_blocks_mapping` of release 23.08 gave for seven samples."""
    text = documents_of([3, 2, 1, 4], [10, 12, 8, 20, 30, 15, 5, 6, 7, 40], [2, 3, 1, 4])
    rows = build_block_map(BlockMapPlan(7, 20, 1234, fewest), text)
    assert rows.dtype == np.uint32
    assert rows.tolist() == want


def sentence_by_sentence(plan, text):
    """Apply the rules literally, one sentence at a time."""
    rows = []
    while len(rows) < plan.num_samples:
        number = 0
        bounds = zip(text.documents[:-1].tolist(), text.documents[1:].tolist(), strict=True)
        for document, (first, last) in enumerate(bounds):
            sizes = text.lengths[first:last].tolist()
            if len(sizes) < plan.min_sentences or max(sizes) > LONGEST_SENTENCE:
                continue
            start, tokens = first, 0
            for sentence, size in enumerate(sizes, start=first):
                tokens += size
                left = last - sentence - 1
                full = tokens >= plan.max_length - int(text.titles[document])
                full = full and sentence + 1 - start >= plan.min_sentences
                if (full and left >= plan.min_sentences) or left == 0:
                    rows.append([start, sentence + 1, document + int(text.first[0]), number])
                    start, tokens, number = sentence + 1, 0, number + 1
    draws = iter(next(mt19937_64(plan.seed + 1)).tolist())
    for i in range(len(rows) - 1, 0, -1):
        j = next(draws) % (i + 1)
        rows[i], rows[j] = rows[j], rows[i]
    return rows


@pytest.mark.parametrize("seed", range(8))
def test_rows_are_those_of_the_rules_read_one_by_one(seed):
    """Documents with 0, 1 and more sentences, overlong sentences, titles longer than the target."""
    random = np.random.RandomState(seed)
    counts = random.randint(0, 9, 60)
    counts[0] = 3  # a split starts after them
    lengths = random.randint(0, 60, counts.sum())
    lengths[random.randint(0, len(lengths), 6)] = [512, 513, 600, 5000, 512, 513]
    whole = documents_of(counts, lengths, random.randint(0, 12, 60))
    text = TitledDocuments(whole.documents[1:], whole.lengths, whole.titles[1:], np.array([1]))
    plan = BlockMapPlan(
        num_samples=int(random.randint(1, 400)),
        max_length=int(random.choice([8, 30, 125])),
        seed=1234 + seed,
        min_sentences=1 + seed % 2,
    )
    assert build_block_map(plan, text).tolist() == sentence_by_sentence(plan, text)
