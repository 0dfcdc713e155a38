"""Packing compared with a plain loop, and its guarantees: order, resuming and speed."""

from __future__ import annotations

import time

import numpy as np
import pytest

from megatron.data.packing import EpochPlan, describe_rows, one_per_row, pack


def _plain(lengths: list[int], seq_length: int) -> list[int]:
    """Return the tokens in each row, by best fit decreasing, one example after another."""
    rows: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [row for row in rows if row + length <= seq_length]
        if fitting:
            rows[rows.index(max(fitting))] += length
        else:
            rows.append(length)
    return rows


@pytest.mark.parametrize("seed", range(20))
def test_rows_are_as_full_as_the_loops(seed: int) -> None:
    random = np.random.default_rng(seed)
    lengths = random.integers(1, random.integers(2, 65), 200)
    packing = pack(lengths, 64)
    plan = packing.epoch(0, seed)
    ours = sorted(int(lengths[plan.row(row)].sum()) for row in range(packing.rows))
    assert ours == sorted(_plain(lengths.tolist(), 64))
    assert packing.fullness == pytest.approx(lengths.sum() / 64 / packing.rows)


def test_every_epoch_holds_each_example_once_and_differs() -> None:
    lengths = np.random.default_rng(0).integers(1, 40, 300)
    packing = pack(lengths, 64)
    first, second = packing.epoch(0, 7), packing.epoch(1, 7)
    for plan in (first, second):
        assert np.array_equal(np.sort(plan.examples), np.arange(300))
        assert (plan.starts[0], plan.starts[-1], len(plan.starts)) == (0, 300, packing.rows + 1)
        assert max(lengths[plan.row(row)].sum() for row in range(packing.rows)) <= 64
    assert not np.array_equal(first.examples, second.examples)
    assert not np.array_equal(first.examples, packing.epoch(0, 8).examples)
    again = pack(lengths.copy(), 64).epoch(1, 7)
    assert np.array_equal(again.examples, second.examples)
    assert np.array_equal(again.starts, second.starts)


def test_a_row_is_its_epoch_s_and_one_epoch_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    packing = pack(np.random.default_rng(0).integers(1, 40, 30), 64)
    plans = {(number, seed): packing.epoch(number, seed) for number in (0, 1) for seed in (7, 8)}
    made: list[tuple[int, int]] = []

    def epoch(_: object, number: int, seed: int) -> EpochPlan:
        made.append((number, seed))
        return plans[number, seed]

    monkeypatch.setattr(type(packing), "epoch", epoch)
    for seed in (7, 8):
        for i in range(2 * packing.rows):
            expected = plans[i // packing.rows, seed].row(i % packing.rows)
            assert packing.row(i, seed).tolist() == expected.tolist()
    assert made == [(0, 7), (1, 7), (0, 8), (1, 8)]
    packing.row(0, 7)
    assert len(made) == 5, "plans are large, so earlier ones are not kept"


def test_without_packing_each_example_has_a_row() -> None:
    packing = one_per_row([3, 5, 1], 8)
    plan = packing.epoch(0, 0)
    assert packing.rows == 3
    assert sorted(len(plan.row(row)) for row in range(3)) == [1, 1, 1]
    assert packing.fullness == 9 / 24


def test_rows_stay_the_same_in_every_version() -> None:
    """A run that continues with a later version reads the rows that it would have read."""
    lengths = [7, 3, 3, 12, 1, 1, 1, 5, 16, 9, 4, 4, 4, 2, 8, 6, 6, 10, 3, 1]
    packing = pack(lengths, 16)
    in_rows = [0, 1, 2, 3, 4, 3, 2, 4, 5, 1, 5, 5, 5, 6, 6, 4, 6, 6, 6, 6]
    assert (packing.rows, packing.row_indices.tolist()) == (7, in_rows)
    plan = packing.epoch(1, 5)
    rows = [plan.row(row).tolist() for row in range(7)]
    assert rows == [
        [7, 10, 11, 2], [17, 15], [8], [9, 0], [18, 1, 4, 6, 5, 19], [3, 12], [14, 16, 13]
    ]  # fmt: skip
    both = [packing, one_per_row([3, 4], 16)]
    assert describe_rows(both, "pair") == "22 pairs in 9 rows per epoch, 78.5% full"


def test_a_million_lengths_take_seconds() -> None:
    random = np.random.default_rng(0)
    lengths = np.minimum(random.lognormal(5.7, 1.0, 1_000_000).astype(np.int64) + 1, 8192)
    start = time.process_time()
    packing = pack(lengths, 8192)
    packing.epoch(0, 0)
    assert time.process_time() - start < 20  # it takes 0.3 s
    assert packing.fullness > 0.999
