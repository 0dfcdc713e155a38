"""Which held-out samples an evaluation reads."""

from __future__ import annotations

import pytest

from megatron.parallel.layout import Layout
from megatron.training.batches import evaluation_position
from megatron.training.callbacks.scalars import Scalars
from megatron.training.evaluation import evaluate, final_evaluation
from tests.distributed import run_distributed
from tests.training.toy import build_toy, train_toy

_LARGER = "--eval-global-batch-size 12 --eval-micro-batch-size 3".split()
_TWO_BATCHES = "--train-iters 7 --eval-interval 3 --eval-iters 2".split()  # of 4 samples each


def test_an_evaluation_begins_after_the_samples_of_those_before() -> None:
    run = build_toy(Layout.single(), _TWO_BATCHES)
    positions = [evaluation_position(run, iteration) for iteration in (0, 2, 3, 5, 6, 7)]
    assert positions == [0, 0, 8, 8, 16, 16]


@pytest.mark.parametrize(
    ("start", "evaluated"), [(0, [3, 6, 9]), (3, [3, 6, 9]), (4, [6, 9]), (9, [9]), (10, [])]
)
def test_evaluations_may_begin_later(
    start: int, evaluated: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first evaluation begins with the first samples."""
    seen: list[tuple[int, int]] = []
    monkeypatch.setattr(
        "megatron.training.evaluation.evaluate",
        lambda run, dataset, *, skip: seen.append((run.progress.iteration, skip)),
    )
    words = f"--train-iters 10 --start-eval-at-iter {start}".split()
    run = train_toy(Layout.single(), words)[1]
    assert seen == [(iteration, 4 * i) for i, iteration in enumerate(evaluated)]
    assert run.datasets[1] is not None
    assert len(run.datasets[1]) == 4 * (len(evaluated) + 1)
    assert evaluation_position(run, 10) == 4 * len(evaluated)


@pytest.mark.parametrize(("words", "position"), [([], 16), (["--skip-train"], 0)])
def test_validation_continues_while_the_test_split_is_read_from_its_start(
    words: list[str], position: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Megatron also begins the validation split again with --skip-train."""
    run, seen = build_toy(Layout.single(), [*_TWO_BATCHES, *words]), []
    splits = dict(zip(map(id, run.datasets), ("training", "validation", "test"), strict=True))
    monkeypatch.setattr(
        "megatron.training.evaluation.evaluate",
        lambda _, dataset, *, skip: seen.append((splits[id(dataset)], skip)),
    )
    run.progress.iteration = 7
    final_evaluation(run, Scalars([]))
    assert seen == [("validation", position), ("test", 0)]


def test_an_evaluation_may_have_batches_of_its_own() -> None:
    run = build_toy(Layout.single(), [*_TWO_BATCHES, *_LARGER])
    assert [evaluation_position(run, iteration) for iteration in (2, 3, 6)] == [0, 24, 48]
    _, validation, test = run.datasets
    assert [len(split) for split in (validation, test) if split is not None] == [72, 24]


def _held_out(layout: Layout, words: list[str], skip: int) -> dict[str, float] | None:
    run = build_toy(layout, [*words, "--attention-dropout", "0.5"])
    assert run.datasets[1] is not None
    return evaluate(run, run.datasets[1], skip=skip)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({}, []),
        ({"pipeline": 2}, ["--pipeline-model-parallel-size", "2"]),
        ({"tensor": 2}, "--tensor-model-parallel-size 2 --sequence-parallel".split()),
    ],
)
def test_its_batches_contain_the_same_samples_as_smaller_ones(
    sizes: dict[str, int], words: list[str]
) -> None:
    """Two batches of 12 in micro-batches of 3 hold the same samples as six batches of 4."""
    larger = [*words, *_LARGER, "--eval-iters", "2"]
    expected = _held_out(Layout.single(), ["--eval-iters", "6"], 24)
    assert expected is not None
    for losses in run_distributed(2, _held_out, larger, 24, **sizes):
        assert losses == pytest.approx(expected, rel=1e-6)
