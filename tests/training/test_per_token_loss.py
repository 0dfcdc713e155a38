"""`--calculate-per-token-loss`: every counted token has the same weight, whichever micro-batch and
process it is in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from megatron.data.datasets import Datasets
from megatron.data.sample import SampleDataset
from megatron.parallel.layout import Layout
from megatron.training.batches import batches_from
from megatron.training.evaluation import evaluate
from megatron.training.run import Run
from megatron.training.step import Updates
from tests.distributed import run_distributed, toy_device
from tests.training.toy import build_toy, fingerprint

FLAG = "--calculate-per-token-loss"
# SGD, because AdamW's updates do not depend on the gradients' divisor.
_BASE = """
    --num-layers 4 --hidden-dropout 0 --attention-dropout 0 --optimizer sgd --lr 0.05 --min-lr 0.01
    --clip-grad 0.5 --global-batch-size 8 --eval-iters 1
""".split()
_OF_KIND = {"gpt": ["--eod-mask-loss"], "bert": ["--bert-no-binary-head"], "t5": []}
_COUNTED = (1, 16, 2, 15, 0, 9, 16, 3)  # tokens in each of a GPT's samples, in order
_UPDATES = 2
Outcome = tuple[list[float], list[float], list[float]]


class _Uneven:
    """A GPT's samples: ends of documents that do not count, then numbers that count up."""

    def __init__(self, run: Run, counted: Sequence[int] = _COUNTED) -> None:
        self._counted, self._eod, self._length = counted, run.tokenizer.eod, 16

    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> dict[str, Any]:
        text = np.arange(i, i + self._length + 1, dtype=np.int64) % 90
        text[: self._length - self._counted[i % len(self._counted)]] = self._eod
        return {"text": text, "id": i}


def _build(layout: Layout, words: str, kind: str = "gpt", counted: Sequence[int] = _COUNTED) -> Run:
    run = build_toy(layout, [*_BASE, *_OF_KIND[kind], *words.split()], kind)
    if kind == "gpt":
        samples: SampleDataset = _Uneven(run, counted)  # type: ignore[assignment]
        run.datasets = Datasets(samples, samples, samples)
        run.train_batches = batches_from(run, samples, consumed=0)
    return run


def _train(layout: Layout, words: str, kind: str = "gpt") -> Outcome:
    """Return the losses, the gradient norms, and the final loss on held-out samples."""
    run = _build(layout, words, kind)
    updates = Updates(run)
    made = [updates.make(look_ahead=number < _UPDATES - 1) for number in range(_UPDATES)]
    return (
        [outcome.losses["lm loss"] for outcome in made],
        [outcome.grad_norm for outcome in made],
        list(_held_out(run).values()),
    )


def _held_out(run: Run) -> dict[str, float]:
    assert run.datasets[1] is not None
    losses = evaluate(run, run.datasets[1], skip=0)
    assert losses is not None
    return losses


def _assert_close(got: Outcome, expected: Outcome, tolerance: float = 1e-5) -> None:
    for ours, theirs, factor in zip(got, expected, (1, 10, 1), strict=True):
        assert ours == pytest.approx(theirs, rel=factor * tolerance)


@pytest.mark.parametrize(
    ("kind", "words", "tolerance"),
    [
        ("gpt", "", 1e-6),
        ("gpt", "--cross-entropy-fusion-impl linear", 1e-6),
        ("gpt", "--optimizer-cpu-offload", 1e-6),
        ("gpt", "--fp16 --initial-loss-scale 1024", 2e-3),
        ("bert", "", 1e-6),
        ("t5", "", 1e-6),
    ],
)
def test_micro_batches_equal_one_of_all_samples(kind: str, words: str, tolerance: float) -> None:
    expected = _train(Layout.single(), f"{words} --micro-batch-size 8", kind)
    for size in (8, 1):
        more = f"{words} {FLAG} --micro-batch-size {size}"
        _assert_close(_train(Layout.single(), more, kind), expected, tolerance)


def test_an_evaluation_weighs_all_its_batches_by_their_tokens() -> None:
    counted = (1,) * 8 + (16,) * 8
    for more, equal in ((FLAG, True), ("", False)):
        run = _build(
            Layout.single(), f"{more} --micro-batch-size 4 --eval-iters 2", counted=counted
        )
        large = _build(
            Layout.single(),
            f"{more} --micro-batch-size 16 --global-batch-size 16",
            counted=counted,
        )
        assert (_held_out(run) == pytest.approx(_held_out(large), rel=1e-6)) == equal


def test_without_the_flag_every_micro_batch_weighs_the_same() -> None:
    one = _train(Layout.single(), "--micro-batch-size 8")
    parts = _train(Layout.single(), "--micro-batch-size 1")
    for ours, theirs in zip(parts, one, strict=True):
        assert ours != pytest.approx(theirs, rel=1e-3)


@pytest.mark.parametrize("words", ["", "--fp16 --initial-loss-scale 1024"])
def test_where_all_tokens_count_it_changes_no_bit(words: str) -> None:
    def results(more: str) -> object:
        run = build_toy(Layout.single(), f"--eval-iters 2 {words} {more}".split())
        updates = Updates(run)
        made = [updates.make(look_ahead=False) for _ in range(3)]
        return [(o.losses, o.grad_norm) for o in made], _held_out(run), fingerprint(run)

    assert results(FLAG) == results("")


def test_where_none_counts_nothing_changes() -> None:
    words = f"{FLAG} --micro-batch-size 4 --weight-decay 0"
    run = _build(Layout.single(), words, counted=(0,))
    before = [parameter.detach().clone() for parameter in run.parameters()]
    outcome = Updates(run).make(look_ahead=False)
    assert outcome.applied
    assert (outcome.losses, outcome.grad_norm) == ({"lm loss": 0.0}, 0.0)
    assert all(map(torch.equal, before, run.parameters()))
    assert _held_out(run) == {"lm loss": 0.0}


_STAGES = "--pipeline-model-parallel-size 2"
# Layout sizes, flags of runs in the layout, and the kinds of network.
_LAYOUTS: tuple[tuple[dict[str, int], str, tuple[str, ...]], ...] = (
    (
        {},
        "gpt",
        (
            "--micro-batch-size 1",
            "--micro-batch-size 4 --use-distributed-optimizer --overlap-grad-reduce "
            "--overlap-param-gather",
            "--micro-batch-size 2 --zero-stage 2",
            "--micro-batch-size 1 --zero-stage 3",
            "--micro-batch-size 1 --DDP-impl torch",
        ),
    ),
    ({}, "bert", ("--micro-batch-size 1",)),
    ({}, "t5", ("--micro-batch-size 2",)),
    (
        {"pipeline": 2},
        "gpt",
        (
            f"{_STAGES} --micro-batch-size 1",
            f"{_STAGES} --micro-batch-size 2 --num-layers-per-virtual-pipeline-stage 1",
            f"{_STAGES} --micro-batch-size 1 --pipeline-schedule zero-bubble",
        ),
    ),
    ({"pipeline": 2}, "t5", (f"{_STAGES} --micro-batch-size 1",)),
    ({"context": 2}, "gpt", ("--context-parallel-size 2 --micro-batch-size 1",)),
    (
        {"tensor": 2},
        "gpt",
        (
            "--tensor-model-parallel-size 2 --sequence-parallel --micro-batch-size 1",
            "--tensor-model-parallel-size 2 --micro-batch-size 2 "
            "--cross-entropy-fusion-impl linear",
        ),
    ),
)


def _train_in_layouts(world: Layout) -> list[tuple[str, str, Outcome]]:
    found = []
    for sizes, kind, runs in _LAYOUTS:
        layout = Layout.at(world.world.rank, 2, **sizes).connect(toy_device().type)
        for words in runs:
            found.append((kind, words, _train(layout, f"{FLAG} {words}", kind)))
    return found


def test_every_layout_equals_one_process_with_one_micro_batch() -> None:
    expected = {kind: _train(Layout.single(), "--micro-batch-size 8", kind) for kind in _OF_KIND}
    for results in run_distributed(2, _train_in_layouts):
        assert len(results) == 14
        for kind, words, got in results:
            try:
                _assert_close(got, expected[kind])
            except AssertionError as error:
                raise AssertionError(f"{kind} {words}") from error
