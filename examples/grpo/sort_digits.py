#!/usr/bin/env python3
"""A toy task for GRPO: answer with the digits of the prompt in ascending order.

python examples/grpo/sort_digits.py runs/grpo    writes format.jsonl and prompts.jsonl

The tokens are the digits 0 to 9, and 10, which ends a prompt. format.jsonl teaches the format of an
answer: its answers have the digits in any order. prompts.jsonl contains only prompts.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

DIGITS = 5


def reward(record: Mapping[str, Any], answer: str) -> float:
    """Return the fraction of correct digits, or 0 if the answer's length is wrong."""
    wanted = sorted(record["prompt"].split()[:-1])
    given = answer.split()
    if len(given) != len(wanted):
        return 0.0
    return sum(a == b for a, b in zip(given, wanted, strict=True)) / len(wanted)


def main(folder: Path) -> None:
    """Write both files."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(1)
    for name, count in (("format", 20_000), ("prompts", 50_000)):
        with (folder / f"{name}.jsonl").open("w") as file:
            for _ in range(count):
                digits = [str(draw.randrange(10)) for _ in range(DIGITS)]
                record = {"prompt": " ".join([*digits, "10"])}
                if name == "format":
                    record["completion"] = " " + " ".join(draw.sample(digits, DIGITS))
                file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="folder for format.jsonl and prompts.jsonl")
    main(parser.parse_args().folder)
