"""Test the software's promises about faults, and write the counts into the documentation.

    python tools/scoreboard.py --out docs/reliability.md
    python tools/scoreboard.py --out docs/reliability.md --rows 2 3

Each row actually kills processes, fills disks, damages files or mounts attacks, in forked
processes, and counts how often the promise held. The table names the seeds of the random choices.
The rows are defined in `tests/reliability/scoreboard`; the tests run fewer trials of them.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if __package__ in (None, ""):
    # When this file is run as a script, the package next to its folder may not be installed.
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.config.arguments import ToolParser
from megatron.errors import ConfigError

if TYPE_CHECKING:
    from tests.reliability.scoreboard.score import Row, Trials

_BEGIN, _END = "<!-- scoreboard: written by tools/scoreboard.py -->\n", "<!-- end -->\n"
_COLUMNS = ("#", "what is done, and what must hold", "held", "longest", "details", "commit")


def table(lines: Iterable[str]) -> str:
    """Return the Markdown table with these lines."""
    return "\n".join([_line(_COLUMNS), _line(["---"] * len(_COLUMNS)), *lines]) + "\n"


def result(row: Row, trials: Trials, commit: str) -> str:
    """Return the result of a row as a line of the Markdown table."""
    notes = [f"{text}: {count:,}" for text, count in sorted(trials.notes.items())]
    details = "; ".join([trials.seeds, *notes])
    passed = f"{trials.passed} of {trials.tried}"
    # Trials that were all made at once have no individual times.
    longest = f"{trials.worst:.1f} s" if trials.worst >= 0.05 else ""
    return _line([str(row.number), row.what, passed, longest, details, commit])


def _gpus_text(row: Row) -> str:
    """Return the number of GPUs that a row needs, for messages."""
    return f"{row.gpus} GPU{'s' * (row.gpus > 1)}"


def _line(values: Sequence[str]) -> str:
    return f"| {' | '.join(values)} |"


def commit_and_day() -> str:
    """Return the commit and the day of the results."""
    root = Path(__file__).resolve().parent.parent
    command = ["git", "describe", "--always", "--dirty", "--exclude", "*"]
    git = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    return f"{git.stdout.strip() or 'unknown'}, {time.strftime('%Y-%m-%d')}"


def machine() -> str:
    """Return a one-line description of this machine."""
    import torch

    return f"{os.cpu_count()} CPU cores ({platform.machine()}), torch {torch.__version__}."


def read_page(path: Path) -> str:
    """Read a page that has a section for results.

    Raises:
        ConfigError: The page cannot be opened for reading and writing, or has no such section.
    """
    try:
        with path.open("r+", encoding="utf-8") as file:
            page = file.read()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"--out {path}: {reason}: give a page to write into, such as docs/reliability.md, or "
            "omit --out to print the results"
        ) from None
    if not re.search(f"{re.escape(_BEGIN)}.*{re.escape(_END)}", page, re.DOTALL):
        raise ConfigError(
            f"--out {path}: the page has no lines {_BEGIN.strip()} and {_END.strip()}: add them "
            "where the results belong"
        )
    return page


def with_results(page: str, lines: Mapping[int, str], where: str) -> str:
    """Return the page with result lines added or replaced.

    Args:
        page: The text of the page.
        lines: The result lines by row number.
        where: A description of the machine.
    """
    head, begin, rest = page.partition(_BEGIN)
    before, end, tail = rest.partition(_END)
    old_lines = {
        int(match.group(1)): match.group(0) for match in re.finditer(r"(?m)^\| (\d+) \|.*$", before)
    }
    merged = sorted((old_lines | dict(lines)).items())
    text = table(line for _, line in merged)
    return f"{head}{begin}\n{where}\n\n{text}\n{end}{tail}"


def try_row(row: Row, count: int) -> Trials:
    """Run `count` trials of a row in a temporary folder, without their output."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        inner = Path(folder) / "row"
        inner.mkdir()
        silence = io.StringIO()
        with contextlib.redirect_stdout(silence), contextlib.redirect_stderr(silence):
            return row.run(inner, count)


def main(argv: Sequence[str]) -> int:
    """Run the tool and return its exit code.

    The code is 0 if all promises held, 1 if one did not, 9 for bad flags, 130 if interrupted.
    """
    parser = ToolParser("scoreboard.py", __doc__)
    parser.add_argument(
        "--out", type=Path, metavar="PAGE.md", help="Page for the results (default: print them)."
    )
    parser.add_argument("--rows", type=int, nargs="+", metavar="N", help="Only these rows.")
    options = parser.read(argv)
    try:
        return run(options)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def run(options: argparse.Namespace) -> int:
    """Try the requested rows, and return 1 if a promise did not hold.

    Raises:
        ConfigError: There is no such row, or the page has no section for results.
    """
    import torch

    from megatron.device import gpu_count
    from tests.reliability.scoreboard.rows import ROWS

    torch.set_num_threads(1)  # forked processes cannot use the parent's threads
    numbers = {row.number for row in ROWS}
    if unknown := sorted(set(options.rows or ()) - numbers):
        raise ConfigError(
            f"--rows {unknown[0]}: choose from {', '.join(map(str, sorted(numbers)))}"
        )
    requested = [row for row in ROWS if row.number in (options.rows or ())]
    if without_gpus := [row for row in requested if row.gpus > gpu_count()]:
        raise ConfigError(
            f"--rows {without_gpus[0].number}: it needs {_gpus_text(without_gpus[0])}, and this "
            f"machine has {gpu_count() or 'none'}: try it on a machine with GPUs"
        )
    if options.out:  # fail before hours of trials, not after
        read_page(options.out)
    lines, failures = {}, 0
    commit = commit_and_day()
    for row in ROWS:
        if options.rows and row.number not in options.rows:
            continue
        if gpu_count() < row.gpus:
            print(f"{row.number}: not tried: it needs {_gpus_text(row)}", flush=True)
            continue
        started = time.monotonic()
        trials = try_row(row, row.full)
        lines[row.number] = result(row, trials, commit)
        failures += len(trials.failures)
        seconds = time.monotonic() - started
        print(
            f"{row.number}: {trials.passed} of {trials.tried} in {seconds:.0f} s ({trials.seeds})",
            flush=True,
        )
        for failure in trials.failures:
            print(f"  {failure}", flush=True)
        if options.out:  # write now, because the remaining rows may take long
            page = with_results(read_page(options.out), lines, machine())
            options.out.write_text(page, encoding="utf-8")
    if not options.out:
        print(table(lines.values()))
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
