"""Draw a loss curve from the file that `--metrics-jsonl` writes.

    python tools/plot_loss.py --metrics runs/demo/metrics.jsonl --output runs/demo/loss.png

Needs no display.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron.command import run_command
from megatron.config.arguments import ToolParser
from megatron.errors import DataError

Points = list[tuple[int, float]]  # (iteration, loss in nats per token)


def read_metrics(path: Path) -> tuple[Points, Points]:
    """Training and validation loss by iteration.

    A resumed run appends: of two records of one iteration, the later one counts.

    Raises:
        DataError: the file is missing, not JSON lines, or has no training loss.
    """
    if not path.is_file():
        raise DataError(f"--metrics {path}: no such file; pretrain with --metrics-jsonl {path}")
    training: dict[int, float] = {}
    validation: dict[int, float] = {}
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                record = json.loads(line)
                iteration = int(record["iteration"])
            except (ValueError, KeyError, TypeError):
                raise DataError(f"{path}:{number}: not a metrics record: {line[:80]!r}") from None
            if "lm loss" in record:
                training[iteration] = float(record["lm loss"])
            if "lm loss validation" in record:
                validation[iteration] = float(record["lm loss validation"])
    if not training:
        raise DataError(f"{path}: no record holds a training loss ('lm loss')")
    return sorted(training.items()), sorted(validation.items())


def smoothed(points: Points, weight: float = 0.9) -> Points:
    """Exponential moving average, corrected for its start at zero."""
    average, total, result = 0.0, 0.0, []
    for iteration, value in points:
        average = weight * average + (1 - weight) * value
        total = weight * total + (1 - weight)
        result.append((iteration, average / total))
    return result


def draw(
    training: Points, validation: Points, output: Path, *, title: str, entropy: float | None
) -> None:
    """Write a PNG of the curves; `entropy` (nats per token) becomes a dashed line."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(*zip(*training, strict=True), color="tab:blue", alpha=0.25, linewidth=0.8)
    axes.plot(*zip(*smoothed(training), strict=True), color="tab:blue", label="training")
    if validation:
        last = validation[-1][1]
        label = f"validation (last {last:.3f})"
        axes.plot(*zip(*validation, strict=True), "o-", color="tab:orange", label=label)
    if entropy is not None:
        label = f"unigram entropy {entropy:.3f}"
        axes.axhline(entropy, color="tab:gray", linestyle="--", label=label)
    axes.set(xlabel="iteration", ylabel="loss (nats per token)", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = ToolParser("plot_loss.py", "Draw a loss curve from a metrics file.")
    parser.add_argument(
        "--metrics", type=Path, required=True, help="file that --metrics-jsonl wrote"
    )
    parser.add_argument("--output", type=Path, required=True, help="PNG file to write")
    parser.add_argument("--title", default="Pretraining loss", help="title (default: %(default)s)")
    parser.add_argument(
        "--entropy", type=float, help="draw this loss as a dashed line (nats per token)"
    )
    return parser.read(arguments)


def run(options: argparse.Namespace) -> None:
    training, validation = read_metrics(options.metrics)
    draw(training, validation, options.output, title=options.title, entropy=options.entropy)
    print(f"wrote {options.output}")


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    return run_command(lambda: run(options))


if __name__ == "__main__":
    sys.exit(main())
