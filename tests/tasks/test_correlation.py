"""Correlations of numbers, computed by hand."""

import math

import pytest

from megatron.tasks.target import band_rows, pearson, ranks, spearman, value_metrics


def test_equal_values_share_the_mean_of_their_ranks():
    assert ranks([3, 1, 3, 2, 3]).tolist() == [4, 1, 4, 2, 4]


def test_correlations_with_ties():
    x, y = [1, 2, 2, 3], [10, 20, 30, 30]
    # Deviations -1 0 0 1 and -12.5 -2.5 7.5 7.5: products 20, squares 2 and 275.
    assert pearson(x, y) == pytest.approx(20 / math.sqrt(550))
    # Ranks 1 2.5 2.5 4 and 1 2 3.5 3.5, mean 2.5: products 3.75, squares 4.5 each.
    assert spearman(x, y) == pytest.approx(3.75 / 4.5)
    assert pearson(x, [-value for value in y]) == -pearson(x, y)


def test_an_order_is_all_that_spearman_asks_for():
    x = [0.0, 0.5, 1.0, 4.0, 5.0]
    y = [math.exp(value) for value in x]
    assert spearman(x, y) == pytest.approx(1)
    assert pearson(x, y) < 0.95


def test_one_prediction_for_all_has_no_correlation():
    numbers = value_metrics([1.0, 2.0, 4.5], [2.5, 2.5, 2.5])
    assert (numbers["pearson"], numbers["spearman"]) == (0, 0)
    assert numbers["mean squared error"] == pytest.approx((1.5**2 + 0.5**2 + 2**2) / 3)


def test_what_is_no_number_is_no_correlation():
    assert math.isnan(pearson([1.0, 2.0], [math.nan, 1.0]))


def test_rows_from_each_whole_number_to_the_next():
    rows = band_rows([0.0, 0.8, 2.0, 4.0, 5.0], [1.0, 1.0, 2.0, 4.0, 4.0], (0, 5))
    assert [row[:2] for row in rows] == [["0 to 1", 2], ["2 to 3", 1], ["4 to 5", 2]]
    assert rows[0][2:] == [pytest.approx(0.4), 1.0, pytest.approx((1 + 0.2**2) / 2)]
    assert rows[2][2:] == [4.5, 4.0, 0.5]
