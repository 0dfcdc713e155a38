"""Rows of packed pairs."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import numpy as np
import pytest

from megatron.data.conversations import TokenizedExamples
from megatron.data.packing import one_per_row, pack
from megatron.data.preferences import (
    DESIRABLE,
    PAIRS,
    REFERENCE,
    FittedAnswers,
    FittedPairs,
    PreferenceDataset,
    describe_pairs,
    pair_limits,
)
from megatron.data.sample import SEGMENT_ENDS, TRAINED
from megatron.errors import DataError
from tests.finetuning.toy_pairs import toy_pairs


def test_both_answers_are_cut_to_what_fits_a_row() -> None:
    lengths = np.array([[3, 4], [9, 2], [2, 9], [7, 9], [20, 20]])
    assert pair_limits(lengths, 10).tolist() == [[3, 4], [8, 2], [2, 8], [5, 5], [5, 5]]


@pytest.mark.parametrize("truncation", ["keep-start", "keep-end", "drop", "error"])
def test_pairs_longer_than_a_row(truncation: str) -> None:
    pairs = toy_pairs()
    totals = pairs.lengths.reshape(-1, 2).sum(axis=1)
    length = int(totals.max()) - 1
    if truncation == "error":
        with pytest.raises(DataError, match=r"pairs have more tokens than --seq-length .* raise"):
            FittedPairs(pairs, length, truncation)
        return
    found = FittedPairs(pairs, length, truncation)
    long = int((totals > length).sum())
    assert long
    assert len(found) == len(totals) - (long if truncation == "drop" else 0)
    assert found.limits.sum(axis=1).max() <= length
    number = int(totals.argmax())
    if truncation != "drop":
        side = int(pairs.lengths[2 * number : 2 * number + 2].argmax())
        whole, part = pairs[2 * number + side][0], found.answer(number, side)[0]
        kept = whole[: len(part)] if truncation == "keep-start" else whole[-len(part) :]
        assert len(part) < len(whole)
        assert (part == kept).all()


def test_no_pair_is_left() -> None:
    with pytest.raises(DataError, match="none of the 24 pairs fits into --seq-length 3"):
        FittedPairs(toy_pairs(), 3, "drop")


def test_every_pair_lies_in_one_row_and_each_epoch_has_all() -> None:
    pairs = toy_pairs()
    source = FittedPairs(pairs, 32, "error")
    packing = pack(source.limits.sum(axis=1), 32)
    data = PreferenceDataset(source, 0, packing, 2 * packing.rows, 1, 99)
    data.reference = np.arange(48.0).reshape(24, 2)
    for epoch in range(2):
        seen, filled = [], 0
        for i in range(epoch * packing.rows, (epoch + 1) * packing.rows):
            sample: Any = data[i]
            at = 0
            ends = sample[SEGMENT_ENDS]
            for place, number in enumerate(data.row(i)):
                for side in (0, 1):
                    tokens, counts = pairs[2 * number + side]
                    end = int(ends[2 * place + side])
                    assert (sample["text"][at:end] == tokens).all()
                    assert end - at == len(tokens)
                    assert (sample[TRAINED][at:end] == [*counts[1:], 0]).all()
                    assert sample[PAIRS][at] == (side == 0)
                    assert sample[REFERENCE][at] == 2 * number + side
                    at = end
                seen.append(int(number))
            assert (sample["text"][at:] == 99).all()
            assert not sample[TRAINED][at:].any()
            assert sample[PAIRS].sum() == len(data.row(i))
            filled += at
            assert ends[-1] == 32
        assert sorted(seen) == list(range(24))
        full = filled / (32 * packing.rows)
        assert 0.8 < full < 1
        assert describe_pairs(data) == f"24 pairs in {packing.rows} rows per epoch, {full:.1%} full"


def _answers(**changed: Any) -> TokenizedExamples:
    """Return three labeled answers of 3, 1 and 4 tokens, to prompts of 2, 3 and 2 tokens."""
    tokens = np.array([*range(10, 15), *range(20, 24), *range(30, 36)], np.int32)
    # The first token of a prompt says whether the answer is desirable.
    trained = np.array([1, 0, 1, 1, 1, 0, 0, 0, 1, 1, 0, 1, 1, 1, 1], np.bool_)
    parts = {"tokens": tokens, "trained": trained, "lengths": np.array([5, 4, 6])}
    parts |= {"starts": np.array([0, 5, 9]), **changed}
    return TokenizedExamples("kto.jsonl", counts=Counter(), **parts)


def test_a_prompt_is_paired_with_the_answer_to_another() -> None:
    found = FittedAnswers(_answers(), 11, "error")
    assert found.limits.tolist() == [[5, 3], [4, 7], [6, 5]]
    assert (len(found), found.size, found.dropped, found.shortened) == (3, 30, 0, 0)
    pairs = [[found.answer(i, side) for side in (0, 1)] for i in range(3)]
    assert [[tokens.tolist() for tokens, _ in pair] for pair in pairs] == [
        [[10, 11, 12, 13, 14], [10, 11, 23]],
        [[20, 21, 22, 23], [20, 21, 22, 32, 33, 34, 35]],
        [[30, 31, 32, 33, 34, 35], [30, 31, 12, 13, 14]],
    ]
    prompts = (2, 3, 2)
    for pair, prompt in zip(pairs, prompts, strict=True):
        for tokens, trained in pair:
            assert trained.tolist() == [False] * prompt + [True] * (len(tokens) - prompt)
    assert [found.desirable(i) for i in range(3)] == [True, False, True]
    whole = _answers()
    two = {"tokens": whole.tokens[:9], "trained": whole.trained[:9]}
    two |= {"lengths": np.array([5, 4]), "starts": np.array([0, 5])}
    assert FittedAnswers(_answers(**two), 11, "error").limits.tolist() == [[5, 3], [4, 6]]
    with pytest.raises(DataError, match="kto.jsonl: one answer, but KTO also needs answers to oth"):
        FittedAnswers(_answers(lengths=np.array([5]), starts=np.array([0])), 11, "error")


def test_answers_that_do_not_fit_a_row_with_their_pair() -> None:
    message = (
        "kto.jsonl: 2 of 3 answers have more tokens than --seq-length 9, which must hold an answer "
        "and the same prompt with another answer (first: answer 2; the longest has 11 tokens): "
    )
    with pytest.raises(DataError, match=re.escape(message)):
        FittedAnswers(_answers(), 9, "error")
    dropped = FittedAnswers(_answers(), 10, "drop")
    assert (len(dropped), dropped.dropped, dropped.shortened) == (1, 2, 0)
    assert dropped.answer(0, 1)[0].tolist() == [10, 11, 23]
    starts, ends = (FittedAnswers(_answers(), 9, f"keep-{side}") for side in ("start", "end"))
    for found in (starts, ends):
        assert found.limits.tolist() == [[5, 3], [4, 5], [4, 4]]
        assert (len(found), found.dropped, found.shortened) == (3, 0, 2)
    assert starts.answer(1, 1)[0].tolist() == [20, 21, 22, 32, 33]
    assert ends.answer(1, 1)[0].tolist() == [22, 32, 33, 34, 35]
    assert ends.answer(2, 0)[1].tolist() == [True] * 4
    other = _answers(trained=np.zeros(15, np.bool_))
    others = [FittedAnswers(_answers(), 11, "keep-end"), FittedAnswers(other, 9, "keep-end")]
    digests = [found.digest() for found in (starts, ends, dropped, *others)]
    assert len(set(digests)) == 5
    assert FittedAnswers(_answers(), 9, "keep-end").digest() == ends.digest()


def test_a_row_of_answers_says_which_are_desirable() -> None:
    source = FittedAnswers(_answers(), 9, "keep-start")
    packing = one_per_row(source.limits[1:].sum(axis=1), 9)
    data = PreferenceDataset(source, 1, packing, 5, 1, 99)
    assert (len(data), data.pairs) == (5, 2)
    rows: dict[int, Any] = {int(data.row(i)[0]): data[i] for i in range(2)}
    assert rows[0]["text"].tolist() == [20, 21, 22, 23, 20, 21, 22, 32, 33, 99]
    assert rows[0][TRAINED].tolist() == [0, 0, 1, 0, 0, 0, 1, 1, 0]
    assert rows[0][SEGMENT_ENDS].tolist() == [4, 9]
    assert rows[1]["text"].tolist() == [30, 31, 32, 33, 30, 31, 12, 13, 99, 99]
    assert rows[1][SEGMENT_ENDS].tolist() == [4, 8, 9]
    for i, is_desirable in ((0, 0), (1, 1)):
        assert rows[i][PAIRS].tolist() == [1, *[0] * 8]
        assert rows[i][DESIRABLE].tolist() == [is_desirable, *[0] * 8]
        assert rows[i][REFERENCE].tolist() == [0.0] * 9
    described = describe_pairs(data)
    assert described.endswith("94.4% full; 2 longer answers shortened (--truncation)")
    dropped = FittedAnswers(_answers(), 10, "drop")
    data = PreferenceDataset(dropped, 0, one_per_row([8], 10), 5, 1, 99)
    assert describe_pairs(data).endswith("; 2 longer answers dropped (--truncation drop)")
    assert describe_pairs(None) == ""
