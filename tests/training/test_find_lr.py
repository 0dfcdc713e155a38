"""Finding a learning rate: what curves show, and a test of the real command."""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron.config.parser import parse_config
from megatron.device import gpu_count
from megatron.errors import ConfigError, DataError
from megatron.optimizer.schedule import Schedules
from megatron.training.find_lr import (
    RateCurve,
    analyze_curve,
    build_parser,
    draw,
    read_curve,
    run,
)
from megatron.training.find_lr import (
    test_command as command_of,
)
from tests.config.command import command
from tests.launch import run_command
from tests.repository import ROOT

_RATES = [10 ** (-6 + 6 * step / 119) for step in range(120)]
_TOY = """pretrain_gpt.py --num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 16
    --micro-batch-size 4 --mock-data --tokenizer-type NullTokenizer --vocab-size 60 --num-workers 0
    --lr 1e-3 --train-samples 64 --lr-warmup-samples 8 --lr-decay-samples 32 --save /nowhere
    --save-interval 1""".split()


def _curve(loss: Callable[[float], float], noise: float = 0.02, seed: int = 0) -> RateCurve:
    """Return a noisy loss curve, given the loss by the rate's base-10 logarithm."""
    draws = random.Random(seed)
    return RateCurve(_RATES, [loss(math.log10(rate)) + draws.gauss(0, noise) for rate in _RATES])


def _learns(power: float) -> float:
    return 6.0 - 3.0 / (1.0 + math.exp(-4 * (power + 3.0))) + max(0.0, power + 1.5) * 8


def test_a_tenth_of_the_rate_with_the_lowest_loss() -> None:
    finding = analyze_curve(_curve(_learns))
    assert finding.lowest is not None
    assert finding.rising is not None
    # The loss rises from 10 ** -1.5 on, and the average looks 4 points (0.2) ahead.
    assert 10**-2.0 < finding.lowest < 10**-1.5
    assert finding.lowest < finding.rising < 10**-1.3
    assert finding.suggestion == pytest.approx(finding.lowest / 10)
    assert finding.reason.startswith("the loss falls from 5.99")


def test_noise_does_not_move_the_suggestion_far() -> None:
    calm, loud = (analyze_curve(_curve(_learns, noise)).suggestion for noise in (0.0, 0.3))
    assert calm is not None
    assert loud is not None
    assert calm / 3 < loud < calm * 3


def test_a_curve_that_ends_in_nan_has_risen_there() -> None:
    curve = _curve(lambda power: 4.0 - 0.5 * max(0.0, power + 4))
    curve.losses[90:] = [math.nan] * 30
    finding = analyze_curve(curve)
    assert finding.rising == _RATES[90]
    assert finding.suggestion == pytest.approx(_RATES[89] / 10, rel=0.5)
    assert len(finding.smoothed) == 90


@pytest.mark.parametrize(
    ("curve", "reason"),
    [
        *[(_curve(lambda power: 6.0, seed=seed), "the loss falls by 0") for seed in range(20)],
        (_curve(lambda power: 6.0), "the loss falls by 0"),
        (_curve(lambda power: 6.0 + power), "the loss falls by 0"),
        (_curve(lambda power: 6.0 - 0.1 * (power > -3), noise=0.5), "the loss falls by 0."),
        (
            _curve(lambda power: 6.0 - 0.5 * power),
            "the loss does not rise again before the last rate 1.0e+00",
        ),
        (
            RateCurve(_RATES, [5.0, 5.0, *[math.inf] * 118]),
            "the loss diverges soon",
        ),
    ],
)
def test_nothing_is_suggested_where_nothing_is_seen(curve: RateCurve, reason: str) -> None:
    finding = analyze_curve(curve)
    assert finding.suggestion is None
    assert finding.reason.startswith(reason)


def _zigzag(loss: Callable[[int], float], finite: int = 90) -> RateCurve:
    """Return 90 losses, each 0.03 above or below the given value, and NaN from `finite` on."""
    losses = [loss(i) + 0.03 * (-1) ** i if i < finite else math.nan for i in range(90)]
    return RateCurve([10 ** (-5 + i / 20) for i in range(90)], losses)


def _valley(i: int) -> float:
    return 6.0 - 0.05 * i if i <= 40 else 4.0 + 0.1 * max(0, i - 60)


def test_a_curve_is_smoothed_over_seven_losses() -> None:
    curve = _zigzag(_valley)
    finding = analyze_curve(curve)
    assert finding.smoothed[:2] == pytest.approx([sum(curve.losses[:n]) / n for n in (4, 5)])
    assert finding.smoothed[50:52] == pytest.approx([4.0 - 0.03 / 7, 4.0 + 0.03 / 7])
    assert finding.smoothed[-1] == pytest.approx(sum(curve.losses[-4:]) / 4)
    assert (finding.lowest, finding.rising) == (curve.rates[44], curve.rates[62])
    assert finding.suggestion == curve.rates[44] / 10
    assert finding.reason == (
        "the loss falls from 5.925 to 3.996 at the rate 1.6e-03, and has risen at 1.3e-02; a tenth "
        "of the rate with the lowest loss leaves room for a long run"
    )


@pytest.mark.parametrize(("count", "half_width"), [(30, 2), (89, 2), (90, 3), (119, 3), (120, 4)])
def test_longer_curves_are_smoothed_more(count: int, half_width: int) -> None:
    losses = [6.0 - 0.03 * i + 0.2 * (i % 3) for i in range(count)]
    smoothed = analyze_curve(RateCurve(_RATES[:count], losses)).smoothed
    assert smoothed[0] == pytest.approx(sum(losses[: half_width + 1]) / (half_width + 1))
    middle = losses[10 - half_width : 11 + half_width]
    assert smoothed[10] == pytest.approx(sum(middle) / len(middle))


def test_what_stands_out_from_noise() -> None:
    """Differences of 0.06 are a noise of 0.06 / sqrt(2); a mean of 4 has half of it."""
    assert analyze_curve(_zigzag(lambda i: 6.0)).reason.startswith(
        "the loss falls by 0.006, but only a fall of more than 0.0849 would stand out"
    )
    assert analyze_curve(_zigzag(lambda i: 6.0 + 0.01 * i)).reason.startswith(
        "the loss falls by 0, but only a fall of more than 0.08"
    )
    for finite, is_found in ((11, False), (12, True)):  # four half windows of 3
        finding = analyze_curve(_zigzag(_valley, finite))
        assert (finding.lowest is not None) == is_found
        assert len(finding.smoothed) == finite
        assert is_found or finding.reason == (
            "the loss diverges soon after the first rate 1.0e-05: lower --min-lr"
        )


def test_a_picture_shows_the_losses_and_the_rates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib.figure import Figure

    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path: drawn.append(figure))
    curve = _zigzag(_valley, finite=80)
    finding = analyze_curve(curve)
    draw(curve, finding, tmp_path / "rates.png")
    (axes,) = drawn[0].axes
    raw, smoothed, *vertical = [list(line.get_xdata()) for line in axes.lines]
    assert raw == smoothed == curve.rates[:80]
    assert list(axes.lines[0].get_ydata()) == curve.losses[:80]
    assert list(axes.lines[1].get_ydata()) == finding.smoothed
    assert vertical == [[rate] * 2 for rate in (finding.suggestion, finding.lowest, finding.rising)]
    legend = axes.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == [
        "loss, smoothed",
        "suggestion: 1.6e-04",
        "lowest loss: 1.6e-03",
        "loss has risen: 1.3e-02",
    ]
    low, high = min(finding.smoothed), finding.smoothed[0]
    bottom, top = axes.get_ylim()
    assert bottom == pytest.approx(low - 0.15 * (high - low) - 0.01)
    assert top == pytest.approx(high + 0.5 * (high - low) + 0.01)
    assert (axes.get_xscale(), axes.get_xlim()) == ("log", (curve.rates[0], curve.rates[-1]))
    assert axes.get_title() == "Learning rate range test"
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("Learning rate", "Loss after the update")


def test_defaults_and_a_test_that_suggests_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--output", str(tmp_path / "deep" / "rates"), "--", "pretrain_gpt.py"]
    options = build_parser().read(words)
    values = (options.min_lr, options.max_lr, options.iterations, options.overwrite)
    assert values == (1e-6, 1.0, 120, False)
    started: list[list[str]] = []
    done = SimpleNamespace(returncode=0)
    forked = SimpleNamespace(run=lambda command, check: started.append(command) or done)
    monkeypatch.setattr("megatron.training.find_lr.subprocess", forked)
    flat = _zigzag(lambda i: 6.0)
    monkeypatch.setattr("megatron.training.find_lr.read_curve", lambda *_: flat)
    monkeypatch.setattr("megatron.training.find_lr.draw", lambda *_: None)
    assert run(options) == 1
    assert capsys.readouterr().out.startswith("no suggestion: the loss falls by 0.006, but only")
    assert started[0][:2] == [sys.executable, "pretrain_gpt.py"]
    result = json.loads((options.output / "rates.json").read_text())
    assert (result["command"], result["losses"]) == (started[0], flat.losses)
    with pytest.raises(ConfigError, match="--overwrite"):
        run(options)
    metrics = options.output / "metrics.jsonl"
    metrics.write_text("of an earlier test")
    options.overwrite = True
    assert run(options) == 1
    assert not metrics.exists()
    options.iterations = 30
    assert run(options) == 1
    options.min_lr = 0.0
    with pytest.raises(ConfigError, match="--min-lr 0 and --max-lr 1: both must be above 0"):
        run(options)


def test_a_picture_of_every_finding(tmp_path: Path) -> None:
    for number, loss in enumerate((_learns, lambda power: 6.0)):
        curve = _curve(loss)
        draw(curve, analyze_curve(curve), tmp_path / f"{number}.png")
    nothing = RateCurve(_RATES, [math.nan] * 120)
    draw(nothing, analyze_curve(nothing), tmp_path / "nothing.png")
    for path in tmp_path.iterdir():
        assert path.read_bytes().startswith(b"\x89PNG")


def test_the_rates_are_those_of_the_run(tmp_path: Path) -> None:
    words = ["--output", "x", "--min-lr", "1e-5", "--max-lr", "0.3", "--iterations", "40", "--"]
    options = build_parser().read([*words, *command("--lr-decay-style WSD --lr-wsd-decay-iters 3")])
    flags = command_of(options, tmp_path / "metrics")
    config = parse_config(flags, world_size=1).config
    schedule = Schedules.from_config(
        config.schedule, config.optimizer, config.training, global_batch=4, seq_length=128
    ).learning_rate
    assert config.training.train_iters == 40
    expected = [1e-5 * 3e4 ** (update / 39) for update in range(40)]
    assert [schedule.at(4 * update) for update in range(40)] == pytest.approx(expected)
    assert config.evaluation.eval_iters == 0
    assert "--load" in flags
    options.words += ["--finetune", "--load", "weights"]
    assert command_of(options, tmp_path).count("--load") == 1


@pytest.mark.parametrize(
    ("words", "finetunes"),
    [
        (["pretrain_gpt.py", "--config", "FILE"], True),
        (["torchrun", "--nproc-per-node", "2", "pretrain_gpt.py", "--config=FILE"], True),
        (["megatron", "pretrain", "FILE", "--lr", "1"], True),
        (["megatron", "finetune", "gpt-tiny", "--load", "weights"], True),
        (["pretrain_gpt.py", "--config", "FILE", "--no-finetune"], False),
        (["pretrain_gpt.py", "--config", "examples/gpt_tiny.yaml"], False),
        (["megatron", "pretrain", "gpt-tiny"], False),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_finetuning_begins_from_its_weights(
    words: list[str], finetunes: bool, tmp_path: Path
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("checkpoint: {finetune: true, load: weights}\n")
    words = [word.replace("FILE", str(file)) for word in words]
    options = build_parser().read(["--output", "x", "--", *words])
    made = command_of(options, tmp_path)
    assert (["--load", ""] in [made[i : i + 2] for i in range(len(made))]) != finetunes


def test_mistakes(tmp_path: Path) -> None:
    words = ["--output", str(tmp_path), "--min-lr", "1", "--max-lr", "1", "--iterations", "9"]
    with pytest.raises(ConfigError) as error:
        run(build_parser().read(words))
    assert [line.partition(":")[0] for line in error.value.problems] == [
        "the command is missing",
        "--min-lr 1 and --max-lr 1",
        "--iterations 9",
    ]
    with pytest.raises(ConfigError, match=r"--output rates\.png: give a folder"):
        run(build_parser().read(["--output", "rates.png", "--", "pretrain_gpt.py"]))
    (tmp_path / "metrics").write_text('{"iteration": 1, "lm loss": 3.0, "learning-rate": 1.0}\n')
    with pytest.raises(DataError, match="has no lm loss for iteration 2: the command must train"):
        read_curve(tmp_path / "metrics", 1.0, 2)


def test_an_update_that_is_skipped_does_not_raise_the_rate(tmp_path: Path) -> None:
    records = [
        {"iteration": number, "lm loss": 9.0 - number, "learning-rate": rate}
        for number, rate in enumerate((0.1, 0.2, 0.4, 0.4), start=1)
    ]
    (tmp_path / "metrics").write_text("".join(json.dumps(record) + "\n" for record in records))
    curve = read_curve(tmp_path / "metrics", 0.1, 4)
    assert curve == RateCurve([0.1, 0.1, 0.2], [7.0, 6.0, 5.0])


@pytest.mark.parametrize(
    "words",
    [
        "--rampup-batch-size 4 4 8 --global-batch-size 8 --train-samples 80",
        "--iterations-to-skip 1 2",
        "--train-tokens 9000 --lr-decay-tokens 800 --lr-warmup-tokens 10",
        "--save x --save-interval 5 --async-save --log-sample-ids",
        "--load x --ckpt-step 3 --exit-on-missing-checkpoint --no-load-optim",
        "--wandb-project x --wandb-exp-name y --wandb-save-dir z",
        "--tensorboard-dir x --tensorboard-queue-size 7",
        "--decoupled-lr 0.1 --decoupled-min-lr 0.01",
        "--load x --finetune --ckpt-step 3",
        "--load x --no-initialization",
        "--lr-decay-style WSD --lr-wsd-decay-style linear --lr-wsd-decay-iters 3",
        "--no-check-for-nan-in-loss-and-grad --no-log-learnig-rate-to-tensorboard",
    ],
)
def test_flags_of_a_long_run_do_not_stand_in_the_way(words: str, tmp_path: Path) -> None:
    options = build_parser().read(["--output", "x", "--", *command(words)])
    config = parse_config(command_of(options, tmp_path / "metrics"), world_size=1).config
    training = config.training
    assert (training.train_iters, training.rampup_batch_size) == (120, None)
    assert not training.iterations_to_skip
    assert training.check_for_nan_in_loss_and_grad
    assert config.logging.log_learning_rate_to_tensorboard  # `read_curve` needs it
    assert config.model.perform_initialization
    assert (config.checkpoint.load is not None) == ("--finetune" in words)
    assert (config.checkpoint.ckpt_step is not None) == ("--finetune" in words)


@pytest.mark.parametrize(
    "sections",
    [
        {
            "checkpoint": {
                "save": "x",
                "save_interval": 5,
                "non_persistent_save_interval": 2,
                "non_persistent_ckpt_type": "global",
            },
            "data": {"log_sample_ids": True},
        },
        {"checkpoint": {"load": "x", "exit_on_missing_checkpoint": True}},
        {"logging": {"wandb_project": "x", "wandb_name": "y", "wandb_save_dir": "z"}},
        {"logging": {"log_learning_rate_to_tensorboard": False}},
        {"schedule": {"lr_decay_style": "WSD", "lr_wsd_decay_style": "linear"}},
        {"training": {"step_batch_size_schedule": "0:4 512:8", "train_tokens": 9000}},
    ],
    ids=" ".join,
)
def test_neither_do_those_in_a_file(sections: dict[str, dict[str, object]], tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps(sections))  # JSON is YAML
    words = [*command("--global-batch-size 8"), "--config", str(file)]
    options = build_parser().read(["--output", "x", "--", *words])
    config = parse_config(command_of(options, tmp_path / "metrics"), world_size=1).config
    assert config.training.train_iters == 120
    assert config.checkpoint.save is None
    assert config.logging.log_learning_rate_to_tensorboard


@pytest.mark.parametrize("processes", [1, 2])
def test_a_command_is_tested(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    processes: int,
) -> None:
    if 0 < gpu_count() < processes:
        pytest.skip("each process needs its own GPU")
    monkeypatch.chdir(ROOT)
    launch = []
    if processes > 1:  # in forks
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        launch += ["--nproc-per-node", str(processes)]
        forked = SimpleNamespace(run=lambda words, check: run_command(words, os.environ))
        monkeypatch.setattr("megatron.training.find_lr.subprocess", forked)
    options = build_parser().read(
        ["--output", str(tmp_path), "--max-lr", "10", "--iterations", "45", "--", *launch, *_TOY]
    )
    assert run(options) == 0
    said = capfd.readouterr().out
    assert "--lr " in said.splitlines()[-2]
    result = json.loads((tmp_path / "rates.json").read_text())
    assert len(result["rates"]) == len(result["losses"]) == 44
    assert 1e-5 < result["suggestion"] < 1.0
    assert (tmp_path / "rates.png").stat().st_size > 10_000
    with pytest.raises(ConfigError, match="--overwrite"):
        run(options)


def test_a_command_that_does_not_exist_is_named(tmp_path: Path) -> None:
    options = build_parser().read(["--output", str(tmp_path), "--", "nosuchprogram", "x.py"])
    with pytest.raises(ConfigError, match=r"^nosuchprogram: the command cannot be run \(No such"):
        run(options)


def test_a_command_that_fails_says_so(tmp_path: Path) -> None:
    words = [sys.executable, "tools/find_lr.py", "--output", str(tmp_path), "--"]
    done = subprocess.run(
        [*words, *_TOY, "--hidden-size", "x"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == ConfigError.exit_code
    assert (
        "the command ended with exit code 9: fix the problem that its last lines report"
        in done.stderr
    )
