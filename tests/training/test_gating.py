"""DeepSpeed's gating in a run: noise by sample and position, also when resuming."""

from __future__ import annotations

import pytest

from megatron.parallel.layout import Layout
from tests.distributed import run_sharing_memory
from tests.training.toy import train_toy

_GATED = """
    --num-layers 4 --hidden-dropout 0 --attention-dropout 0 --train-iters 6 --global-batch-size 4
    --micro-batch-size 2 --num-experts 4 --mlp-type residual --topk 1 --noisy-gate-policy RSample
    --moe-train-capacity-factor 0.5 --expert-interval 1 --eval-iters 2 --eval-interval 3
""".split()
_LAYOUTS = {
    "one process": (1, {}, ""),
    "PP 2 x EP 2": (
        4,
        {"pipeline": 2, "expert": 2},
        "--pipeline-model-parallel-size 2 --moe-expert-parallel-size 2",
    ),
}


def _train(layout: Layout, flags: list[str]) -> tuple[list[float], list[float]]:
    """Return the losses of training and of the evaluations."""
    recorder, _ = train_toy(layout, [*_GATED, *flags])
    return recorder.values("lm loss"), recorder.values("lm loss validation")


@pytest.fixture(scope="module")
def uninterrupted() -> tuple[list[float], list[float]]:
    return _train(Layout.single(), [])


@pytest.mark.parametrize("layout", _LAYOUTS)
def test_a_resumed_run_draws_what_it_would_have_drawn(uninterrupted, layout, tmp_path):
    processes, sizes, flags = _LAYOUTS[layout]
    losses, evaluated = uninterrupted
    words = [*flags.split(), "--save", str(tmp_path), "--save-interval", "3"]
    run_sharing_memory(processes, _train, [*words, "--exit-interval", "3"], **sizes)
    words = [*flags.split(), "--load", str(tmp_path)]
    found = run_sharing_memory(processes, _train, words, **sizes)
    logged = [each for each in found if each[0]]
    assert logged
    for resumed, validation in logged:
        assert resumed == pytest.approx(losses[3:], rel=1e-5)
        assert validation[-1] == pytest.approx(evaluated[-1], rel=1e-5)


def test_the_noise_makes_a_difference_and_evaluation_has_none(uninterrupted):
    losses, _ = uninterrupted
    assert _train(Layout.single(), []) == uninterrupted
    plain, _ = _train(Layout.single(), ["--no-moe-use-rts"])
    assert plain[-1] != pytest.approx(losses[-1], rel=1e-5)
    frozen = ["--lr", "0", "--min-lr", "0"]
    drawn, evaluated = _train(Layout.single(), frozen)
    other, same = _train(Layout.single(), [*frozen, "--noisy-gate-policy", "Jitter"])
    assert drawn != pytest.approx(other, rel=1e-5)
    assert evaluated == same
    assert len(evaluated) == 2
