"""Mutate the package and report which mutations no test detects.

    python -m tests.mutation --count 400 --seed 1 --jobs 2 --out mutations.jsonl
    python -m tests.mutation --out mutations.jsonl --table

`changes.py` says what is changed. Mutations are tried in copies of the repository, which have no
`../shared` next to them. First, the tests run without mutations; then each mutation is tried with
the tests that execute it. It is killed by a test that fails with it twice and passes without it.
All results are kept in files, and the same command continues where an earlier one stopped. Trials
that ran out of time are repeated.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

from tests.mutation.changes import draw
from tests.mutation.trials import KILLED, SLOW, SURVIVED, read_results, try_all
from tests.repository import ROOT


def table(path: Path) -> str:
    """Return results as a Markdown table of rooms and a list of surviving mutations."""
    by_room: dict[str, Counter[str]] = defaultdict(Counter)
    others = []
    for one, result in read_results(path).items():
        for room in (one.room, "all"):
            by_room[room][str(result["outcome"])] += 1
        if result["outcome"] != KILLED:
            others.append(f"- {result['outcome']} ({result['tests']} tests): {one}")
    lines = ["| room | tried | killed | survived | out of time |", "| --- " * 5 + "|"]
    for room, counts in sorted(by_room.items(), key=lambda pair: (pair[0] == "all", pair[0])):
        share = counts[KILLED] / counts.total()
        lines.append(
            f"| {room} | {counts.total()} | {counts[KILLED]} ({share:.0%}) | {counts[SURVIVED]} "
            f"| {counts[SLOW]} |"
        )
    return "\n".join([*lines, "", *sorted(others)])


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--count", type=int, default=15, help="how many mutations")
    parser.add_argument("--seed", type=int, default=1, help="of the draws")
    parser.add_argument("--rooms", nargs="+", default=[], help="default: all but kernels")
    parser.add_argument("--jobs", type=int, default=1, help="how many run at a time")
    parser.add_argument("--limit", type=float, default=900.0, help="seconds for one mutation")
    parser.add_argument("--minutes", type=float, default=1e6, help="for everything")
    parser.add_argument("--again", action="store_true", help="try what survived again")
    parser.add_argument("--out", type=Path, required=True, help="file of results, JSON lines")
    parser.add_argument("--table", action="store_true", help="only show the results in the file")
    options = parser.parse_args(argv)
    until = time.monotonic() + 60.0 * options.minutes
    if not options.table:
        try_all(
            draw(ROOT, options.count, options.seed, options.rooms),
            options.out,
            jobs=options.jobs,
            limit=options.limit,
            until=until,
            again={SLOW, SURVIVED} if options.again else {SLOW},
        )
    print(table(options.out))


if __name__ == "__main__":
    main()
