r"""Find a learning rate: train briefly at increasing rates, and see when the loss rises again.

    python tools/find_lr.py --output runs/rates -- pretrain_gpt.py --config examples/gpt_tiny.yaml
    python tools/find_lr.py --output runs/rates -- torchrun --nproc-per-node 8 pretrain_gpt.py ...

The arguments after `--` form a training command with its flags. It starts from random weights
(finetuning starts from the weights in --load) and saves nothing. The folder receives rates.json,
rates.png and the run's metrics.jsonl.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Sequence, Set
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron.config.arguments import ToolParser
from megatron.config.parser import asks_for
from megatron.durable import PLOT_SUFFIXES, expect_no_file, replace_file, writing_to
from megatron.errors import ConfigError, DataError

_MIN_ITERATIONS = 30  # fewer points do not distinguish a trend from noise
_NOISE_FACTOR = 4.0  # a fall or rise counts if it is this many times the noise of a smoothed value
_RISE = 0.1  # the loss counts as rising above its minimum plus this fraction of its fall
_SAFETY_FACTOR = 10.0  # a long run uses the rate with the lowest loss, divided by this


@dataclass(frozen=True)
class RateCurve:
    """The loss as a function of the learning rate, from a learning rate range test.

    Attributes:
        rates: The learning rate of each update.
        losses: The loss of the next batch, after that update; NaN or infinite after divergence.
    """

    rates: list[float]
    losses: list[float]


@dataclass(frozen=True)
class RangeTestResult:
    """The result of a learning rate range test.

    Attributes:
        suggestion: The peak learning rate to use, or `None` if the curve does not show one.
        reason: The reason for this suggestion, or for the lack of one.
        lowest: The rate with the lowest smoothed loss, or `None` if the loss does not fall or
            diverges too early.
        rising: The first rate at which the loss has clearly risen again or is not finite, or `None`
            if there is no such rate or `lowest` is `None`.
        smoothed: The smoothed losses, up to the first loss that is not finite. If the loss diverges
            too early, these are the losses themselves.
    """

    suggestion: float | None
    reason: str
    lowest: float | None
    rising: float | None
    smoothed: list[float]


def build_parser() -> ToolParser:
    """Build the command-line parser."""
    parser = ToolParser("find_lr.py", __doc__)
    add = parser.add_argument
    add("--output", type=Path, required=True, help="Folder for the results.")
    add("--overwrite", action="store_true", help="Replace the results of an earlier test.")
    add("--min-lr", type=float, default=1e-6, help="First learning rate (default: %(default)g).")
    add("--max-lr", type=float, default=1.0, help="Last learning rate (default: %(default)g).")
    add("--iterations", type=int, default=120, help="Length of the test (default: %(default)s).")
    add("words", nargs="*", metavar="-- COMMAND", help="A command that trains, and its flags.")
    return parser


def run(options: argparse.Namespace) -> int:
    """Run the test, write its results and print the conclusion.

    Returns:
        The exit code: 0 with a suggestion, 1 without one.

    Raises:
        ConfigError: A flag is out of range, the results exist and --overwrite is not given, or the
            command did not train to the end.
        DataError: The command did not write the losses.
        StorageError: --output cannot be written.
    """
    _check(options)
    folder: Path = options.output
    files = {name: folder / name for name in ("rates.json", "rates.png", "metrics.jsonl")}
    expect_no_file("--output", files.values(), overwrite=options.overwrite)
    with writing_to("--output", folder):
        folder.mkdir(parents=True, exist_ok=True)
        files["metrics.jsonl"].unlink(missing_ok=True)
    command = test_command(options, files["metrics.jsonl"])
    try:
        code = subprocess.run(command, check=False).returncode
    except OSError as error:
        raise ConfigError(
            f"{command[0]}: the command cannot be run ({error.strerror}): correct it"
        ) from error
    if code:
        raise ConfigError(
            f"the command ended with exit code {code}: fix the problem that its last lines report "
            f"({' '.join(command[:4])} ...)"
        )
    curve = read_curve(files["metrics.jsonl"], options.min_lr, options.iterations)
    result = analyze_curve(curve)
    content = {"command": command, **asdict(curve), **asdict(result)}
    with writing_to("--output", folder):
        replace_file(files["rates.json"], json.dumps(content, indent=1).encode() + b"\n")
    draw(curve, result, files["rates.png"])
    suggestion = "no suggestion" if result.suggestion is None else f"--lr {result.suggestion:.1e}"
    print(f"{suggestion}: {result.reason}\nwrote {files['rates.png']} and {files['rates.json']}")
    return 0 if result.suggestion is not None else 1


def _check(options: argparse.Namespace) -> None:
    problems = []
    if not options.words:
        problems.append("the command is missing: give it after --, such as -- pretrain_gpt.py ...")
    if options.output.suffix.lower() in PLOT_SUFFIXES:
        problems.append(f"--output {options.output}: give a folder; rates.png is written to it")
    if not 0 < options.min_lr < options.max_lr < math.inf:
        problems.append(
            f"--min-lr {options.min_lr:g} and --max-lr {options.max_lr:g}: both must be above 0, "
            "and the second above the first"
        )
    if options.iterations < _MIN_ITERATIONS:
        problems.append(f"--iterations {options.iterations}: use at least {_MIN_ITERATIONS}")
    if problems:
        raise ConfigError(problems)


def test_command(options: argparse.Namespace, metrics: Path) -> list[str]:
    """Return the training command with the flags of the test appended.

    Flags that the test cannot override are removed.

    Args:
        options: The flags of this tool.
        metrics: The file to which the run writes its metrics.
    """
    argv = list(options.words)
    program = [sys.executable] if argv[0].endswith(".py") else []
    unset_flags: tuple[str, ...] = (
        *("--train-samples", "--train-tokens"),
        *("--lr-wsd-decay-iters", "--lr-wsd-decay-samples", "--decoupled-lr", "--decoupled-min-lr"),
        *("--exit-interval", "--exit-duration-in-mins", "--save-interval"),
        *("--save-retain-interval", "--save-interval-in-mins", "--non-persistent-save-interval"),
    )
    emptied_flags = ["--save", "--tensorboard-dir", "--step-batch-size-schedule"]
    emptied_flags += ["--wandb-project", "--wandb-exp-name", "--wandb-save-dir"]
    # Flags that no later flag turns off, and the opposites of the switches.
    removed_flags = {"--rampup-batch-size", "--iterations-to-skip", "--log-sample-ids"}
    removed_flags |= {"--no-check-for-nan-in-loss-and-grad", "--no-log-learnig-rate-to-tensorboard"}
    switches = ["--no-log-sample-ids", "--check-for-nan-in-loss-and-grad"]
    switches += ["--log-learning-rate-to-tensorboard", "--lr-range-test-exponential"]
    # The first argument of `megatron pretrain` may be a YAML file.
    is_pretraining, is_finetuning = (argv[:2] == ["megatron", x] for x in ("pretrain", "finetune"))
    training_flags = ["--config", *argv[2:]] if is_pretraining else argv
    starts_from_weights = is_finetuning or asks_for("checkpoint.finetune", training_flags)
    if not starts_from_weights:
        emptied_flags.append("--load")
        unset_flags += ("--ckpt-step",)
        removed_flags |= {"--exit-on-missing-checkpoint", "--no-initialization"}
        switches += ["--no-exit-on-missing-checkpoint", "--perform-initialization"]
    flags = {
        "--lr-decay-style": "range-test",
        "--lr-range-test-min-lr": repr(options.min_lr),
        "--lr-range-test-step-size": str(options.iterations - 1),
        "--lr-wsd-decay-style": "exponential",
        "--lr-range-test-step-rate": repr(options.max_lr / options.min_lr - 1),
        "--train-iters": str(options.iterations),
        "--eval-iters": "0",
        "--on-nonfinite": "skip",
        "--max-nonfinite-skips": str(options.iterations),
        "--on-spike": "none",
        "--tensorboard-log-interval": "1",
        "--metrics-jsonl": str(metrics),
    }
    return [
        *program,
        *_without(argv, removed_flags),
        *(word for name in unset_flags for word in (name, "none")),
        *(word for name in emptied_flags for word in (name, "")),
        *(word for pair in flags.items() for word in pair),
        *switches,
    ]


def _without(argv: Sequence[str], dropped: Set[str]) -> list[str]:
    """Return the arguments without these flags and their values."""
    remaining, keeps = [], True
    for word in argv:
        if word.startswith("--"):
            keeps = word.partition("=")[0] not in dropped
        if keeps:
            remaining.append(word)
    return remaining


def read_curve(metrics: Path, first_rate: float, iterations: int) -> RateCurve:
    """Return the loss after each update, from the file that --metrics-jsonl wrote.

    The rates are also read from the file, because an update that is skipped after an fp16 overflow
    does not raise the rate.

    Args:
        metrics: The file of JSON lines.
        first_rate: The learning rate of the first update.
        iterations: The number of iterations of the test.

    Raises:
        DataError: The file has no loss for an iteration.
    """
    losses: dict[int, float] = {}
    rates = {1: first_rate}
    if metrics.is_file():
        for line in metrics.read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            if "lm loss" in record:
                losses[record["iteration"]] = float(record["lm loss"])
                # The metrics of an iteration contain the rate of the next one.
                rates[record["iteration"] + 1] = float(record["learning-rate"])
    missing = [iteration for iteration in range(1, iterations + 1) if iteration not in losses]
    if missing:
        raise DataError(
            f"{metrics} has no lm loss for iteration {missing[0]}: the command must train a "
            "language model and use the flags that follow it"
        )
    # The loss of an iteration is computed before its update, so it shows the previous one's effect.
    updates = range(1, iterations)
    return RateCurve(
        [rates[update] for update in updates], [losses[update + 1] for update in updates]
    )


def analyze_curve(curve: RateCurve) -> RangeTestResult:
    """Suggest a learning rate from a curve, or say why none can be suggested.

    The losses are smoothed by a moving average. The loss must fall clearly, that is by four times
    the noise of the average, and rise again clearly or diverge before the end. The suggestion is a
    tenth of the rate with the lowest loss: a short test tolerates larger rates than a long run.
    """
    finite = next(
        (index for index, loss in enumerate(curve.losses) if not math.isfinite(loss)),
        len(curve.losses),
    )
    losses, rates = curve.losses[:finite], curve.rates
    half_width = max(2, len(curve.losses) // 30)
    if finite < 4 * half_width:
        return RangeTestResult(None, _DIVERGES.format(rates[0]), None, None, losses)
    windows = [losses[max(0, i - half_width) : i + half_width + 1] for i in range(finite)]
    smoothed = [sum(part) / len(part) for part in windows]
    differences = [b - a for a, b in zip(losses, losses[1:], strict=False)][: finite // 2]
    # Neighboring losses differ more by noise than by trend: half the mean square of their
    # differences is the variance of the noise.
    noise = math.sqrt(sum(d * d for d in differences) / (2 * len(differences)))
    # A value at either end is the average of only `half_width + 1` losses.
    threshold = _NOISE_FACTOR * noise / math.sqrt(half_width + 1)
    lowest = min(range(finite), key=smoothed.__getitem__)
    fall = smoothed[0] - smoothed[lowest]
    if fall <= threshold:
        return RangeTestResult(
            None, _NO_FALL.format(max(fall, 0.0), threshold), None, None, smoothed
        )
    risen_level = smoothed[lowest] + max(_RISE * fall, threshold)
    risen = [index for index in range(lowest, finite) if smoothed[index] > risen_level]
    if not risen and finite == len(curve.losses):
        return RangeTestResult(None, _NO_RISE.format(rates[-1]), rates[lowest], None, smoothed)
    rising = rates[risen[0] if risen else finite]
    reason = _FOUND.format(smoothed[0], smoothed[lowest], rates[lowest], rising)
    return RangeTestResult(rates[lowest] / _SAFETY_FACTOR, reason, rates[lowest], rising, smoothed)


_DIVERGES = "the loss diverges soon after the first rate {:.1e}: lower --min-lr"
_NO_FALL = (
    "the loss falls by {:.3g}, but only a fall of more than {:.3g} would stand out from its "
    "noise: give more --iterations, a larger batch, or a larger --max-lr"
)
_NO_RISE = "the loss does not rise again before the last rate {:.1e}: raise --max-lr"
_FOUND = (
    "the loss falls from {:.3f} to {:.3f} at the rate {:.1e}, and has risen at {:.1e}; a "
    "tenth of the rate with the lowest loss leaves room for a long run"
)


def draw(curve: RateCurve, result: RangeTestResult, output: Path) -> None:
    """Draw the curve with the rates that the analysis found, and save the image."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    count = len(result.smoothed)
    axes.plot(curve.rates[:count], curve.losses[:count], color="tab:blue", alpha=0.3, lw=1)
    axes.plot(curve.rates[:count], result.smoothed, color="tab:blue", label="loss, smoothed")
    for rate, color, text in (
        (result.suggestion, "tab:green", "suggestion"),
        (result.lowest, "dimgray", "lowest loss"),
        (result.rising, "tab:red", "loss has risen"),
    ):
        if rate is not None:
            axes.axvline(rate, color=color, linestyle="--", label=f"{text}: {rate:.1e}")
    low, high = min(result.smoothed, default=0.0), max(result.smoothed[:1], default=1.0)
    axes.set_ylim(low - 0.15 * (high - low) - 0.01, high + 0.5 * (high - low) + 0.01)
    axes.set(
        xscale="log",
        xlim=(curve.rates[0], curve.rates[-1]),
        xlabel="Learning rate",
        ylabel="Loss after the update",
    )
    axes.set_title("Learning rate range test")
    axes.grid(alpha=0.3)
    axes.legend()
    with writing_to("--output", output):
        figure.savefig(output)
