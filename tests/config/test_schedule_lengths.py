"""Warm-up and WSD's final decay, as parts of the run's length, and lengths in tokens."""

from __future__ import annotations

import pytest

from megatron.optimizer.schedule import Schedules
from tests.config.command import parse, problems

_SAMPLES = "--train-samples 1000"
_NO_LENGTH = ["--train-iters"]


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
def test_a_logarithmic_warm_up_that_has_no_effect_is_reported(words: str, notice: str) -> None:
    notices = parse(f"--lr-warmup-style log {words}").notices
    assert [line for line in notices if notice in line]
    quiet = parse("--lr-warmup-style log --lr-warmup-iters 5").notices
    assert not [line for line in quiet if "log" in line]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--lr-warmup-tokens 9", "--lr-warmup-tokens 9 requires --lr-decay-tokens: add it, or"),
        (
            "--lr-decay-tokens 900 --lr-warmup-iters 2",
            "--lr-warmup-iters 2 cannot be combined with --lr-decay-tokens: use "
            "--lr-warmup-tokens 1024",
        ),
        (
            "--lr-decay-tokens 900 --lr-decay-samples 20",
            "--lr-decay-samples 20 cannot be combined with --lr-decay-tokens: use "
            "--lr-decay-tokens 2560",
        ),
        (
            "--lr-decay-tokens 900 --lr-decay-samples 20 --seq-length 1",
            "--lr-decay-samples 20 cannot be combined with --lr-decay-tokens: use "
            "--lr-decay-tokens 20",
        ),
        (
            "--lr-decay-tokens 900 --lr-warmup-tokens 900",
            "--lr-warmup-tokens 900 must be less than --lr-decay-tokens 900: lower it",
        ),
        (
            "--lr-decay-tokens 900 --lr-decay-style WSD --lr-wsd-decay-iters 2",
            "--lr-decay-style WSD cannot be combined with --lr-decay-tokens, because its final",
        ),
        (
            "--lr-decay-tokens 900 --ckpt-format legacy",
            "--ckpt-format legacy with --lr-decay-tokens: schedules of Megatron-LM count samples",
        ),
    ],
)
def test_lengths_that_contradict_tokens_are_refused(words: str, line: str) -> None:
    (said,) = problems(words)
    assert said.startswith(line)


def test_tokens_as_the_only_length() -> None:
    (said,) = problems("--train-tokens 900 --lr-warmup-samples 8", without=_NO_LENGTH)
    assert said == (
        "--lr-warmup-samples 8 cannot be combined with --train-tokens: use --lr-warmup-tokens 1024"
    )
    style = "--lr-decay-style WSD --lr-wsd-decay-samples 2"
    (said,) = problems(f"--train-tokens 900 {style}", without=_NO_LENGTH)
    assert said.endswith("or give --train-iters or --train-samples, too, without lengths in tokens")
    parse(f"--train-tokens 900 --train-samples 40 {style}", without=_NO_LENGTH)
    (said,) = problems("--train-tokens 900 --decoder-seq-length 8", architecture="t5")
    assert said == (
        "--train-tokens 900 is only for GPT, BERT and RETRO, and this model is a T5: drop it"
    )
    config = parse("--train-tokens 900 --lr-warmup-fraction 0.1", without=_NO_LENGTH).config
    rate = Schedules.from_config(
        config.schedule, config.optimizer, config.training, global_batch=4, seq_length=128
    ).learning_rate
    assert (rate.warmup, rate.decay, rate.in_tokens) == (90, 900, True)


@pytest.mark.parametrize(
    ("length", "without", "remedy"),
    [
        ("--lr-decay-samples 20", "--seq-length", "--lr-decay-tokens"),
        ("--lr-warmup-iters 2", "--seq-length", "--lr-warmup-tokens"),
        ("--lr-warmup-iters 2", "--micro-batch-size", "--lr-warmup-tokens"),
    ],
)
def test_no_number_of_tokens_is_proposed_if_it_is_not_known(
    length: str, without: str, remedy: str
) -> None:
    assert problems(f"--lr-decay-tokens 900 {length}", without=[without]) == [
        f"{without} is required: give it a value",
        f"{length} cannot be combined with --lr-decay-tokens: use {remedy}",
    ]
