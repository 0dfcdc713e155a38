"""Lengths of runs and schedules in tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.errors import CheckpointError
from megatron.optimizer.schedule import Schedules
from megatron.parallel.layout import Layout
from megatron.tools.checkpoint import util
from megatron.training.batches import BatchPlan, ramp_up
from tests.config.command import parse
from tests.training.toy import build_toy, fingerprint, train_toy

_BATCH = 64  # tokens in the toy's update: 4 samples of 16 tokens
_NO_LENGTH = ["--train-iters"]


def test_the_update_that_reaches_the_tokens_is_the_last() -> None:
    for tokens, iterations in ((1, 1), (_BATCH, 1), (_BATCH + 1, 2), (5 * _BATCH, 5)):
        run = train_toy(Layout.single(), ["--train-tokens", str(tokens)])[1]
        assert (run.train_iterations, run.progress.iteration) == (iterations, iterations)
        assert run.progress.consumed_tokens == iterations * _BATCH


def test_the_first_of_two_lengths_ends_the_run() -> None:
    for words, iterations in (
        ("--train-tokens 129 --train-iters 2", 2),
        ("--train-tokens 129 --train-iters 9", 3),
        ("--train-tokens 129 --train-samples 11", 2),
        ("--train-tokens 129 --train-samples 40", 3),
    ):
        run = train_toy(Layout.single(), words.split())[1]
        assert (run.train_iterations, run.progress.iteration) == (iterations, iterations)


def test_a_growing_batch_in_tokens() -> None:
    plan = BatchPlan(1, 12, ramp_up(4, 4, 32, full=12), seq_length=10)
    # 5 updates of 4, 2 of 8 (from sample 16, rounded up to 20), then 12: 200, 360, then 120 each
    updates, samples, tokens = 0, 0, 0
    for limit in range(1, 900, 7):
        while tokens < limit:
            tokens += plan.tokens_at(updates, samples)
            samples += plan.global_batch_at(samples)
            updates += 1
        assert plan.iterations_for_tokens(limit) == updates


def test_schedules_in_tokens_are_those_in_samples() -> None:
    tokens = "--train-tokens 384 --lr-warmup-tokens 128 --lr-decay-tokens 320 --min-lr 1e-4".split()
    samples = "--lr-warmup-samples 8 --lr-decay-samples 20 --train-samples 24 --min-lr 1e-4".split()
    unset = ["--lr-warmup-fraction", "none"]
    ours, run = train_toy(Layout.single(), [*tokens, *unset])
    theirs, _ = train_toy(Layout.single(), [*samples, *unset])
    assert ours.values("learning-rate") == theirs.values("learning-rate")
    assert len(set(ours.values("learning-rate"))) > 4
    assert ours.values("lm loss") == theirs.values("lm loss")
    assert run.schedules.learning_rate.in_tokens


def test_tokens_are_saved_and_continued(tmp_path: Path) -> None:
    words = "--train-tokens 384 --lr-decay-tokens 320 --lr-warmup-tokens 100 --save-interval 3"
    flags = [*words.split(), "--lr-warmup-fraction", "none", "--save", str(tmp_path)]
    whole = train_toy(Layout.single(), flags)[1]
    resumed = train_toy(Layout.single(), [*flags, "--load", str(tmp_path), "--ckpt-step", "3"])[1]
    assert fingerprint(resumed) == fingerprint(whole)
    load = ["--load", str(tmp_path), "--lr-warmup-fraction", "none"]
    other = "--train-tokens 384 --lr-decay-tokens 320 --lr-warmup-tokens 90"
    with pytest.raises(CheckpointError, match="the warm-up .* in tokens, is 90 here and 100 in"):
        build_toy(Layout.single(), [*other.split(), *load])
    taken = build_toy(
        Layout.single(), [*load, "--use-checkpoint-opt_param-scheduler", "--train-samples", "24"]
    )
    assert taken.schedules.learning_rate == whole.schedules.learning_rate


@pytest.mark.parametrize("saver", ["megatron", "torch_dist"])
def test_a_schedule_in_tokens_is_not_converted_to_one_in_samples(
    saver: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved, out = tmp_path / "saved", tmp_path / "out"
    train_toy(Layout.single(), f"--train-tokens 128 --save {saved} --save-interval 2".split())
    words = f"--model-type GPT --loader native --load-dir {saved} --save-dir {out} --saver {saver}"
    assert util.main([*words.split(), "--keep-optimizer"]) != 0
    assert "a schedule in tokens (--lr-decay-tokens)" in capsys.readouterr().err
    assert util.main(words.split()) == 0


@pytest.mark.parametrize("before", ["curriculum", "batch"])
def test_a_run_that_continues_with_other_batches_has_all_its_samples(
    before: str, tmp_path: Path
) -> None:
    words = ["--train-tokens", "640", "--save", str(tmp_path), "--save-interval", "4"]
    first = "--curriculum-schedule fixed_discrete --curriculum-lengths 8 16 --curriculum-until 8"
    steps = 4 * _BATCH // 2
    if before == "batch":
        first, steps = "--global-batch-size 8", 8 * _BATCH
    train_toy(Layout.single(), [*words, *first.split(), "--exit-interval", "4"])
    for _ in range(2):  # the second starts in the middle of the rest
        run = train_toy(Layout.single(), [*words, "--load", str(tmp_path), "--exit-interval", "5"])
        run = run[1]
        left = -(-(640 - steps) // _BATCH)
        assert run.train_iterations == 4 + left
    run = train_toy(Layout.single(), [*words, "--load", str(tmp_path)])[1]
    assert run.progress.iteration == run.train_iterations == 4 + left
    assert run.progress.consumed_tokens == 640


def test_a_schedule_of_megatron_deepspeed_is_read() -> None:
    config = parse("--lr-decay-tokens 9000 --lr-warmup-tokens 100").config
    ours = Schedules.from_config(
        config.schedule, config.optimizer, config.training, global_batch=4, seq_length=128
    )
    theirs = {
        "max_lr": 1e-3,
        "min_lr": 0.0,
        "lr_decay_style": "linear",
        "num_steps": 12,
        "lr_warmup_steps": 0,
        "lr_decay_steps": 160,
        "num_tokens": 1536,
        "lr_warmup_tokens": 100,
        "lr_decay_tokens": 9000,
    }
    assert ours.resumed(theirs) == (ours, 12)
    with pytest.raises(CheckpointError, match="the decay's length"):
        ours.resumed(theirs | {"lr_decay_tokens": 8000})
    with pytest.raises(CheckpointError, match="the warm-up .* in tokens, is 100 here and 0 in the"):
        ours.resumed(theirs | {"lr_warmup_tokens": None})
    del theirs["lr_decay_tokens"]
    with pytest.raises(CheckpointError, match="counting in tokens"):
        ours.resumed(theirs)
