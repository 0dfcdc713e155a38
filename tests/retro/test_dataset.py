"""Neighbors of other chunks, which show what a model gains from the right ones."""

import numpy as np
import pytest

from megatron.retro.dataset import NoNeighbors, ShuffledNeighbors


class Numbers:
    """A table whose chunk `i` has the neighbor `i`."""

    def __init__(self, count):
        self._count = count

    def __len__(self):
        return self._count

    def rows(self, start, stop):
        assert 0 <= start < stop <= self._count  # a table of files has no empty range
        return np.arange(start, stop)[:, None]


@pytest.mark.parametrize("count", [2, 3, 8, 40, 120])
def test_shuffled_neighbors_are_those_of_other_chunks_each_once(count):
    table = ShuffledNeighbors(Numbers(count))
    step = next(n for n in (4, 3, 2) if count % n == 0)
    rows = np.concatenate([table.rows(i, i + step) for i in range(0, count, step)])[:, 0]
    assert sorted(rows) == list(range(count))
    assert len(table) == count
    assert (rows != np.arange(count)).all()


def test_shuffled_neighbors_are_of_another_place_in_a_second_pass_over_the_data():
    first, second = (ShuffledNeighbors(Numbers(200)).rows(i, i + 100)[:, 0] % 100 for i in (0, 100))
    assert (first != np.arange(100)).all()
    assert (second != np.arange(100)).all()


def test_shuffled_neighbors_are_a_golden_ratio_away():
    table = ShuffledNeighbors(Numbers(1000))
    assert table.rows(0, 3).ravel().tolist() == [618, 619, 620]
    assert table.rows(380, 384).ravel().tolist() == [998, 999, 0, 1]
    assert table.rows(380, 382).ravel().tolist() == [998, 999]
    assert table.rows(999, 1000).ravel().tolist() == [617]
    assert ShuffledNeighbors(Numbers(1)).rows(0, 1).ravel().tolist() == [0]  # there is no other


def test_without_neighbors_the_table_keeps_its_shape():
    table = NoNeighbors(Numbers(9))
    assert len(table) == 9
    assert table.rows(2, 5).tolist() == [[-1]] * 3
    assert table.rows(2, 5).dtype == np.int64
