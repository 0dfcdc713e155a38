"""Try random combinations by hand: the command line of the modules that draw them."""

from __future__ import annotations

import argparse
import io
import tempfile
import traceback
from collections.abc import Callable, Iterable
from contextlib import redirect_stdout
from pathlib import Path
from typing import TypeVar

Drawn = TypeVar("Drawn")


def try_combinations(
    description: str,
    draw: Callable[[int], Drawn],
    problems_of: Callable[[Drawn, Path], Iterable[str]],
) -> int:
    """Try combinations of the seeds on the command line, and print what is wrong with each.

    Args:
        description: What the command does, for its help.
        draw: Returns the combination of a seed.
        problems_of: Tries a combination in an empty folder, and yields its problems. Lines that it
            prints are shown if they begin with "refused:".

    Returns:
        The exit code: 1 if a combination failed.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--count", type=int, default=20, help="how many combinations")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first one")
    options = parser.parse_args()
    failed = 0
    for seed in range(options.seed, options.seed + options.count):
        found, output = draw(seed), io.StringIO()
        with tempfile.TemporaryDirectory() as folder, redirect_stdout(output):
            try:
                problems = list(problems_of(found, Path(folder)))
            except Exception:
                problems = [traceback.format_exc()]
        failed += bool(problems)
        refused = [line[:70] for line in output.getvalue().splitlines() if line[:8] == "refused:"]
        lines = [str(found), *problems] if problems else ["fine", *refused]
        print("\n  ".join([f"seed {seed}:", *lines]))
    print(f"{failed} of {options.count} failed")
    return int(failed > 0)
