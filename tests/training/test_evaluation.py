"""Which held-out samples an evaluation reads."""

from __future__ import annotations

import pytest

from megatron.parallel.layout import Layout
from megatron.training.batches import evaluation_position
from megatron.training.callbacks.scalars import Scalars
from megatron.training.evaluation import final_evaluation
from tests.training.toy import build_toy

_TWO_BATCHES = "--train-iters 7 --eval-interval 3 --eval-iters 2".split()  # of 4 samples each


def test_an_evaluation_begins_after_the_samples_of_those_before() -> None:
    run = build_toy(Layout.single(), _TWO_BATCHES)
    positions = [evaluation_position(run, iteration) for iteration in (0, 2, 3, 5, 6, 7)]
    assert positions == [0, 0, 8, 8, 16, 16]


def test_validation_goes_on_while_the_test_split_is_read_from_its_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run, seen = build_toy(Layout.single(), _TWO_BATCHES), []
    splits = dict(zip(map(id, run.datasets), ("training", "validation", "test"), strict=True))
    monkeypatch.setattr(
        "megatron.training.evaluation.evaluate",
        lambda _, dataset, *, skip: seen.append((splits[id(dataset)], skip)),
    )
    run.progress.iteration = 7
    final_evaluation(run, Scalars([]))
    assert seen == [("validation", 16), ("test", 0)]
