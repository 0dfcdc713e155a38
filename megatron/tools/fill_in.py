"""Fill in masked words with a trained BERT or T5.

python tools/fill_in.py --load runs/demo-bert/checkpoints --text "for [MASK] in range(10):"

BERT replaces each [MASK] with one token, and T5 with any number of words.
"""

from __future__ import annotations

import argparse

from megatron.command import tool_main
from megatron.config.arguments import ToolParser
from megatron.errors import ConfigError, warn

_SHOWS_AS_ZERO = 0.005  # probabilities up to this value are printed as 0%


def run(options: argparse.Namespace) -> None:
    """Fill in the texts, and print each with the most likely words.

    Raises:
        UserError: A flag is invalid, there is no checkpoint, or a text has nothing to fill in.
    """
    if options.top < 1:
        raise ConfigError(f"--top {options.top}: give at least 1")
    from megatron.device import Device
    from megatron.inference.fill import MARK, load_filler

    filler = load_filler(
        options.load, Device.pick(), allow_foreign=options.allow_foreign_checkpoints
    )
    highest = 0.0
    for text in options.text:
        predictions = filler.fill(text, top=options.top)
        highest = max(highest, *(candidates[0].probability for candidates in predictions))
        parts = text.split(MARK)
        top_words = [f"<{candidates[0].text}>" for candidates in predictions]
        filled = "".join(map("".join, zip(parts, [*top_words, ""], strict=True)))
        print(f"{text}\n  {filled}")
        for candidates in predictions:
            print("    " + ", ".join(f"{fill.text} {fill.probability:.0%}" for fill in candidates))
    if highest <= _SHOWS_AS_ZERO:
        warn(
            f"--load {options.load}: the model gives even its best guess a probability of only "
            f"{highest:.2%}. It has most likely not learned enough yet, so its output makes no "
            "sense. Train it longer"
        )


def build_parser() -> ToolParser:
    """Build the command-line parser."""
    parser = ToolParser(
        "fill_in.py", "Fill in masked words with a trained BERT or T5.", shows_defaults=True
    )
    parser.add_argument("--load", required=True, help="Folder of checkpoints; the newest is used")
    parser.add_trust()
    parser.add_argument("--text", required=True, nargs="+", help="Texts that contain [MASK]")
    parser.add_argument(
        "--top", type=int, default=3, help="Number of candidates to show (T5 gives one)"
    )
    return parser


main = tool_main(build_parser, run)
