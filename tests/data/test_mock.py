"""Generated data: which tokens, steps and lengths it has, and that samples are independent."""

from __future__ import annotations

import numpy as np
import pytest

from megatron.data.masking import SpecialIds
from megatron.data.mock import MockDataset, MockSentences
from megatron.data.sentence_map import SentenceMapPlan

_IDS = SpecialIds(size=60, continues=np.zeros(60, bool), pad=0, eos=5, sentinels=(6, 9))


def test_tokens_count_up_by_one_to_four_in_a_small_vocabulary() -> None:
    dataset = MockDataset(300, seq_length=80, vocab_size=1000, seed=3, split=0)
    rows = np.stack([dataset[i]["text"] for i in range(len(dataset))])
    steps = np.diff(rows, axis=1) % 256
    assert rows.shape == (300, 81)
    assert (steps == steps[:, :1]).all()
    assert sorted(set(steps[:, 0].tolist())) == [1, 2, 3, 4]
    assert (rows.min(), rows.max()) == (0, 255)
    small = MockDataset(300, seq_length=80, vocab_size=7, seed=3, split=0)
    assert {int(small[i]["text"][0]) for i in range(300)} == set(range(7))


def test_samples_depend_on_seed_split_and_index_and_end_with_the_last() -> None:
    def text(seed: int, split: int, i: int) -> list[int]:
        return MockDataset(9, seq_length=8, vocab_size=100, seed=seed, split=split)[i][
            "text"
        ].tolist()

    assert text(1, 0, 3) == text(1, 0, 3)
    assert len({tuple(text(*place)) for place in ((1, 0, 3), (2, 0, 3), (1, 1, 3), (1, 0, 4))}) == 4
    for i in (-1, 9):
        with pytest.raises(IndexError, match=f"sample {i} of 9"):
            text(1, 0, i)
    assert len(text(1, 0, 0)) == len(text(1, 0, 8)) == 9


def test_generated_sentences_fill_a_sample_without_special_ids() -> None:
    plan = SentenceMapPlan(400, 100, 0.25, 5, 2)
    dataset = MockSentences(400, plan, _IDS, split=1)
    samples = [dataset[i] for i in range(400)]
    lengths = [length for _, length in samples]
    assert (min(lengths), max(lengths)) < (10, 101)
    assert 60 < sum(length < 100 for length in lengths) < 140  # a quarter
    for sentences, length in samples:
        assert len(sentences) >= 2
        assert all(len(sentence) for sentence in sentences)
        text = np.concatenate(sentences)
        assert len(text) == length
        assert (text.min() >= 10, text.max() < 60) == (True, True)
        assert len(set((np.diff(text) % 50).tolist())) == 1
    assert {len(sentences) for sentences, length in samples if length == 100} <= {2, 3, 4, 5, 6}
    assert max(len(sentences) for sentences, _ in samples) == 6  # about 20 tokens each
    assert {int(text[0]) for (text, *_), _ in samples} == set(range(10, 60))
    short = MockSentences(50, plan._replace(max_length=2), _IDS, split=1)
    assert all([len(part) for part in short[i][0]] == [1, 1] for i in range(50))
