"""Score the answers in a file with a trained reward model.

    python tools/score.py --load runs/reward --input held-out-pairs.jsonl --output rewards.jsonl

Each line of the input is a conversation, or a pair with "chosen" and "rejected", as in training.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.command import tool_main
from megatron.config.arguments import ToolParser
from megatron.durable import expect_no_file, replace_file, writing_to
from megatron.errors import DataError

if TYPE_CHECKING:
    from megatron.inference.load import Loaded

Rewards = dict[str, float]


def run(options: argparse.Namespace) -> None:
    """Score each line and write the rewards to --output or standard output.

    For pairs, also print on stderr how often the chosen answer has the higher reward.

    Raises:
        UserError: There is no reward model, a line is invalid, or the output exists or cannot be
            written.
    """
    if options.output is not None:
        expect_no_file("--output", [options.output], overwrite=options.overwrite)
    from megatron.device import Device
    from megatron.inference.load import REWARD_MODEL, load_gpt

    device = Device.pick()
    loaded = load_gpt(options.load, device, row_by_row=False, kinds=(REWARD_MODEL,))
    rows = []
    for rewards in score_lines(loaded, Path(options.input)):
        rows.append(rewards)
        if options.output is None:
            print(json.dumps(rewards))
    if options.output is not None:
        text = "".join(json.dumps(rewards) + "\n" for rewards in rows)
        with writing_to("--output", Path(options.output)):
            replace_file(Path(options.output), text.encode())
    margins = [rewards["chosen"] - rewards["rejected"] for rewards in rows if "chosen" in rewards]
    if margins:
        num_correct, mean = sum(margin > 0 for margin in margins), sum(margins) / len(margins)
        summary = f"accuracy {num_correct / len(margins):.4f}, mean margin {mean:.4f}"
        print(f"{len(margins):,} pairs: {summary}", file=sys.stderr)


def score_lines(loaded: Loaded, path: Path) -> Iterator[Rewards]:
    """Yield the rewards of each line: "reward", or "chosen" and "rejected".

    Args:
        loaded: The reward model.
        path: The file.

    Raises:
        DataError: The file cannot be read, or a line is invalid.
    """
    import torch

    from megatron.data.conversation_records import format_of
    from megatron.data.conversations import ConversationEncoder, ConversationOptions
    from megatron.data.json_lines import read_objects
    from megatron.tokenizer.chat_template import find_template

    flags, max_length = loaded.config.tokenizer, loaded.config.model.longest_context
    template = find_template(flags.chat_template, flags.tokenizer_model)
    encoders = {
        is_pair: ConversationEncoder(
            ConversationOptions(flags, template, sys.maxsize, preferences=is_pair), loaded.tokenizer
        )
        for is_pair in (False, True)
    }
    device = next(loaded.model.parameters()).device
    for line in read_objects(path, "--input"):
        try:
            is_pair = format_of(line.fields) == "preference"
            encoded = encoders[is_pair].encode_record(json.dumps(line.fields).encode(), Counter())
            if not encoded:
                raise ValueError("it has no answer from the assistant")
            length = max(len(tokens) for tokens, _ in encoded)
            if length > max_length:
                raise ValueError(
                    f"it has {length:,} tokens, but the model reads at most {max_length:,}: "
                    "shorten or remove it"
                )
        except (ValueError, DataError) as error:
            raise DataError(f"--input {path}: line {line.number}: {error}") from None
        values = []
        for tokens, _ in encoded:
            with torch.inference_mode():
                row = torch.from_numpy(tokens).to(device, torch.int64)[None]
                values.append(float(loaded.model(row)[0, -1]))
        yield dict(zip(("chosen", "rejected") if is_pair else ("reward",), values, strict=True))


def build_parser() -> ToolParser:
    """Build the command-line parser."""
    parser = ToolParser("score.py", "Score answers with a trained reward model.")
    parser.add_argument("--load", required=True, help="Folder of checkpoints; the newest is used")
    parser.add_argument(
        "--input", required=True, help="JSON lines: conversations, or pairs of answers"
    )
    parser.add_argument(
        "--output", help="File for the rewards, one per line. Default: standard output"
    )
    parser.add_argument("--overwrite", action="store_true", help="Replace an existing --output.")
    return parser


main = tool_main(build_parser, run)
