"""Try what the software promises of faults, and write the counts into the documentation.

    python tools/scoreboard.py --out docs/reliability.md
    python tools/scoreboard.py --rows 2 3

Each row kills, fills, damages or attacks for real, in forked processes, and counts how often the
promise held. The rows are those of `tests/reliability/scoreboard`, which the tests try fewer times.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if __package__ in (None, ""):
    # Started as a file: the package beside this folder may not be installed.
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

if TYPE_CHECKING:
    from tests.reliability.scoreboard.score import Row, Trials

_BEGIN, _END = "<!-- scoreboard: written by tools/scoreboard.py -->\n", "<!-- end -->\n"
_COLUMNS = ("#", "what is done, and what must hold", "held", "longest", "beside")


def table(results: Iterable[tuple[Row, Trials]], where: str) -> str:
    """The results in Markdown, under a line that says where they are from."""
    lines = [where, "", _line(_COLUMNS), _line(["---"] * len(_COLUMNS))]
    lines += [_line(cells(row, trials)) for row, trials in results]
    return "\n".join(lines) + "\n"


def cells(row: Row, trials: Trials) -> list[str]:
    """Of one line."""
    beside = "; ".join(f"{text}: {count:,}" for text, count in sorted(trials.notes.items()))
    held = f"{trials.passed} of {trials.tried}"
    return [str(row.number), row.what, held, f"{trials.worst:.1f} s", beside]


def _line(values: Sequence[str]) -> str:
    return f"| {' | '.join(values)} |"


def where_from() -> str:
    """Commit, machine and day of the results."""
    import torch

    root = Path(__file__).resolve().parent.parent
    words = ["git", "describe", "--always", "--dirty", "--exclude", "*"]
    git = subprocess.run(words, cwd=root, capture_output=True, text=True, check=False)
    return (
        f"Commit {git.stdout.strip() or 'unknown'}, {time.strftime('%Y-%m-%d')}, "
        f"{os.cpu_count()} CPU cores ({platform.machine()}), torch {torch.__version__}."
    )


def replaced(page: str, text: str) -> str:
    """The page with `text` in the place of the last results."""
    head, begin, rest = page.partition(_BEGIN)
    _, end, tail = rest.partition(_END)
    if not begin or not end:
        raise SystemExit(f"error: the page has no lines {_BEGIN.strip()} and {_END.strip()}")
    return head + begin + "\n" + text + "\n" + end + tail


def try_row(row: Row, count: int) -> Trials:
    """One row, in a folder of its own; what the trials print is left out."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        inner = Path(folder) / "row"
        inner.mkdir()
        silence = io.StringIO()
        with contextlib.redirect_stdout(silence), contextlib.redirect_stderr(silence):
            return row.run(inner, count)


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="scoreboard.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--out", type=Path, metavar="PAGE.md", help="Page to write the table into. Unset: print it."
    )
    parser.add_argument(
        "--rows", type=int, nargs="+", metavar="N", help="Only these. Not with --out."
    )
    options = parser.parse_args(words)
    if options.out and options.rows:
        parser.error("--rows does not go with --out: the page holds all rows")

    import torch

    from tests.reliability.scoreboard.rows import ROWS

    torch.set_num_threads(1)  # as in the tests: forked processes start clean
    known = {row.number for row in ROWS}
    if absent := sorted(set(options.rows or ()) - known):
        parser.error(f"--rows {absent[0]}: there are {', '.join(map(str, sorted(known)))}")
    results = []
    for row in ROWS:
        if options.rows and row.number not in options.rows:
            continue
        started = time.monotonic()
        trials = try_row(row, row.full)
        results.append((row, trials))
        seconds = time.monotonic() - started
        print(f"{row.number}: {trials.passed} of {trials.tried} in {seconds:.0f} s", flush=True)
        for failure in trials.failures:
            print(f"  {failure}", flush=True)
    text = table(results, where_from())
    if options.out:
        page = replaced(options.out.read_text(encoding="utf-8"), text)
        options.out.write_text(page, encoding="utf-8")
        print(f"wrote {options.out}")
    else:
        print(text)
    return int(any(trials.failures for _, trials in results))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
