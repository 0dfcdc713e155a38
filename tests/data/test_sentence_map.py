"""Sentence maps: the same rows, in the same order, as the rules applied sentence by sentence."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from megatron.data.sentence_map import (
    LONGEST_SENTENCE,
    DocumentSentences,
    SentenceMapPlan,
    build_sentence_map,
    mt19937,
    mt19937_64,
)


def test_the_streams_are_those_of_the_cpp_standard() -> None:
    """The standard gives the 10,000th draw of both engines for their default seeds."""
    assert next(mt19937(5489, 10_000))[-1] == 4123659995
    assert next(mt19937_64(5489))[9_999] == 9981545732273789042


@pytest.mark.parametrize(
    ("min_sentences", "num_samples", "want"),
    [
        (2, 4, [[6, 10], [3, 5], [0, 3], [6, 10], [3, 5], [0, 3]]),
        (1, 5, [[0, 3], [3, 5], [3, 5], [6, 10], [0, 3], [5, 6], [5, 6], [6, 10]]),
    ],
)
def test_megatrons_own_rows(min_sentences: int, num_samples: int, want: list[list[int]]) -> None:
    """The rows that Megatron-LM's own helper gave for two passes."""
    documents = np.array([0, 3, 5, 6, 10])
    lengths = np.array([10, 12, 8, 20, 30, 15, 5, 6, 7, 40], np.int32)
    plan = SentenceMapPlan(num_samples, 32, 0.1, 1234, min_sentences)
    rows = build_sentence_map(plan, DocumentSentences(documents, lengths))
    assert rows.dtype == np.uint32
    assert rows.tolist() == [[*row, 32] for row in want]


def test_a_pass_that_has_just_enough_rows_is_the_last() -> None:
    documents = np.array([0, 3, 5, 6, 10])
    lengths = np.array([10, 12, 8, 20, 30, 15, 5, 6, 7, 40], np.int32)
    text = DocumentSentences(documents, lengths)
    for num_samples, rows in ((1, 3), (3, 3), (4, 6), (6, 6), (7, 9)):
        plan = SentenceMapPlan(num_samples, 32, 0.1, 1234, 2)
        assert len(build_sentence_map(plan, text)) == rows


@pytest.mark.parametrize(
    ("share", "ratio"), [(0.0, 0), (0.1, 10), (0.15, 7), (0.3, 3), (0.4, 3), (0.45, 2), (1.0, 1)]
)
def test_one_sample_in_so_many_is_short(share: float, ratio: int) -> None:
    assert SentenceMapPlan(1, 32, share, 1234, 2).short_ratio == ratio


def sentence_by_sentence(
    plan: SentenceMapPlan, documents: NDArray[np.int64], lengths: NDArray[np.int32]
) -> list[list[int]]:
    """Apply the rules literally, one sentence at a time."""
    random = np.random.RandomState(plan.seed)

    def target_length() -> int:
        if not plan.short_ratio:
            return plan.max_length
        draw = int(random.randint(0, 2**32, dtype=np.uint32))
        is_short = draw % plan.short_ratio == 0
        return 2 + draw % (plan.max_length - 1) if is_short else plan.max_length

    rows: list[list[int]] = []
    while len(rows) < plan.num_samples:
        for first, last in zip(documents[:-1].tolist(), documents[1:].tolist(), strict=True):
            sizes = lengths[first:last].tolist()
            too_long = len(sizes) > 1 and max(sizes) > LONGEST_SENTENCE
            if len(sizes) < plan.min_sentences or too_long:
                continue
            start, tokens, target = first, 0, target_length()
            for sentence, size in enumerate(sizes, start=first):
                tokens += size
                left = last - sentence - 1
                full = tokens >= target and sentence + 1 - start >= plan.min_sentences
                if (full and left > 1) or left == 0:
                    rows.append([start, sentence + 1, target])
                    start, tokens, target = sentence + 1, 0, target_length()
    draws = iter(next(mt19937_64(plan.seed + 1)).tolist())
    for i in range(len(rows) - 1, 0, -1):
        j = next(draws) % (i + 1)
        rows[i], rows[j] = rows[j], rows[i]
    return rows


@pytest.mark.parametrize("seed", range(12))
def test_rows_are_those_of_the_rules_read_one_by_one(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Documents with 0, 1 and more sentences, empty and overlong sentences, several passes."""
    monkeypatch.setattr("megatron.data.sentence_map._DRAWS", 64)  # steps end inside documents
    random = np.random.RandomState(seed)
    counts = random.randint(0, 9, 60)
    documents = np.concatenate([[0], np.cumsum(counts)]) + 7  # a split starts inside a dataset
    lengths = random.randint(0, 60, int(documents[-1])).astype(np.int32)
    lengths[random.randint(0, len(lengths), 6)] = [512, 513, 600, 5000, 512, 513]
    plan = SentenceMapPlan(
        num_samples=int(random.randint(1, 400)),
        max_length=int(random.choice([2, 30, 125])),
        short_seq_prob=float(random.choice([0.0, 0.1, 0.4, 1.0])),
        seed=1234 + seed,
        min_sentences=1 + seed % 2,
    )
    rows = build_sentence_map(plan, DocumentSentences(documents, lengths))
    assert rows.tolist() == sentence_by_sentence(plan, documents, lengths)


def test_which_documents_are_used() -> None:
    lengths = np.array([600, 5, 5, 5, 513, 512, 5], np.int32)
    documents = np.array([0, 1, 1, 3, 5, 7])  # one long sentence, none, two, a long one, two
    text = DocumentSentences(documents, lengths)
    assert text.usable(1).tolist() == [True, False, True, False, True]
    assert text.usable(2).tolist() == [False, False, True, False, True]
