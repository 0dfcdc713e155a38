"""Fuzz for longer than the tests do.

python -m tests.fuzz                                  every target, 2,000 inputs each
python -m tests.fuzz --inputs 100000 --seed 7 pickle  one target

Failures are stored in tests/fuzz/corpus, and the tests then try them too. The exit code is 1 if
anything failed.
"""

from __future__ import annotations

import argparse
import sys

from tests.fuzz.harness import search
from tests.fuzz.targets import TARGETS


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [target.name for target in TARGETS]
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"any of {', '.join(names)}")
    parser.add_argument("--inputs", type=int, default=2000, help="mutations of each target")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random choices")
    args = parser.parse_args()
    unknown = sorted(set(args.targets) - set(names))
    if unknown:
        parser.error(f"no target {', '.join(unknown)}: choose from {', '.join(names)}")
    chosen = [target for target in TARGETS if not args.targets or target.name in args.targets]
    return 0 if search(chosen, args.inputs, args.seed) else 1


if __name__ == "__main__":
    sys.exit(main())
