"""Learning-rate and weight-decay schedules against hand-computed values and the golden run."""

import json
from dataclasses import replace
from math import cos, pi, sqrt

import pytest

from megatron.config.optimizer import OptimizerConfig, ScheduleConfig
from megatron.config.training import TrainingConfig
from megatron.errors import CheckpointError
from megatron.optimizer.schedule import LearningRateSchedule, Schedules, WeightDecaySchedule


def _schedules(schedule=None, optimizer=None, training=None, global_batch=10):
    return Schedules.from_config(
        ScheduleConfig(**{"lr": 1.0, **(schedule or {})}),
        OptimizerConfig(**(optimizer or {})),
        TrainingConfig(
            micro_batch_size=1, global_batch_size=1, **(training or {"train_iters": 100})
        ),
        global_batch=global_batch,
        seq_length=16,
    )


@pytest.mark.parametrize(
    ("style", "samples", "expected"),
    [
        ("linear", 0, 0.1),
        ("linear", 100, 0.55),
        ("linear", 200, 1.0),
        ("linear", 400, 0.2 + 0.8 * 0.75),
        ("linear", 1000, 0.2),
        ("linear", 5000, 0.2),
        ("cosine", 400, 0.2 + 0.8 * 0.5 * (cos(pi / 4) + 1)),
        ("cosine", 600, 0.6),
        ("constant", 50, 0.325),
        ("constant", 5000, 1.0),
        ("inverse-square-root", 200, 1.0),
        ("inverse-square-root", 800, 0.5),
        ("inverse-square-root", 1000, sqrt(0.2)),
        ("inverse-square-root", 1001, 0.2),
    ],
)
def test_learning_rate(style, samples, expected):
    schedule = LearningRateSchedule(
        peak=1.0, minimum=0.2, initial=0.1, warmup=200, decay=1000, style=style
    )
    assert schedule.at(samples) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("style", "half", "near"),
    [
        ("linear", 0.5, 0.01),
        ("cosine", 0.5, 0.5 * (cos(0.99 * pi) + 1)),
        ("exponential", 2 * sqrt(0.5) - 1, 2 * 0.5**0.99 - 1),
        ("minus_sqrt", 1 - sqrt(0.5), 1 - sqrt(0.99)),
    ],
)
def test_wsd_warms_up_stays_and_decays(style, half, near):
    rate = LearningRateSchedule(1.0, 0.2, 0.0, 200, 1000, "WSD", anneal=100, anneal_style=style)
    heights = [(rate.at(samples) - 0.2) / 0.8 for samples in (200, 201, 900, 950, 999, 1000, 2000)]
    assert rate.at(100) == 0.5
    assert heights == pytest.approx([1, 1, 1, half, near, 0, 0])


def test_wsd_is_saved_and_continued():
    flags = {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 20, "lr_wsd_decay_style": "minus_sqrt"}
    ours = _schedules(flags)
    assert (ours.learning_rate.anneal, ours.learning_rate.anneal_style) == (200, "minus_sqrt")
    saved = json.loads(json.dumps(ours.to_dict(360)))
    assert ours.resumed(saved) == (ours, 360)
    assert _schedules().resumed(saved, use_checkpoint=True) == (ours, 360)
    with pytest.raises(CheckpointError, match="the decay at the end .* is 300 here and 200 in the"):
        _schedules(flags | {"lr_wsd_decay_iters": 30}).resumed(saved)
    other = _schedules().to_dict(360)
    assert not {"wsd_decay_steps", "lr_wsd_decay_style"} & set(other)
    taken, _ = ours.resumed(other, use_checkpoint=True)
    assert taken == _schedules()  # a run without WSD flags must equal its own checkpoint
    assert taken.to_dict(360) == other
    for key in ("wsd_decay_steps", "lr_wsd_decay_style"):  # Megatron saves neither
        del saved[key]
    assert ours.resumed(saved) == (ours, 360)
    with pytest.raises(
        CheckpointError, match="give --lr-decay-style WSD with --lr-wsd-decay-iters"
    ):
        _schedules().resumed(saved, use_checkpoint=True)


def test_without_warmup_the_first_update_has_the_peak():
    for style in ("linear", "cosine", "constant", "inverse-square-root"):
        assert LearningRateSchedule(1.0, 0.0, 0.0, 0, 100, style).at(0) == 1.0
    assert LearningRateSchedule(1.0, 0.3, 0.0, 0, 100, "inverse-square-root").at(16) == 0.3


def test_a_warmup_may_be_shorter_than_a_sample_or_as_long_as_the_run():
    assert LearningRateSchedule(1.0, 0.0, 0.25, 0.5, 100, "linear").at(0) == 0.25
    rate = LearningRateSchedule(1.0, 0.5, 0.0, 100, 100, "linear")
    assert [rate.at(samples) for samples in (50, 100, 101)] == [0.5, 1.0, 0.5]


def test_a_branch_begins_its_decay_in_the_stable_phase():
    stable = {"lr_decay_style": "WSD", "lr_warmup_iters": 10, "decoupled_lr": 0.5}
    trunk = _schedules({**stable, "lr_wsd_decay_iters": 20, "min_lr": 0.1})
    own = {"min_lr": 0.3, "decoupled_min_lr": 0.4, "lr_wsd_decay_style": "linear"}
    flags = {**stable, **own, "lr_wsd_decay_iters": 5}
    branch = _schedules(flags, training={"train_iters": 90})
    for samples in (100, 800):
        made, position = branch.branched(trunk.to_dict(samples))
        rate = LearningRateSchedule(
            1.0, 0.3, 0.0, 100, samples + 50, "WSD", anneal=50, anneal_style="linear"
        )
        assert (position, made.learning_rate) == (samples, rate)
        assert made.decoupled == replace(rate, peak=0.5, minimum=0.4)
        assert made.weight_decay == trunk.weight_decay
        assert branch.resumed_branch(made.to_dict(samples + 10)) == (made, samples + 10)
    longer = _schedules({**flags, "lr_wsd_decay_iters": 6})
    with pytest.raises(CheckpointError, match="the decay at the end .* is 60 here and 50 in the"):
        longer.resumed_branch(made.to_dict(810))
    with pytest.raises(CheckpointError, match="at sample 99, in the warm-up, which ends at 100:"):
        branch.branched(trunk.to_dict(99))
    with pytest.raises(CheckpointError, match="at sample 801, in the final decay, which began at"):
        branch.branched(trunk.to_dict(801))
    with pytest.raises(CheckpointError, match="give --decoupled-lr 0.5"):
        _schedules({**flags, "decoupled_lr": None}).branched(trunk.to_dict(100))
    plain = _schedules({**stable, "lr_wsd_decay_iters": 20, "decoupled_lr": None})
    with pytest.raises(CheckpointError, match="--decoupled-lr is 0.5 here and unset in the"):
        branch.branched(plain.to_dict(100))
    with pytest.raises(CheckpointError, match="--lr is 0.9 here and 1.0 in the"):
        _schedules({**flags, "lr": 0.9}).resumed_branch(made.to_dict(810))
    other = _schedules({**flags, "decoupled_lr": 0.6})
    with pytest.raises(CheckpointError, match="--decoupled-lr is 0.6 here and 0.5 in the"):
        other.branched(trunk.to_dict(100))


@pytest.mark.parametrize(
    ("style", "samples", "expected"),
    [
        ("constant", 0, 0.3),
        ("linear", 0, 0.1),
        ("linear", 25, 0.15),
        ("linear", 100, 0.3),
        ("linear", 101, 0.3),
        ("cosine", 0, 0.1),
        ("cosine", 50, 0.2),
        ("cosine", 25, 0.1 + 0.2 * 0.5 * (cos(0.75 * pi) + 1)),
    ],
)
def test_weight_decay(style, samples, expected):
    assert WeightDecaySchedule(0.1, 0.3, 100, style).at(samples) == pytest.approx(expected)


def test_lengths_in_iterations_samples_and_fractions():
    rate = _schedules({"lr_warmup_iters": 7, "lr_decay_iters": 50}).learning_rate
    assert (rate.warmup, rate.decay) == (70, 500)
    rate = _schedules({"lr_warmup_fraction": 0.015}).learning_rate
    assert (rate.warmup, rate.decay) == (15.0, 1000)
    sampled = _schedules(
        {"lr_warmup_samples": 33, "lr_decay_samples": 400}, training={"train_samples": 555}
    )
    assert (sampled.learning_rate.warmup, sampled.learning_rate.decay) == (33, 400)
    assert sampled.weight_decay.length == 555


def test_lengths_in_tokens():
    """A sample has 16 tokens, and a global batch 10 samples."""
    warmup = {"lr_warmup_tokens": 320}
    for training, tokens in (
        ({"train_iters": 100}, 16_000),
        ({"train_samples": 555}, 555 * 16),
        ({"train_tokens": 5000}, 5000),
    ):
        found = _schedules(warmup, training=training)
        rate = found.learning_rate
        assert (rate.warmup, rate.decay, found.weight_decay.length) == (320, tokens, tokens)
    both = _schedules(training={"train_samples": 555, "train_tokens": 5000})
    assert (both.learning_rate.decay, both.weight_decay.length) == (555, 555)
    test = _schedules({"lr_decay_style": "range-test"}, training={"train_tokens": 5001})
    assert test.weight_decay.length == 313  # samples, rounded up


def test_a_logarithmic_warmup_needs_the_length_of_an_update_in_samples_or_tokens():
    log = {"lr_warmup_style": "log"}
    assert _schedules(log).learning_rate.log_update is None  # there is no warm-up
    assert _schedules({**log, "lr_warmup_samples": 1}).learning_rate.log_update == 10
    assert _schedules({**log, "lr_warmup_tokens": 1}).learning_rate.log_update == 160


def test_a_logarithmic_warmup_of_one_or_two_updates():
    for updates in (1, 2):
        rate = LearningRateSchedule(1.0, 0.0, 0.25, 10 * updates, 100, "constant", log_update=10)
        assert [rate.at(samples) for samples in (0, 10, 20)] == [0.25, 1.0, 1.0]


def test_learning_rates_of_the_golden_run(golden):
    run = json.loads((golden / "gpt_fp32" / "run.json").read_text())
    args = run["args"]
    schedule = {name: args[name] for name in ScheduleConfig.__dataclass_fields__ if name in args}
    rate = _schedules(
        schedule,
        training={"train_iters": args["train_iters"]},
        global_batch=args["global_batch_size"],
    ).learning_rate
    assert len(run["train"]) == 40
    for line in run["train"]:  # it logs the next update's rate
        assert float(f"{rate.at(line['consumed samples']):.3E}") == line["learning rate"]


def test_resuming_with_equal_flags_continues():
    ours = _schedules({"lr_warmup_fraction": 0.1, "lr_decay_style": "cosine"})
    saved = json.loads(json.dumps(ours.to_dict(360)))
    assert ours.resumed(saved) == (ours, 360)
    assert saved["max_lr"] == 1.0
    assert saved["lr_decay_steps"] == 1000


def test_resuming_with_other_flags_needs_a_decision():
    saved = _schedules({"lr": 0.5, "lr_decay_style": "cosine"}).to_dict(360)
    ours = _schedules()
    with pytest.raises(CheckpointError) as error:
        ours.resumed(saved)
    message = str(error.value)
    assert message.splitlines()[1:-1] == [
        "  --lr is 1.0 here and 0.5 in the checkpoint",
        "  --lr-decay-style is linear here and cosine in the checkpoint",
    ]
    assert "add --override-opt_param-scheduler to continue with this run's values" in message
    assert "--use-checkpoint-opt_param-scheduler to continue with the checkpoint's" in message
    assert ours.resumed(saved, override=True) == (ours, 360)
    taken, samples = ours.resumed(saved, use_checkpoint=True)
    assert (taken.learning_rate.peak, taken.learning_rate.style, samples) == (0.5, "cosine", 360)


def test_lengths_that_differ_are_reported_by_the_flags_that_set_them():
    saved = _schedules().to_dict(10)
    longer = _schedules({"lr_warmup_iters": 5}, training={"train_iters": 200})
    with pytest.raises(CheckpointError) as error:
        longer.resumed(saved)
    warmup, decay = str(error.value).splitlines()[1:-1]
    assert warmup.startswith("  the warm-up (--lr-warmup-iters, ")
    assert warmup.endswith("in samples, is 50 here and 0 in the checkpoint")
    assert "--lr-decay-samples, by default --train-iters or --train-samples" in decay
    assert decay.endswith("in samples, is 2000 here and 1000 in the checkpoint")


def test_a_longer_run_with_fixed_decay_may_resume():
    """The length of a constant weight decay has no meaning, so it is not compared."""
    saved = _schedules({"lr_decay_iters": 80}).to_dict(10)
    longer = _schedules({"lr_decay_iters": 80}, training={"train_iters": 200})
    assert longer.resumed(saved)[0].learning_rate == longer.learning_rate
    ramp = {
        "weight_decay_incr_style": "linear",
        "start_weight_decay": 0.0,
        "end_weight_decay": 0.1,
    }
    saved = _schedules({"lr_decay_iters": 80}, ramp).to_dict(10)
    with pytest.raises(CheckpointError, match="weight decay follows, in samples, is 2000 here"):
        _schedules({"lr_decay_iters": 80}, ramp, {"train_iters": 200}).resumed(saved)


def test_names_before_2022_are_read():
    old = {
        "start_lr": 0.5,
        "warmup_iter": 0,
        "end_iter": 900,
        "decay_style": "cosine",
        "min_lr": 0.1,
        "num_iters": 30,
    }
    taken, samples = _schedules().resumed(old, use_checkpoint=True)
    expected = LearningRateSchedule(0.5, 0.1, 0.0, 0, 900, "cosine")
    assert (taken.learning_rate, samples) == (expected, 30)
    with pytest.raises(CheckpointError, match="num_steps.*--finetune"):
        _schedules().resumed({"max_lr": 1.0})


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("lr_decay_style", "polynomial", "one of constant, linear, cosine, inverse-square-root, W"),
        ("decay_style", "exponential", "one of constant, linear, cosine"),  # the key of 2019
        ("lr_wsd_decay_style", "quadratic", "one of exponential, linear, cosine, minus_sqrt:"),
        ("wd_incr_style", "exponential", "one of constant, linear, cosine:"),
        ("wd_incr_style", None, "one of constant"),
        ("lr_decay_steps", "1000", "a number:"),
        ("lr_in_tokens", 1, "true:"),
        ("min_lr", float("nan"), "a number:"),
    ],
)
def test_a_saved_value_of_no_schedule_is_refused(key, value, expected):
    """Such values must not raise a KeyError or be taken for another style."""
    flags = {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 20}
    ours = _schedules(flags)
    saved = ours.to_dict(360)
    if key == "decay_style":
        del saved["lr_decay_style"]
    saved[key] = value
    for use_checkpoint in (True, False):
        with pytest.raises(CheckpointError) as error:
            ours.resumed(saved, use_checkpoint=use_checkpoint)
        message = str(error.value)
        assert f"opt_param_scheduler has {key} {value!r} instead of {expected}" in message
        assert message.endswith(
            "add --override-opt_param-scheduler to continue with this run's values"
        )
    assert ours.resumed(saved, override=True) == (ours, 360)
    with pytest.raises(CheckpointError, match="has num_steps 'many', which is not a number: use"):
        ours.resumed(saved | {"num_steps": "many"}, override=True)


def test_one_saved_value_of_a_decoupled_rate_is_read_as_its_flag():
    """Other programs may write one: a lone peak takes its minimum from --min-lr, a lone minimum
    is ignored."""
    ours = _schedules({"min_lr": 0.1, "decoupled_lr": 0.5})
    saved = ours.to_dict(30)
    del saved["decoupled_min_lr"]
    assert ours.resumed(saved) == (ours, 30)
    other = _schedules({"min_lr": 0.2, "decoupled_lr": 0.7})
    taken = other.resumed(saved, use_checkpoint=True)[0]
    assert taken == ours
    assert taken.decoupled_at(1000) == 0.1
    saved["decoupled_min_lr"] = 0.05
    del saved["decoupled_lr"]
    assert _schedules({"min_lr": 0.1}).resumed(saved)[0].decoupled_at(0) is None


def test_only_evaluating_needs_neither_length_nor_learning_rate():
    training = {"train_iters": 0, "skip_train": True}
    unused = _schedules({"lr": None}, training=training).learning_rate
    assert unused == LearningRateSchedule(0.0, 0.0, 0.0, 0, 0, "linear")
    assert unused.at(0) == 0.0
    for schedule in ({}, {"lr_warmup_iters": 9}, {"lr_warmup_fraction": 0.1}):
        rate = _schedules({"min_lr": 0.5, **schedule}, training=training).learning_rate
        assert 0.0 <= rate.at(0) <= 1.0
        assert rate.at(1000) == 0.5


def test_a_resolved_constant_weight_decay_has_equal_ends():
    ends = {"weight_decay": 0.1, "start_weight_decay": 0.1, "end_weight_decay": 0.1}
    assert _schedules(optimizer=ends).weight_decay.at(500) == 0.1
    assert _schedules(optimizer={"weight_decay": 0.1}).weight_decay.start == 0.1
