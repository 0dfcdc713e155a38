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
    ],
)
def test_flags_of_a_long_run_do_not_stand_in_the_way(words: str, tmp_path: Path) -> None:
    options = build_parser().read(["--output", "x", "--", *command(words)])
    config = parse_config(command_of(options, tmp_path / "metrics"), world_size=1).config
    training = config.training
    assert (training.train_iters, training.rampup_batch_size) == (120, None)
    assert not training.iterations_to_skip
    assert (config.checkpoint.load is not None) == ("--finetune" in words)
    assert (config.checkpoint.ckpt_step is not None) == ("--finetune" in words)


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
