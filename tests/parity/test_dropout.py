"""With dropout, every layout repeats itself to the bit, and trains like one process on average over
seeds. Its masks differ from one process's, so its losses do too."""

from functools import cache
from statistics import mean

import pytest

from megatron.parallel.layout import Layout
from tests.distributed import run_sharing_memory
from tests.parity.layouts import (
    LOSS_TOLERANCE,
    LayoutCase,
    largest_difference,
    train_curves,
)

_SP = "--sequence-parallel"
_VIRTUAL = "--num-layers-per-virtual-pipeline-stage 1"
REPEATED = (
    LayoutCase(2, flags="--zero-stage 2 --overlap-grad-reduce --overlap-param-gather"),
    LayoutCase(2, tensor=2, flags=_SP),
    LayoutCase(2, pipeline=2, flags=_VIRTUAL),
    LayoutCase(2, context=2, flags="--cp-comm-type a2a"),
    LayoutCase(2, context=2, flags="--recompute-granularity selective"),
    LayoutCase(4, tensor=2, pipeline=2, flags=f"{_SP} --pipeline-schedule zero-bubble"),
    LayoutCase(8, tensor=2, pipeline=2, flags=f"{_SP} --zero-stage 1 --overlap-grad-reduce"),
)
AVERAGED = (
    LayoutCase(2),
    LayoutCase(2, tensor=2, flags=_SP),
    LayoutCase(2, pipeline=2, flags=_VIRTUAL),
    LayoutCase(2, context=2, flags="--cp-comm-type a2a"),
    LayoutCase(2, context=2),
)
SEEDS = (1, 2, 3, 4)
DROPOUT = 0.2


def _id(case: LayoutCase) -> str:
    return f"{case.name} {case.shown_flags}"


def _words(case, seed, dropout=DROPOUT):
    rates = ("--hidden-dropout", str(dropout), "--attention-dropout", str(dropout))
    return [*case.words(), *rates, "--seed", str(seed)]


@cache
def _without_dropout():
    words = [*_words(LayoutCase(1), seed=1, dropout=0.0), "--train-iters", "6"]
    return train_curves(Layout.single(), words)


@pytest.mark.parametrize("case", REPEATED, ids=_id)
def test_a_layout_repeats_itself_to_the_bit(case):
    words = [*_words(case, seed=1), "--train-iters", "6"]
    first, second = (
        run_sharing_memory(case.processes, train_curves, words, **case.sizes) for _ in range(2)
    )
    assert first == second
    difference = largest_difference(first[0].losses, _without_dropout().losses)
    assert difference > 100 * LOSS_TOLERANCE  # the layout's own is far smaller


def _last_losses(layout, case, dropout):
    """Return each seed's mean loss over the last ten iterations."""
    runs = [train_curves(layout, _words(case, seed, dropout)) for seed in SEEDS]
    return [mean(curves.losses[-10:]) for curves in runs]


@cache
def _single_process(dropout):
    return mean(_last_losses(Layout.single(), LayoutCase(1), dropout))


@pytest.mark.parametrize("case", AVERAGED, ids=_id)
def test_dropout_costs_as_much_as_on_one_process(case):
    """Weights and samples of a seed match one process's, so only the masks differ.

    Measured over eight seeds: dropout costs 0.138 +- 0.009, and other masks change a seed's mean
    loss by 0.03. Four seeds therefore distinguish a correct layout from one without dropout, or
    with twice as much: a third of the cost is three standard errors.
    """
    expected = _single_process(DROPOUT)
    cost = expected - _single_process(0.0)
    assert cost > 0.1
    results = run_sharing_memory(case.processes, _last_losses, case, DROPOUT, **case.sizes)
    losses = results[-1]
    assert all(other == losses for other in results)
    assert abs(mean(losses) - expected) < cost / 3
