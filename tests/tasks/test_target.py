"""Metrics from counts of predictions, against their definitions."""

import math

import pytest

from megatron.models.plan import HeadSpec
from megatron.tasks.results import format_table, write_results
from megatron.tasks.target import Target, accuracy, class_metrics, class_rows, matthews


def test_two_classes():
    matrix = [[50, 10], [5, 35]]
    assert accuracy(matrix) == 0.85
    # (tp tn - fp fn) / sqrt of the margins' product
    expected = (35 * 50 - 10 * 5) / math.sqrt(45 * 40 * 60 * 55)
    assert matthews(matrix) == pytest.approx(expected)
    numbers = class_metrics(matrix)
    assert numbers["F1"] == pytest.approx(2 * 35 / (2 * 35 + 10 + 5))
    assert numbers["largest class"] == 0.6


def test_a_class_that_is_predicted_as_often_as_it_occurs():
    rows = class_rows([[3, 1], [1, 5]], ("a", "b"))
    assert [row[-1] for row in rows] == [0.75, pytest.approx(5 / 6)]


def test_predictions_of_a_single_class():
    numbers = class_metrics([[0, 7], [0, 3]])
    assert (numbers["accuracy"], numbers["matthews"]) == (0.3, 0.0)


def test_three_classes_by_name():
    rows = class_rows([[2, 1, 0], [0, 0, 4], [0, 0, 3]], ("a", "b", "c"))
    assert rows[0] == ["a", 3, 2, 1.0, pytest.approx(2 / 3), pytest.approx(0.8)]
    assert rows[1] == ["b", 4, 0, 0.0, 0.0, 0.0]
    table = format_table(("class", "n", "right", "p", "r", "F1"), rows).splitlines()
    assert len({len(line) for line in table[1:2]}) == 1
    assert table[2].split()[:3] == ["a", "3", "2"]


def test_what_is_no_number_becomes_null(tmp_path):
    write_results(tmp_path / "deep" / "r.json", {"results": {"ppl": math.inf, "n": 3}})
    assert '"ppl": null' in (tmp_path / "deep" / "r.json").read_text()


def test_a_class_that_neither_occurs_nor_is_predicted():
    assert class_rows([[2, 0], [0, 0]], ("a", "b"))[1] == ["b", 0, 0, 0.0, 0.0, 0.0]


def test_the_head_of_a_target():
    assert Target("T", ("a", "b", "c")).head == HeadSpec(3, 1)
    assert Target("T", tuple("ABCD"), texts=4).head == HeadSpec(1, 4)
    assert Target("T", span=(0, 5)).head == HeadSpec(1, 1)
