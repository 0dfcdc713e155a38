"""Run the kernel tests on the emulator with AddressSanitizer and UndefinedBehaviorSanitizer.

    python -m tests.kernels.sanitize                             every test of emulated kernels
    python -m tests.kernels.sanitize tests/kernels/test_norm.py  the tests of some files
    python -m tests.kernels.sanitize --quick                     one variant of each test

The kernels are compiled with both sanitizers. Findings are reads and writes outside a tensor or
outside shared memory, misaligned accesses, and undefined behavior. The command runs one file after
another, and prints a table of what each file ran and found, and then every finding. It exits with 1
if there is a finding, a failed test, or a kernel that no test calls. It needs nvcc (for its
headers) and g++ with libasan and libubsan.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

from megatron.kernels.sources import source_files
from tests.kernels.emulation import HERE, build, missing
from tests.repository import ROOT

SANITIZERS = "address,undefined,float-cast-overflow"
_LIBRARIES = ("libasan.so", "libubsan.so", "libstdc++.so")
_FINDING = re.compile(r"SUMMARY: AddressSanitizer: .*|\S+: runtime error: .*")
_OUTCOME = re.compile(r"(\d+) (passed|failed|errors?|skipped|deselected)")
_NOTHING_RAN = 5  # the exit code of pytest
_COLUMNS = ("passed", "failed", "skipped", "left out", "findings", "seconds")


@dataclass(frozen=True)
class Outcome:
    """What the tests of a file, or of several, did.

    Attributes:
        counts: How many tests "passed", "failed" and so on, in pytest's words. It is empty if the
            process ended before pytest could say.
        findings: The sanitizers' reports, each place in the source once.
        calls: The names of the kernels that were launched.
        skips: pytest's lines about skipped tests, with reasons.
        seconds: The time that the tests took.
        failure: What pytest printed, if tests failed or the process died.
    """

    counts: Mapping[str, int]
    findings: Sequence[str]
    calls: frozenset[str]
    skips: Sequence[str]
    seconds: float
    failure: str


def environment(reports: Path | None = None) -> Mapping[str, str]:
    """Return the environment of a process that loads a library with sanitizers.

    Args:
        reports: Where the reports go, as the beginning of the files' names. The process
            then continues after a report. By default, the first report goes to stderr and ends
            the process.
    """
    found = []
    for name in _LIBRARIES:
        command = ["g++", f"-print-file-name={name}"]
        found.append(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    common = f"halt_on_error=0:log_path={reports}" if reports else "halt_on_error=1"
    return {
        **os.environ,
        "LD_PRELOAD": ":".join(path.strip() for path in found),
        "ASAN_OPTIONS": f"detect_leaks=0:{common}",  # Python frees little when it exits
        "UBSAN_OPTIONS": f"print_stacktrace=1:{common}",
        "OMP_NUM_THREADS": "1",
    }


def run(paths: Sequence[str], library: Path, folder: Path, is_quick: bool) -> Outcome:
    """Run the tests of some files in one process.

    Args:
        paths: The files.
        library: The library with sanitizers.
        folder: An empty folder for reports.
        is_quick: Whether to run one variant of each test.
    """
    calls = folder / "calls"
    variables = {
        **environment(folder / "report"),
        "MEGATRON_TEST_SANITIZED": str(library),
        "MEGATRON_TEST_CALLS": str(calls),
        "MEGATRON_TEST_QUICK": "1" if is_quick else "",
    }
    options = ["-p", "no:cacheprovider", "--timeout", "1200", "-rs"]
    command = [sys.executable, "-m", "pytest", *options, *paths]
    started = time.monotonic()
    done = subprocess.run(
        command, env=variables, cwd=ROOT, capture_output=True, text=True, check=False
    )
    said = done.stdout + done.stderr
    last = done.stdout.strip().rpartition("\n")[2]
    findings = []
    for report in sorted(folder.glob("report*")):
        findings += _FINDING.findall(report.read_text(errors="replace"))
    return Outcome(
        counts={name.rstrip("s"): int(number) for number, name in _OUTCOME.findall(last)},
        findings=list(dict.fromkeys(findings)),
        calls=frozenset(calls.read_text().split() if calls.exists() else ()),
        skips=re.findall(r"^SKIPPED .*", done.stdout, re.MULTILINE),
        seconds=time.monotonic() - started,
        failure="" if done.returncode in {0, _NOTHING_RAN} else said,
    )


def row(label: str, outcome: Outcome) -> str:
    """Return a line of the table."""
    counts = outcome.counts
    failed = counts.get("failed", 0) + counts.get("error", 0)
    numbers = [counts.get("passed", 0), failed, counts.get("skipped", 0)]
    cells = [*numbers, counts.get("deselected", 0), len(outcome.findings), f"{outcome.seconds:.0f}"]
    died = " died" if outcome.failure and not failed else ""
    return f"{label:44}" + "".join(f"{cell!s:>10}" for cell in cells) + died


def kernel_names() -> frozenset[str]:
    """Return the names of the operations that launch kernels."""
    declared = re.compile(r' = Kernel\(\s*"(\w+)"')
    files = (source_files()[0].parent.parent).glob("*.py")
    return frozenset(name for path in files for name in declared.findall(path.read_text()))


def summary(outcomes: Sequence[Outcome], kernels: Set[str]) -> tuple[list[str], bool]:
    """Return the lines after the table, and whether everything passed.

    Args:
        outcomes: What each file did.
        kernels: The kernels that some test must call.
    """
    called = frozenset[str]().union(*(outcome.calls for outcome in outcomes))
    lines = [outcome.failure for outcome in outcomes if outcome.failure]
    lines += dict.fromkeys(finding for outcome in outcomes for finding in outcome.findings)
    is_clean = not lines and called >= kernels
    lines += (line for outcome in outcomes for line in outcome.skips)
    if kernels:
        lines.append(f"kernels called: {len(called & kernels)} of {len(kernels)}")
    if missing := sorted(kernels - called):
        lines.append(f"no test calls {', '.join(missing)}")
    return lines, is_clean


def main() -> int:
    """Build the library, run the files, and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    files = sorted(str(path.relative_to(ROOT)) for path in HERE.glob("test_*.py"))
    parser.add_argument("paths", nargs="*", default=files, help="files of tests")
    parser.add_argument("--quick", action="store_true", help="run one variant of each test")
    args = parser.parse_args()
    if reason := missing():
        print(f"sanitizers: nothing was checked: {reason}")
        return 0
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        started = time.monotonic()
        library = build(folder, sanitizers=SANITIZERS)
        print(f"compiled {len(source_files())} CUDA files in {time.monotonic() - started:.0f} s")
        print(f"{'file':44}" + "".join(f"{name:>10}" for name in _COLUMNS), flush=True)
        outcomes = []
        # Starting up takes seconds, so a quick run does it once.
        batches = [args.paths] if args.quick else [[path] for path in args.paths]
        for number, paths in enumerate(batches):
            reports = folder / str(number)
            reports.mkdir()
            outcomes.append(run(paths, library, reports, args.quick))
            label = paths[0] if len(paths) == 1 else f"{len(paths)} files"
            print(row(label, outcomes[-1]), flush=True)
    lines, is_clean = summary(outcomes, kernel_names() if args.paths == files else frozenset())
    print("\n".join(lines))
    print("left out: tests that need a GPU, and tests that launch no kernel")
    if args.quick:
        print("left out by --quick: all but one variant of each test")
    return 0 if is_clean else 1


if __name__ == "__main__":
    sys.exit(main())
