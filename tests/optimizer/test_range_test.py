"""The learning-rate range test, compared with DeepSpeed's."""

from __future__ import annotations

from math import exp
from pathlib import Path

import pytest
import torch

from megatron.errors import CheckpointError
from megatron.optimizer.schedule import LearningRateSchedule, Schedules
from megatron.parallel.layout import Layout
from tests.config.command import parse, problems
from tests.training.toy import build_toy, fingerprint, train_toy

_TEST = "--lr-decay-style range-test --lr-range-test-min-lr 1e-4 --lr-range-test-step-size 5"


def _rate(words: str) -> LearningRateSchedule:
    config = parse(words, without=["--lr"]).config
    return Schedules.from_config(
        config.schedule, config.optimizer, config.training, global_batch=4, seq_length=128
    ).learning_rate


def test_known_rates() -> None:
    rate = _rate(_TEST)
    assert [rate.at(4 * k) for k in (0, 1, 5, 10)] == pytest.approx([1e-4, 1.2e-4, 2e-4, 3e-4])
    assert rate == LearningRateSchedule(
        1e-4, 1e-4, 0.0, 0, 0, "range-test", step=20, step_rate=1.0
    )  # in samples
    rate = _rate(f"{_TEST} --lr-range-test-staircase --lr-range-test-step-rate 2")
    assert [rate.at(4 * k) for k in (0, 4, 5, 9, 10)] == pytest.approx(
        [1e-4, 1e-4, 3e-4, 3e-4, 5e-4]
    )
    rate = _rate(f"{_TEST} --lr-range-test-exponential --lr-range-test-step-rate 9")
    assert [rate.at(4 * k) for k in (0, 5, 10, 15)] == pytest.approx([1e-4, 1e-3, 1e-2, 1e-1])
    assert rate.at(1e9) == pytest.approx(1e-4 * exp(200))  # not infinite


@pytest.mark.parametrize("staircase", [False, True])
@pytest.mark.parametrize(("first", "size", "rise"), [(1e-3, 2000, 1.0), (1e-5, 7, 3.5)])
def test_rates_are_deepspeeds(first: float, size: int, rise: float, staircase: bool) -> None:
    module = pytest.importorskip("deepspeed.runtime.lr_schedules", reason="needs deepspeed")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    theirs = module.LRRangeTest(optimizer, first, size, rise, staircase)
    words = (
        f"--lr-decay-style range-test --lr-range-test-min-lr {first} "
        f"--lr-range-test-step-size {size} --lr-range-test-step-rate {rise}"
    )
    ours = _rate(words + " --lr-range-test-staircase" * staircase)
    for update in range(5000):
        assert ours.at(4 * update) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-12)
        theirs.step()


@pytest.mark.parametrize("style", ["constant", "linear"])
def test_warm_up_flags_are_deepspeeds_one_update_later(style: str) -> None:
    """Check what docs/curriculum.md says about WarmupLR and WarmupDecayLR."""
    module = pytest.importorskip("deepspeed.runtime.lr_schedules", reason="needs deepspeed")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    words = "--lr 1e-2 --lr-warmup-init 1e-4 --lr-warmup-iters 10"
    if style == "constant":
        theirs = module.WarmupLR(optimizer, 1e-4, 1e-2, 10, "linear")
    else:
        theirs = module.WarmupDecayLR(optimizer, 40, 1e-4, 1e-2, 10, "linear")
        words += " --lr-decay-iters 40 --min-lr 1e-4"
    ours = _rate(f"{words} --lr-decay-style {style}")
    for update in range(60):
        expected = ours.at(4 * max(update - 1, 0))
        assert optimizer.param_groups[0]["lr"] == pytest.approx(expected, rel=1e-12)
        theirs.step()


@pytest.mark.parametrize("style", ["constant", "linear"])
def test_a_logarithmic_warm_up_is_deepspeeds_one_update_later(style: str) -> None:
    module = pytest.importorskip("deepspeed.runtime.lr_schedules", reason="needs deepspeed")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    words = "--lr 1e-2 --lr-warmup-init 1e-4 --lr-warmup-iters 10 --lr-warmup-style log"
    if style == "constant":
        theirs = module.WarmupLR(optimizer, 1e-4, 1e-2, 10)
    else:
        theirs = module.WarmupDecayLR(optimizer, 40, 1e-4, 1e-2, 10)
        words += " --lr-decay-iters 40 --min-lr 1e-4"
    ours = _rate(f"{words} --lr-decay-style {style}")
    for update in range(60):
        expected = ours.at(4 * max(update - 1, 0))
        assert optimizer.param_groups[0]["lr"] == pytest.approx(expected, rel=1e-12)
        theirs.step()


@pytest.mark.parametrize("shape", ["log", "linear"])
def test_a_cosine_is_deepspeeds_and_its_warm_up_one_update_later(shape: str) -> None:
    """DeepSpeed's cosine runs one update ahead of its warm-up, so its updates have our rates."""
    module = pytest.importorskip("deepspeed.runtime.lr_schedules", reason="needs deepspeed")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-2)
    theirs = module.WarmupCosineLR(optimizer, 40, 0.1, 10, 0.05, shape)
    theirs.step()  # before the first step, the rate is 0
    ours = _rate(
        f"--lr 1e-2 --lr-warmup-init 1e-3 --lr-warmup-iters 10 --lr-warmup-style {shape} "
        "--lr-decay-style cosine --lr-decay-iters 40 --min-lr 5e-4"
    )
    for update in range(1, 60):
        expected = ours.at(4 * (update - 1 if update <= 10 else update))
        assert optimizer.param_groups[0]["lr"] == pytest.approx(expected, rel=1e-12), update
        theirs.step()


def test_a_logarithmic_warm_up_without_deepspeed() -> None:
    """Compare with the rates that DeepSpeed 0.19.8 gave, and in samples and tokens."""
    words = "--lr 1e-2 --lr-warmup-init 1e-4 --lr-warmup-style log --lr-decay-style constant "
    expected = [
        *(0.0001, 0.004363697924926592, 0.006857801325411256, 0.008627395849853182),
        *[0.01] * 4,
    ]
    rate = _rate(words + "--lr-warmup-iters 5")
    assert [rate.at(4 * update) for update in range(8)] == pytest.approx(expected, rel=1e-12)
    in_samples = _rate(words + "--train-iters none --train-samples 80 --lr-warmup-samples 20")
    assert [in_samples.at(4 * k) for k in range(8)] == pytest.approx(expected, rel=1e-12)


def test_a_logarithmic_warm_up_is_saved() -> None:
    words = "--lr 1e-2 --lr-decay-style constant --lr-warmup-iters 5"
    linear, log = (
        Schedules.from_config(
            run.schedule, run.optimizer, run.training, global_batch=4, seq_length=128
        )
        for run in (parse(words + style).config for style in ("", " --lr-warmup-style log"))
    )
    assert log.resumed(log.to_dict(8)) == (log, 8)
    assert linear.resumed(log.to_dict(8), use_checkpoint=True) == (log, 8)
    assert log.resumed(linear.to_dict(8), use_checkpoint=True) == (linear, 8)
    with pytest.raises(CheckpointError, match="--lr-warmup-style log"):
        linear.resumed(log.to_dict(8))


def test_a_test_resumes(tmp_path: Path) -> None:
    flags = [*_TEST.split(), "--lr-range-test-staircase", "--save", str(tmp_path)]
    flags += ["--save-interval", "3", "--lr-warmup-fraction", "none", "--min-lr", "0"]
    recorder, whole = train_toy(Layout.single(), flags)
    assert recorder.values("learning-rate") == pytest.approx([1e-4] * 4 + [2e-4] * 2)
    load = ["--load", str(tmp_path), "--ckpt-step", "3"]
    resumed = train_toy(Layout.single(), [*flags, *load])[1]
    assert fingerprint(resumed) == fingerprint(whole)
    with pytest.raises(CheckpointError, match="--lr-range-test-step-size, in samples, is 16 here"):
        build_toy(Layout.single(), [*flags, *load, "--lr-range-test-step-size", "4"])
    taken = build_toy(Layout.single(), [*load, "--use-checkpoint-opt_param-scheduler"])
    assert taken.schedules.learning_rate == whole.schedules.learning_rate
    other, saved = build_toy(Layout.single()).schedules, whole.schedules.to_dict(0)
    del saved["lr_range_test_step_size"]
    with pytest.raises(CheckpointError, match="the length and the height of its steps are missing"):
        other.resumed(saved, use_checkpoint=True)
    assert whole.schedules.resumed(other.to_dict(0), use_checkpoint=True)[0] == other


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            "--lr-range-test-min-lr 1e-5",
            "--lr-range-test-min-lr 1e-05 requires --lr-decay-style range-test",
        ),
        (
            f"{_TEST} --decoupled-lr 1e-3",
            "--lr-decay-style range-test cannot be combined with --decoupled-lr 0.001: it tries a",
        ),
        (
            f"{_TEST} --save x --save-interval 5 --ckpt-format legacy",
            "--lr-decay-style range-test cannot be combined with --ckpt-format legacy: Megatron-LM",
        ),
    ],
)
def test_mistakes(words: str, line: str) -> None:
    (said,) = problems(words)
    assert said.startswith(line)


def test_other_flags_of_the_rate_have_no_effect() -> None:
    (notice,) = parse(_TEST, "--lr-warmup-iters 5 --lr-decay-samples 10").notices
    assert notice == (
        "--lr 0.001, --lr-warmup-iters 5, --lr-decay-samples 10: no effect with --lr-decay-style "
        "range-test"
    )
