"""Warm-up and WSD's final decay, as parts of the run's length."""

from __future__ import annotations

import pytest

from megatron.optimizer.schedule import Schedules
from tests.config.command import parse, problems

_SAMPLES = "--train-samples 1000"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--lr-warmup-iters 40", "--lr-warmup-iters 40 must be less than --train-iters 40: lower"),
        (
            "--lr-warmup-iters 5 --lr-decay-iters 4",
            "--lr-warmup-iters 5 must be less than --lr-decay-iters 4: lower it",
        ),
        (
            f"--lr-warmup-samples 2000 {_SAMPLES}",
            "--lr-warmup-samples 2000 must be less than --train-samples 1000: lower it",
        ),
        ("--lr-warmup-fraction 1", "--lr-warmup-fraction 1.0: must be at least 0 and below 1"),
        (
            "--lr-decay-style WSD --lr-wsd-decay-iters 41",
            "--lr-wsd-decay-iters 41 must be at most --train-iters 40: lower it",
        ),
        (
            "--lr-decay-style WSD --lr-wsd-decay-iters 31 --lr-warmup-iters 10",
            "--lr-warmup-iters 10 and --lr-wsd-decay-iters 31 overlap: lower one of them, so "
            "that both fit into --train-iters 40",
        ),
        (
            "--lr-decay-style WSD --lr-wsd-decay-iters 94 --lr-decay-iters 100 "
            "--lr-warmup-fraction 0.07",
            "--lr-warmup-fraction 0.07 (7 iters) and --lr-wsd-decay-iters 94 overlap: lower one "
            "of them, so that both fit into --lr-decay-iters 100",
        ),
        (
            "--lr-decay-style WSD --lr-wsd-decay-samples 501 --lr-warmup-fraction 0.5 "
            f"--rampup-batch-size 4 4 64 --global-batch-size 8 {_SAMPLES}",
            "--lr-warmup-fraction 0.5 (500 samples) and --lr-wsd-decay-samples 501 overlap",
        ),
    ],
)
def test_what_does_not_fit_is_refused(words: str, line: str) -> None:
    (said,) = problems(words, without=_own(words))
    assert said.startswith(line)


@pytest.mark.parametrize(
    "words",
    [
        "--lr-decay-iters 100 --lr-wsd-decay-iters 93 --lr-warmup-fraction 0.07",
        "--lr-wsd-decay-iters 40",
        f"--lr-wsd-decay-samples 400 --lr-warmup-samples 600 {_SAMPLES}",
    ],
)
def test_a_decay_at_the_end_may_begin_where_the_warm_up_ends(words: str) -> None:
    config = parse("--lr-decay-style WSD", words, without=_own(words)).config
    rate = Schedules.from_config(
        config.schedule, config.optimizer, config.training, global_batch=4, seq_length=16
    ).learning_rate
    assert rate.at(rate.warmup) == pytest.approx(config.schedule.lr)
    assert rate.at(rate.decay) == 0.0


def _own(words: str) -> tuple[str, ...]:
    """Return the flags of the small run that these replace."""
    return ("--train-iters",) if _SAMPLES in words else ()


@pytest.mark.parametrize(
    ("words", "notice"),
    [
        ("", "--lr-warmup-style log has no effect without "),
        (
            "--lr-warmup-iters 5 --save x --save-interval 5 --ckpt-format legacy",
            "--ckpt-format legacy: Megatron-LM does not support --lr-warmup-style log",
        ),
        (
            "--lr-warmup-iters 5 --lr-decay-style range-test",
            "--lr-warmup-style log, --lr-warmup-iters 5: no effect with --lr-decay-style range",
        ),
    ],
)
def test_a_logarithmic_warm_up_that_has_no_effect_is_told(words: str, notice: str) -> None:
    notices = parse(f"--lr-warmup-style log {words}").notices
    assert [line for line in notices if notice in line]
    quiet = parse("--lr-warmup-style log --lr-warmup-iters 5").notices
    assert not [line for line in quiet if "log" in line]
