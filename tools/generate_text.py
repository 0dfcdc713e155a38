#!/usr/bin/env python3
"""Let a trained GPT go on from a prompt.

python tools/generate_text.py --load runs/demo/checkpoints --prompt "def main("
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from megatron.command import run_command


def main(argv: Sequence[str] | None = None) -> int:
    """Print the prompt and what follows; the exit code."""
    options = _parser().parse_args(argv)
    return run_command(lambda: run(options))


def run(options: argparse.Namespace) -> None:
    """Generate and print.

    Raises:
        UserError: there is no checkpoint to load, or a flag needs mending.
    """
    from megatron.device import Device
    from megatron.inference.generate import generate
    from megatron.inference.load import load_gpt

    loaded = load_gpt(options.load, Device.pick())
    assert loaded.config.data.seq_length
    for number in range(options.num_samples):
        text = generate(
            loaded.model,
            loaded.tokenizer,
            options.prompt,
            max_new_tokens=options.max_new_tokens,
            window=loaded.config.data.seq_length,
            temperature=options.temperature,
            top_k=options.top_k,
            seed=options.seed + number,
        )
        if options.num_samples > 1:
            print(f"----- sample {number + 1}")
        print(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Let a trained GPT go on from a prompt.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--load", required=True, help="folder of checkpoints, the newest is used")
    parser.add_argument("--prompt", required=True, help="text to go on from")
    parser.add_argument("--max-new-tokens", type=int, default=200, help="longest continuation")
    parser.add_argument("--temperature", type=float, default=0.8, help="0: most likely token")
    parser.add_argument("--top-k", type=int, default=50, help="most likely tokens kept; 0: all")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--num-samples", type=int, default=1, help="texts to print")
    return parser


if __name__ == "__main__":
    sys.exit(main())
