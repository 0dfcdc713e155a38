"""Draw a loss curve from the file that `--metrics-jsonl` writes.

    python tools/plot_loss.py --metrics runs/demo/metrics.jsonl --output runs/demo/loss.png
    python tools/plot_loss.py --metrics runs/grpo/metrics.jsonl --curve reward --output reward.png
    python tools/plot_loss.py --compare GPT=gpt.jsonl Retro=retro.jsonl --output loss.png

No display is needed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.command import tool_main
from megatron.config.arguments import ToolParser
from megatron.durable import expect_no_file, plot_name_problems, writing_to
from megatron.errors import ConfigError, DataError
from megatron.report.history import MALFORMED, History, split_held_out

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Points = list[tuple[int, float]]  # (iteration, loss in nats per token)
LOSS = "lm loss"
_LOSS_UNIT = "Loss (nats per token)"


def read_curves(path: Path, flag: str) -> dict[str, Points]:
    """Return the curves of a metrics file by name.

    A resumed run appends to the file, and its values replace earlier ones for the same iterations.
    A last line that is still being written is skipped.

    Raises:
        DataError: The file is missing or is not JSON lines.
    """
    if path.is_dir():
        raise DataError(
            f"{flag} {path}: a folder: name the file in it that --metrics-jsonl wrote, such as "
            f"{path / 'metrics.jsonl'}"
        )
    if not path.is_file():
        raise DataError(
            f"{flag} {path}: no such file; train with --metrics-jsonl {path} to write it"
        )
    history = History(path.name)
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.endswith(b"\n"):
                break
            try:
                history.add(json.loads(line))
            except MALFORMED:
                text = line[:80].decode("utf-8", "replace")
                raise DataError(f"{path}:{number}: not a metrics record: {text!r}") from None
    return {
        name: list(zip(curve.iterations, curve.values, strict=True))
        for name, curve in history.curves.items()
    }


def read_metrics(path: Path, name: str = LOSS) -> tuple[Points, dict[str, Points]]:
    """Return the training values of a logged quantity, and its validation values by label.

    The label is "validation", with --multiple-validation-sets "validation-wiki" for the set "wiki".

    Args:
        path: The file.
        name: The name of the quantity in the log.

    Raises:
        DataError: The file is missing, is not JSON lines, or does not have the quantity.
    """
    curves = read_curves(path, "--metrics")
    if not curves:
        raise DataError(f"{path}: no record of an iteration yet: try again after the first one")
    if not curves.get(name):
        description = "a training loss" if name == LOSS else "the curve"
        raise DataError(
            f"{path}: no record has {description} ({name!r}); it has {', '.join(sorted(curves))}"
        )
    held_out = {
        data: points
        for tag, points in curves.items()
        for quantity, data in [split_held_out(tag)]
        if quantity == name and data.startswith("validation") and points
    }
    return curves[name], held_out


def read_validation(path: Path, flag: str) -> dict[str, Points]:
    """Return the validation losses of a file by name, such as "lm loss".

    With --multiple-validation-sets, the name of the set follows, as in "lm loss wiki".

    Raises:
        DataError: The file is missing, is not JSON lines, or has no validation loss.
    """
    losses = {}
    for tag, points in read_curves(path, flag).items():
        name, data = split_held_out(tag)
        if name.startswith("lm loss") and data.startswith("validation"):
            losses[f"{name} {data.removeprefix('validation').removeprefix('-')}".rstrip()] = points
    if not losses:
        raise DataError(f"{path}: no record has a validation loss ('lm loss validation')")
    return losses


def smoothed(points: Points) -> Points:
    """Smooth a curve without lag by fitting a straight line around each point.

    Each value is on the least-squares line through the neighboring points, about 7% of all points
    and fewer at the ends. A running average would lie above a steadily falling curve.
    """
    import numpy as np

    x, y = np.array(points, float).T
    half_width = max(1, round(len(points) / 30))
    result = []
    for i, (iteration, _) in enumerate(points):
        window = slice(max(0, i - half_width), i + half_width + 1)
        offset = x[window] - x[window].mean()
        slope = offset @ y[window] / max(offset @ offset, 1e-12)
        result.append((iteration, float(y[window].mean() + slope * (x[i] - x[window].mean()))))
    return result


@contextmanager
def _figure(output: Path, *, title: str, unit: str, dpi: int) -> Iterator[Axes]:
    """Yield axes for curves over iterations, and write the image afterwards."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    with rc_context({"font.size": 13, "axes.titlesize": 15, "lines.linewidth": 2}):
        figure = Figure(figsize=(8, 5), dpi=dpi, layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        yield axes
        axes.set(xlabel="Iteration", ylabel=unit, title=title)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
        axes.legend()
        with writing_to("--output", output):
            output.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(output)


def draw(
    training: Points,
    validation: Mapping[str, Points],
    output: Path,
    *,
    title: str,
    entropy: float | None,
    unit: str = _LOSS_UNIT,
) -> None:
    """Draw training and validation curves to an image file.

    Args:
        training: The values of the training curve.
        validation: The values of each validation curve, by label.
        output: The image file.
        title: The title of the figure.
        entropy: The unigram entropy in nats per token, drawn as a dashed line, or `None`.
        unit: The label of the vertical axis.
    """
    from matplotlib.colors import TABLEAU_COLORS

    _, *colors = TABLEAU_COLORS  # the first one is that of the training curve
    with _figure(output, title=title, unit=unit, dpi=200) as axes:
        label = "training, each logged value"
        axes.plot(*zip(*training, strict=True), color="tab:blue", alpha=0.3, lw=1, label=label)
        label = "training, smoothed"
        axes.plot(*zip(*smoothed(training), strict=True), color="tab:blue", label=label)
        for (name, points), color in zip(validation.items(), itertools.cycle(colors)):
            label = f"{name} (last: {points[-1][1]:.3f})"
            axes.plot(*zip(*points, strict=True), "o-", color=color, label=label)
        if entropy is not None:
            label = f"unigram entropy: {entropy:.3f}"
            axes.axhline(entropy, color="dimgray", linestyle="--", label=label)


def draw_comparison(curves: Mapping[str, Points], output: Path, *, title: str) -> None:
    """Draw the validation losses of several models, by label, to an image file."""
    with _figure(output, title=title, unit=_LOSS_UNIT, dpi=100) as axes:
        for label, points in curves.items():
            axes.plot(*zip(*points, strict=True), "o-", label=f"{label}: {points[-1][1]:.3f}")


def read_compared(args: Sequence[str]) -> dict[str, Points]:
    """Return the validation losses in files given as LABEL=FILE, by label.

    Raises:
        ConfigError: An argument is not of the form LABEL=FILE, or two have the same label.
        DataError: A file cannot be read, or has no validation loss.
    """
    losses: dict[str, Points] = {}
    labels = set()
    for arg in args:
        label, equals, file = arg.partition("=")
        if not (label and equals and file):
            raise ConfigError(f"--compare {arg}: expected LABEL=FILE, such as GPT=metrics.jsonl")
        if label in labels:
            raise ConfigError(
                f"--compare {arg}: the label {label} is taken: give each file its own"
            )
        labels.add(label)
        for name, points in read_validation(Path(file), "--compare").items():
            losses[name.replace("lm loss", label, 1)] = points
    return losses


def build_parser() -> ToolParser:
    """Build the command-line parser."""
    parser = ToolParser("plot_loss.py", "Draw a loss curve from a metrics file.")
    add = parser.add_argument
    add("--metrics", type=Path, help="File that --metrics-jsonl wrote.")
    add(
        "--compare",
        nargs="+",
        metavar="LABEL=FILE",
        help="Draw the validation losses of several such files instead.",
    )
    add(
        "--output", type=Path, required=True, help="Picture to write, such as loss.png or loss.pdf."
    )
    add("--overwrite", action="store_true", help="Replace an existing picture.")
    add("--curve", help='Draw this logged quantity instead of the loss, for example "reward".')
    add("--title", help="Title (default: Pretraining loss, or the name of the curve).")
    add("--entropy", type=float, help="Draw this loss as a dashed line, in nats per token.")
    return parser


def run(options: argparse.Namespace) -> None:
    """Read the metrics and write the picture.

    Raises:
        ConfigError: The picture exists, its name has an unknown extension, or flags are invalid or
            exclude each other.
        DataError: A metrics file cannot be read or lacks the curve.
        StorageError: The picture cannot be written.
    """
    if (options.metrics is None) == (options.compare is None):
        raise ConfigError(
            "give the file of one run with --metrics, or the files of several with --compare"
        )
    if options.compare and options.curve:
        raise ConfigError("--curve works only with --metrics: drop --compare")
    if options.entropy is not None:
        if not 0 <= options.entropy < math.inf:  # also refuses NaN
            raise ConfigError(f"--entropy {options.entropy}: give at least 0, in nats per token")
        if options.compare or options.curve:
            raise ConfigError(
                "--entropy is drawn only with the loss of --metrics: drop it, or --compare and "
                "--curve"
            )
    if problems := plot_name_problems("--output", options.output):
        raise ConfigError(problems)
    expect_no_file("--output", [options.output], overwrite=options.overwrite)
    title, curve, output = options.title, options.curve, options.output
    if title is None:
        title = "Pretraining loss" if curve is None else curve.capitalize()
    if options.compare:
        draw_comparison(read_compared(options.compare), output, title=title)
    elif curve is not None:
        curves = read_metrics(options.metrics, curve)
        draw(*curves, output, title=title, entropy=None, unit=curve.capitalize())
    else:
        draw(*read_metrics(options.metrics), output, title=title, entropy=options.entropy)
    print(f"wrote {options.output}")


main = tool_main(build_parser, run)
