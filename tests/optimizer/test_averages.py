"""Weight averages of a few numbers; `tests/training/test_averages.py` trains with them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from megatron.config.optimizer import OptimizerConfig
from megatron.optimizer.averages import LatestAverage, MovingAverage, WeightAverage, new_average
from megatron.optimizer.packed import FORMATS, PackedTensor


def _follow(average: WeightAverage, weight: Tensor, values: Sequence[float]) -> list[float | None]:
    """Give the weight these values, one in each update, and return the averages."""
    found = []
    for update, value in enumerate(values, 1):
        weight.fill_(value)
        average.update(update)
        sets = average.tensor_sets()
        found.append(sets["average."][0].mean().item() if sets else None)
    return found


@pytest.mark.parametrize("others", ["none", "plain", "packed"])
def test_a_moving_average_is_a_mean_at_first(others: str) -> None:
    weight, other = torch.zeros(2, 3), torch.full((4,), 8.0)
    held = PackedTensor(other, FORMATS["bf16"])
    held.store(other)
    weights = [weight, *{"none": [], "plain": [other], "packed": [held]}[others]]
    average = MovingAverage(weights, 0.75)
    assert average.tensor_sets() == {}
    found = _follow(average, weight, [1.0, 5.0, 6.0, 0.0, 11.0, 9.0])
    assert found == pytest.approx([1.0, 3.0, 4.0, 3.0, 5.0, 6.0])
    assert (average.count, average.kind) == (6, "ema")
    assert average.values(0).tolist() == [pytest.approx([6.0] * 3)] * 2
    for index in range(1, len(weights)):
        assert average.values(index).tolist() == [8.0] * 4


def test_a_loaded_moving_average_continues() -> None:
    weight = torch.zeros(3)
    average = MovingAverage([weight], 0.75)
    assert average.prepare(lambda prefix: False, 2) == {}
    assert average.count == 0
    loaded = average.prepare(lambda prefix: prefix == "average.", 2)
    assert (list(loaded), average.count) == (["average."], 2)
    loaded["average."][0].fill_(3.0)
    assert _follow(average, weight, [6.0, 0.0]) == pytest.approx([4.0, 3.0])


def test_the_latest_average_is_a_mean_of_snapshots() -> None:
    weight = torch.zeros(3)
    average = LatestAverage([weight], interval=2, window=3)
    found = _follow(average, weight, range(1, 10))
    assert found == [None, 2.0, 2.0, 3.0, 3.0, 4.0, 4.0, 6.0, 6.0]  # of 2; 2, 4; ...; 4, 6, 8
    assert (average.count, average.kind) == (4, "lawa")
    sets = average.tensor_sets()
    assert {prefix: tensors[0].tolist() for prefix, tensors in sets.items()} == {
        "average.": [6.0] * 3,
        "snapshot0.": [8.0] * 3,
        "snapshot1.": [6.0] * 3,
        "snapshot2.": [4.0] * 3,
    }


@pytest.mark.parametrize(("saved", "window", "taken"), [(0, 3, 0), (2, 3, 2), (3, 3, 3), (3, 2, 2)])
def test_a_loaded_latest_average_continues(saved: int, window: int, taken: int) -> None:
    weight = torch.zeros(3)
    average = LatestAverage([weight], interval=1, window=window)
    _follow(average, weight, [100.0])  # forgotten
    names = [f"snapshot{age}." for age in range(saved)]
    loaded = average.prepare(lambda prefix: prefix in names, 7)
    assert list(loaded) == names[:taken]
    assert average.count == (7 if taken else 0)
    for age, tensors in enumerate(loaded.values()):
        tensors[0].fill_(float(taken - age))  # the newest is first
    expected = [*range(1, taken + 1), 9.0][-window:]
    assert _follow(average, weight, [9.0]) == pytest.approx([sum(expected) / len(expected)])


def test_the_flags_choose_an_average() -> None:
    assert new_average(OptimizerConfig(), []) is None
    ema = new_average(OptimizerConfig(ema_decay=0.5), [])
    lawa = new_average(OptimizerConfig(lawa_interval=4, lawa_window=2), [])
    assert isinstance(ema, MovingAverage)
    assert isinstance(lawa, LatestAverage)
    for average in (ema, lawa):
        average.update(4)  # a process may have no weights
        assert average.count == 1
