"""Rows of packed pairs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from megatron.data.packing import pack
from megatron.data.preferences import (
    PAIRS,
    REFERENCE,
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
