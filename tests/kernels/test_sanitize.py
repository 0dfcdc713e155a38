"""Planted faults that `python -m tests.kernels.sanitize` must find, and the table it prints."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megatron.kernels.sources import source_files
from tests.kernels.emulation import HERE, build, missing
from tests.kernels.sanitize import SANITIZERS, Outcome, environment, row, summary
from tests.repository import name, tracked_files

# Eight floats from malloc, whose surroundings AddressSanitizer watches. A kernel's launch consists
# of its name, the numbers of blocks and threads, and the bytes of shared memory.
PROGRAM = """
import ctypes, sys
from megatron.kernels.driver import LaunchConfig
from tests.kernels.emulation import driver
malloc = ctypes.CDLL(None).malloc
malloc.restype, malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
emulated = driver(sys.argv[1])
words = sys.argv[2:]
for kernel, blocks, threads, shared, number in zip(*(words[i::5] for i in range(5))):
    handle = emulated.find(None, kernel)
    at, results = ctypes.c_void_p(malloc(32)), set()
    given = ctypes.c_int(int(number))
    addresses = (ctypes.c_void_p * 2)(ctypes.addressof(at), ctypes.addressof(given))
    config = LaunchConfig((int(blocks), 1, 1), (int(threads), 1, 1), int(shared))
    for _ in range(40):
        error = emulated.launch(ctypes.addressof(config), handle, ctypes.addressof(addresses), None)
        results.add(ctypes.c_float.from_address(at.value).value)
    print(kernel, error, len(results))
"""

# Blocks, threads and bytes of shared memory, unless it is a single thread.
SHAPES = {
    "write_dynamic": (1, 1, 33 * 4),
    "sum_static": (1, 32, 0),
    "largest_dynamic": (1, 32, 32 * 4),
    "read_neighbor": (1, 32, 0),
    "write_from_blocks": (4, 1, 0),
}

# A function in planted.cu, a number for which it is sound, one for which it is not, and the
# sanitizer's report.
REPORTED = [
    ("write", 7, 8, "heap-buffer-overflow"),
    ("write", 0, -1, "heap-buffer-overflow"),
    ("read", 7, 8, "heap-buffer-overflow"),
    ("shift", 30, 32, "shift exponent 32 is too large"),
    ("shift", 0, -1, "shift exponent -1 is negative"),
    ("multiply", 32767, 32768, "signed integer overflow: 32768 * 65536"),
    ("convert", 30, 31, "outside the range of representable values"),
    ("load_vector", 4, 1, "misaligned address"),
    ("copy_vector", 4, 2, "misaligned address"),
    ("write_static<float>", 32, 33, "global-buffer-overflow"),
    ("write_static<float>", 0, -1, "global-buffer-overflow"),
    ("write_dynamic", 32, 33, "heap-buffer-overflow"),
    ("write_registers", 3, 4, "stack-buffer-overflow"),
]

# The same for faults that no sanitizer detects: results differ between launches with equal inputs.
UNSTEADY = [
    ("sum_static", 32, 31),
    ("largest_dynamic", 32, 31),
    ("read_neighbor", 1, 0),
    ("write_from_blocks", 1, 4),
]


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if reason := missing():
        pytest.skip(reason)
    names = list(dict.fromkeys(kernel for kernel, *_ in [*REPORTED, *UNSTEADY]))
    kernels = {HERE / "planted.cu": names}
    return build(tmp_path_factory.mktemp("planted"), kernels, SANITIZERS)


def run(
    planted: Path, *calls: str | int, shape: tuple[int, int, int] | None = None
) -> subprocess.CompletedProcess[str]:
    """Call kernels with numbers, in a process that ends at the first report."""
    words: list[str | int] = []
    for kernel, number in zip(calls[::2], calls[1::2], strict=True):
        words += [kernel, *(shape or SHAPES.get(str(kernel), (1, 1, 0))), number]
    command = [sys.executable, "-c", PROGRAM, str(planted), *map(str, words)]
    return subprocess.run(
        command, env=environment(), capture_output=True, text=True, check=False, timeout=200
    )


@pytest.mark.parametrize(("function", "number", "report"), [(f, n, r) for f, _, n, r in REPORTED])
def test_a_planted_fault_ends_the_process(
    planted: Path, function: str, number: int, report: str
) -> None:
    done = run(planted, function, number)
    assert done.returncode != 0
    assert done.stdout == ""
    assert report in done.stderr
    assert "planted.cu" in done.stderr


def test_the_same_functions_without_a_fault_end_well(planted: Path) -> None:
    calls = [x for function, sound, *_ in [*REPORTED, *UNSTEADY] for x in (function, sound)]
    done = run(planted, *calls)
    assert done.returncode == 0
    assert done.stdout.splitlines() == [f"{function} 0 1" for function in calls[::2]]


@pytest.mark.parametrize(("function", "number"), [(f, n) for f, _, n in UNSTEADY])
def test_a_result_that_depends_on_chance_changes(planted: Path, function: str, number: int) -> None:
    done = run(planted, function, number)
    assert done.returncode == 0
    assert done.stdout in {f"{function} 0 {count}\n" for count in range(2, 41)}


def test_an_empty_grid_is_refused_as_cuda_refuses_it(planted: Path) -> None:
    assert run(planted, "write", 0).stdout == "write 0 1\n"
    refused = run(planted, "write", 0, shape=(0, 1, 0))
    assert refused.stdout.startswith("write 1 ")  # CUDA_ERROR_INVALID_VALUE


def test_every_compiled_source_is_checked() -> None:
    """A new C++ file in the package must be added to the sanitizer build."""
    suffixes = {".c", ".cc", ".cpp", ".cxx", ".cu", ".cuh", ".h", ".hpp", ".hip", ".pyx", ".rs"}
    compiled = {path for path in tracked_files() if path.suffix in suffixes}
    compiled = {name(path) for path in compiled if not name(path).startswith("tests/")}
    headers = {path for path in compiled if path.endswith(".cuh")}
    assert compiled - headers == {name(path) for path in source_files()}
    included = "".join(path.read_text() for path in source_files()[0].parent.iterdir())
    for header in headers:
        assert f'#include "{Path(header).name}"' in included


def outcome(findings: list[str], failure: str, *calls: str, **counts: int) -> Outcome:
    return Outcome(counts, findings, frozenset(calls), ["SKIPPED [1] a.py:1"], 3.4, failure)


def test_the_table_shows_what_was_run_and_found() -> None:
    clean = outcome([], "", passed=5, skipped=1, deselected=29)
    assert row("a.py", clean).split() == ["a.py", "5", "0", "1", "29", "0", "3"]
    failed = outcome(["a.cu:3: runtime error: b"], "said", passed=5, failed=2, error=1)
    assert row("b.py", failed).split() == ["b.py", "5", "3", "0", "0", "1", "3"]
    died = outcome([], "said")
    assert row("c.py", died).split() == ["c.py", "0", "0", "0", "0", "0", "3", "died"]


def test_the_summary_is_red_after_a_finding_a_failure_or_a_kernel_that_nothing_calls() -> None:
    kernels = {"x", "y"}
    sound = [outcome([], "", "x", passed=1), outcome([], "", "y", passed=1)]
    skipped = 2 * ["SKIPPED [1] a.py:1"]
    assert summary(sound, kernels) == ([*skipped, "kernels called: 2 of 2"], True)
    lines, is_clean = summary([*sound, outcome(["a.cu:3: runtime error: b"], "")], kernels)
    assert lines[0] == "a.cu:3: runtime error: b"
    assert not is_clean
    lines, is_clean = summary([*sound, outcome([], "said")], kernels)
    assert lines[0] == "said"
    assert not is_clean
    lines, is_clean = summary(sound[:1], kernels)
    assert lines == [skipped[0], "kernels called: 1 of 2", "no test calls y"]
    assert not is_clean
