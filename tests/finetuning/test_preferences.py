"""Training on preferences: first values, learning, and every layout against one process."""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch

from megatron.data.sample import SEGMENT_ENDS
from megatron.finetuning.preferences import (
    METRICS,
    PairLosses,
    Pairs,
    _reward_metrics,
    log1mexp,
    means_over_pairs,
    pair_values,
    values_at_segments,
)
from megatron.parallel.layout import Layout
from tests.distributed import run_sharing_memory
from tests.finetuning.toy_pairs import train_pairs


@cache
def one_process(words: str = "") -> dict[str, list[float]]:
    return train_pairs(Layout.single(), words.split())


def test_first_loss_is_that_of_a_model_that_is_its_own_reference() -> None:
    """The policy equals the reference model until the first update; TRL has the same first loss."""
    found = one_process()
    assert found["loss"][0] == pytest.approx(math.log(2), abs=1e-6)
    for name in ("rewards/chosen", "rewards/rejected", "rewards/margins"):
        assert found[name][0] == pytest.approx(0, abs=1e-5)
    assert found["loss"][-1] < 0.68
    assert found["rewards/accuracies"][-1] > 0.9


LAYOUTS = {
    "tensor": (2, {"tensor": 2}, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "pipeline": (2, {"pipeline": 2}, "--pipeline-model-parallel-size 2"),
    "context": (2, {"context": 2}, "--context-parallel-size 2"),
    "data": (2, {}, ""),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_equals_one_process(name: str) -> None:
    processes, sizes, words = LAYOUTS[name]
    expected = one_process()
    for found in run_sharing_memory(processes, train_pairs, words.split(), **sizes):
        for metric in (*METRICS, "grad-norm"):
            assert found[metric] == pytest.approx(expected[metric], rel=2e-4, abs=2e-5), metric


LORA = "--lora-rank 4 --lr 1e-2"


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"tensor": 2}, "--tensor-model-parallel-size 2 --sequence-parallel"),
        ({"pipeline": 2}, "--pipeline-model-parallel-size 2"),
        ({}, "--zero-stage 3"),
    ],
)
def test_adapters_in_every_layout(sizes: dict[str, int], words: str) -> None:
    """The reference is the model with its adapters disabled.

    The adapters change nothing at first, so rounding determines the accuracy.
    """
    expected = one_process(LORA)
    assert expected["loss"][0] == pytest.approx(math.log(2), abs=1e-6)
    assert expected["loss"][-1] < 0.69
    for found in run_sharing_memory(2, train_pairs, [*LORA.split(), *words.split()], **sizes):
        assert found.pop("rewards/accuracies")[2:] == expected["rewards/accuracies"][2:]
        for metric in (*found.keys() & METRICS, "grad-norm"):
            assert found[metric] == pytest.approx(expected[metric], rel=2e-4, abs=2e-5), metric


def test_each_segment_has_the_value_at_its_first_token() -> None:
    """The third one is the last token; the fourth one is empty."""
    batch = {
        "reference": torch.arange(8.0).view(1, 8),
        SEGMENT_ENDS: torch.tensor([0, 3, 7, 8, 8]),
    }
    assert values_at_segments(batch, "reference").tolist() == [0, 3, 7, 7]


def test_each_pair_has_the_values_of_two_segments_in_a_row() -> None:
    """Entries without a pair are -1, for which the gradient of every loss is finite."""
    found = pair_values(torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([True, False, True]))
    assert found.chosen.tolist() == [1, -1, 3]
    assert found.rejected.tolist() == [2, -1, 4]


def test_an_answer_of_the_same_reward_is_not_the_better_one() -> None:
    rewards = Pairs(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 1.5, 5.0]))
    found = _reward_metrics(PairLosses(torch.zeros(3), rewards))
    assert found["rewards/accuracies"].tolist() == [0, 1, 0]
    assert found["rewards/margins"].tolist() == [0, 0.5, -2]


def test_means_are_those_over_pairs() -> None:
    values = {"a": torch.tensor([3.0, 5.0, 9.0])}
    for is_pair, mean in (([True, False, True], 6), ([False, True, False], 5), ([False] * 3, 0)):
        assert means_over_pairs(values, torch.tensor(is_pair))["a"].item() == mean


def test_the_log_of_a_complementary_probability_is_accurate() -> None:
    """The gradient of log(1 - exp(x)) is -1 / (exp(-x) - 1)."""
    x = torch.tensor([-1e-12, -0.01, -0.693, -1.0, -20.0, -40.0], dtype=torch.float64)
    x.requires_grad_()
    found = log1mexp(x)
    found.sum().backward()
    values = x.detach().tolist()
    expected = [*(math.log(-math.expm1(v)) for v in values[:-1]), -math.exp(-40)]
    assert found.tolist() == pytest.approx(expected, rel=1e-12, abs=1e-16)
    assert x.grad is not None
    assert x.grad.tolist() == pytest.approx([-1 / math.expm1(-v) for v in values], rel=1e-12)
