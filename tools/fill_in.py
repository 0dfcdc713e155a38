#!/usr/bin/env python3
"""Let a trained BERT or T5 fill in hidden words.

python tools/fill_in.py --load runs/demo-bert/checkpoints --text "for [MASK] in range(10):"

[MASK] stands for one token if the model is a BERT, and for any number of words if it is a T5.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

if __package__ in (None, ""):
    # Started as a file: the package beside this folder may not be installed.
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.command import run_command
from megatron.config.arguments import ToolParser
from megatron.errors import ConfigError


def main(argv: Sequence[str] | None = None) -> int:
    """Print each text filled in, with other likely words, and return the exit code."""
    options = _parser().read(argv)
    return run_command(lambda: run(options))


def run(options: argparse.Namespace) -> None:
    """Fill in the texts, and print the results.

    Raises:
        UserError: There is no checkpoint to load, or a text has nothing to fill in.
    """
    if options.top < 1:
        raise ConfigError(f"--top {options.top}: give at least 1")
    from megatron.device import Device
    from megatron.inference.fill import MARK, load_filler

    filler = load_filler(options.load, Device.pick())
    for text in options.text:
        places = filler.fill(text, top=options.top)
        parts = text.split(MARK)
        best = [f"<{guesses[0].words}>" for guesses in places]
        filled = "".join(map("".join, zip(parts, [*best, ""], strict=True)))
        print(f"{text}\n  {filled}")
        for guesses in places:
            print("    " + ", ".join(f"{guess.words} {guess.probability:.0%}" for guess in guesses))


def _parser() -> ToolParser:
    parser = ToolParser(
        "fill_in.py", "Let a trained BERT or T5 fill in hidden words.", shows_defaults=True
    )
    parser.add_argument("--load", required=True, help="folder of checkpoints; the newest is used")
    parser.add_argument("--text", required=True, nargs="+", help="texts that contain [MASK]")
    parser.add_argument(
        "--top", type=int, default=3, help="number of fillings to show (a T5 gives one)"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
