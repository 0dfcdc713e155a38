r"""Check that muP works: train a network at several widths, and compare how activations change.

    python tools/coordinate_check.py --widths 64 128 256 512 --output runs/coordinates -- \
        --num-layers 2 --seq-length 32 --micro-batch-size 4 --lr 3e-3 --use-mup

The arguments after `--` are flags of pretrain_gpt.py, except --hidden-size and
--num-attention-heads. With --use-mup, --mup-base-hidden-size defaults to the first width. Each
width trains for a few iterations on generated tokens, in this process, on the CPU. The table shows
how much each activation of a fixed batch has changed since the start. With muP the changes are
equally large at every width; without it they grow. The results are written to coordinates.json and
coordinates.png in the folder.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.command import tool_main
from megatron.config.arguments import ToolParser
from megatron.config.parser import parse_config
from megatron.durable import PLOT_SUFFIXES, expect_no_file, replace_file, writing_to
from megatron.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from megatron.config import RunConfig

Changes = dict[str, float]
_FLAT = 0.3  # a change that grows with at most this power of the width counts as independent of it
_OWN_FLAGS = ("--hidden-size", "--num-attention-heads", "--train-iters")
# The default flags of a run. Flags on the command line override them.
_START = """
    --mock-data --tokenizer-type NullTokenizer --vocab-size 256 --seq-length 32 --num-layers 2
    --micro-batch-size 4 --lr 3e-3 --lr-decay-style constant --clip-grad 0 --hidden-dropout 0
    --attention-dropout 0 --num-workers 0 --eval-iters 0 --no-exit-signal-handler
""".split()


def build_parser() -> ToolParser:
    """Build the command-line parser."""
    parser = ToolParser("coordinate_check.py", __doc__)
    add = parser.add_argument
    add(
        "--widths",
        type=int,
        nargs="+",
        required=True,
        help="Values of --hidden-size, in increasing order.",
    )
    add("--output", type=Path, required=True, help="Folder for the results.")
    add("--overwrite", action="store_true", help="Replace the results of an earlier check.")
    add("--steps", type=int, default=4, help="Iterations (default: %(default)s).")
    add("--seeds", type=int, default=2, help="Runs to average over (default: %(default)s).")
    text = "Head size, so that wider networks have more heads (default: %(default)s)."
    add("--head-size", type=int, default=16, help=text)
    add(
        "--heads",
        type=int,
        help="Number of heads instead of their size, so that wider networks have larger heads.",
    )
    add("run_flags", nargs="*", metavar="-- FLAGS", help="Flags of pretrain_gpt.py.")
    return parser


def run(options: argparse.Namespace) -> int:
    """Train a model of each width, write the results and print the conclusion.

    Returns:
        The exit code: 0 if the changes of all activations are independent of the width, otherwise
        1.

    Raises:
        UserError: A flag is wrong, results of an earlier check exist (without --overwrite), or the
            results cannot be written.
    """
    _check_options(options)
    folder: Path = options.output
    files = [folder / name for name in ("coordinates.json", "coordinates.png")]
    expect_no_file("--output", files, overwrite=options.overwrite)
    with writing_to("--output", folder):
        folder.mkdir(parents=True, exist_ok=True)
    changes_by_width: dict[int, Changes] = {}
    for width in options.widths:
        seeds = [
            changes_after(config_of(options, width, seed), options.steps)
            for seed in range(1, options.seeds + 1)
        ]
        changes_by_width[width] = {
            name: sum(s[name] for s in seeds) / len(seeds) for name in seeds[0]
        }
        print(f"width {width}: done", flush=True)
    powers = fit_powers(changes_by_width)
    print("\n".join(table_lines(changes_by_width, powers)))
    content = {"flags": options.run_flags, "changes": changes_by_width, "powers": powers}
    with writing_to("--output", folder):
        replace_file(files[0], json.dumps(content, indent=1).encode() + b"\n")
    draw(changes_by_width, files[1])
    print(f"wrote {files[1]} and {files[0]}")
    return int(any(abs(power) > _FLAT for power in powers.values()))


def _check_options(options: argparse.Namespace) -> None:
    problems = []
    widths = options.widths
    if len(widths) < 2 or sorted(set(widths)) != widths or widths[0] < 1:
        problems.append(
            f"--widths {' '.join(map(str, widths))}: give at least two, in increasing order"
        )
    divisor = options.head_size if options.heads is None else options.heads
    flag = "--head-size" if options.heads is None else "--heads"
    if divisor < 1:
        problems.append(f"{flag} {divisor}: must be at least 1")
    else:
        problems += [
            f"--widths {width}: not divisible by {flag} {divisor}"
            for width in widths
            if width % divisor
        ]
    for name in ("steps", "seeds"):
        if getattr(options, name) < 1:
            problems.append(f"--{name} {getattr(options, name)}: must be at least 1")
    for arg in options.run_flags:
        if arg.partition("=")[0] in _OWN_FLAGS:
            problems.append(f"{arg}: the check sets it: drop it")
    if options.output.suffix.lower() in PLOT_SUFFIXES:
        problems.append(
            f"--output {options.output}: give a folder; coordinates.png is written to it"
        )
    if problems:
        raise ConfigError(problems)


def config_of(options: argparse.Namespace, width: int, seed: int) -> RunConfig:
    """Return the configuration of a run with a given width.

    Args:
        options: The command line.
        width: The run's --hidden-size.
        seed: The run's --seed.
    """
    heads = width // options.head_size if options.heads is None else options.heads
    args = [*_START, "--seed", str(seed), *options.run_flags]
    if "--use-mup" in args and "--mup-base-hidden-size" not in args:
        args += ["--mup-base-hidden-size", str(options.widths[0])]
    args += ["--hidden-size", str(width), "--num-attention-heads", str(heads)]
    return parse_config([*args, "--train-iters", str(options.steps)], world_size=1).config


def changes_after(config: RunConfig, steps: int) -> Changes:
    """Train a network, and return the mean absolute change of each activation of a fixed batch.

    Args:
        config: The configuration of the run.
        steps: The number of iterations.
    """
    # Imported here because the parser does not need them.
    import torch

    from megatron.device import Device
    from megatron.parallel.layout import Layout
    from megatron.training.build import build_run
    from megatron.training.step import Updates
    from pretrain_gpt import GPTRecipe

    trained = build_run(config, GPTRecipe(), Device.cpu(), Layout.single())
    (model,) = trained.parts
    generator = torch.Generator().manual_seed(0)
    shape = config.training.micro_batch_size, config.data.seq_length
    tokens = torch.randint(trained.tokenizer.vocab_size, shape, generator=generator)
    before = activations(model, tokens)
    updates = Updates(trained)
    for _ in range(steps):
        model.train()
        updates.make(look_ahead=False)
    trained.optimizer.wait_for_weights()
    after = activations(model, tokens)
    return {name: (after[name] - x).abs().mean().item() for name, x in before.items()}


def activations(model: nn.Module, tokens: Tensor) -> dict[str, Tensor]:
    """Return the outputs of the embedding, of each sublayer and of the output layer in fp32.

    The model is left in evaluation mode.

    Args:
        model: The whole model.
        tokens: The tokens [b, s].
    """
    import torch

    outputs: dict[str, Tensor] = {}
    model.eval()
    with torch.no_grad(), _recording(model, outputs):
        outputs["logits"] = model(tokens).float()
    return outputs


@contextmanager
def _recording(model: nn.Module, outputs: dict[str, Tensor]) -> Iterator[None]:
    handles = []
    for name, module in model.named_modules():
        if re.fullmatch(r"embedding|layers\.\d+\.(attention|mlp)", name):

            def record(_: nn.Module, inputs: object, x: Tensor, name: str = name) -> None:
                outputs[name] = x.float()

            handles.append(module.register_forward_hook(record))
    yield
    for handle in handles:
        handle.remove()


def fit_powers(changes_by_width: Mapping[int, Changes]) -> dict[str, float]:
    """Return the exponent with which each change grows with the width, from a log-log fit."""
    widths = [math.log(width) for width in changes_by_width]
    mean = sum(widths) / len(widths)
    spread = sum((x - mean) ** 2 for x in widths)
    return {
        name: sum(
            (x - mean) * math.log(max(changes[name], 1e-30))
            for x, changes in zip(widths, changes_by_width.values(), strict=True)
        )
        / spread
        for name in next(iter(changes_by_width.values()))
    }


def table_lines(changes_by_width: Mapping[int, Changes], powers: Mapping[str, float]) -> list[str]:
    """Return the lines of the table: a row for each activation, a column for each width."""
    lines = [
        "mean change of".ljust(22)
        + "".join(f"{width:>11}" for width in changes_by_width)
        + "   power"
    ]
    for name, power in powers.items():
        cells = "".join(f"{changes[name]:11.3e}" for changes in changes_by_width.values())
        verdict = "flat" if abs(power) <= _FLAT else "grows" if power > 0 else "shrinks"
        lines.append(f"{name:22}{cells}{power:8.2f} {verdict}")
    return lines


def draw(changes_by_width: Mapping[int, Changes], output: Path) -> None:
    """Plot the mean change against the width, with a line for each activation."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for name in next(iter(changes_by_width.values())):
        axes.plot(
            list(changes_by_width),
            [changes[name] for changes in changes_by_width.values()],
            "o-",
            label=name,
        )
    axes.set(xscale="log", yscale="log", xlabel="--hidden-size", ylabel="Mean change")
    axes.set_title("Change of activations by width")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    with writing_to("--output", output):
        figure.savefig(output)


main = tool_main(build_parser, run)
