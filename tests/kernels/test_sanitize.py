"""Planted faults, which the build of `python -m tests.kernels.sanitize` must find."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.emulation import HERE, build
from tests.kernels.sanitize import SANITIZERS, environment

# Eight floats from malloc, whose surroundings AddressSanitizer watches.
PROGRAM = """
import ctypes, sys
malloc = ctypes.CDLL(None).malloc
malloc.restype, malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
planted = getattr(ctypes.CDLL(sys.argv[1]), sys.argv[2])
planted.argtypes = [ctypes.c_void_p, ctypes.c_int]
print("returned", planted(malloc(32), int(sys.argv[3])))
"""


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("nvcc") is None or shutil.which("g++") is None:
        pytest.skip("needs nvcc (for its headers) and g++")
    return build(tmp_path_factory.mktemp("planted"), [HERE / "planted.cu"], SANITIZERS)


@pytest.mark.parametrize(
    ("function", "number", "report"),
    [
        ("planted_write", 7, ""),
        ("planted_write", 8, "heap-buffer-overflow"),
        ("planted_write", -1, "heap-buffer-overflow"),
        ("planted_shift", 30, ""),
        ("planted_shift", 32, "shift exponent 32 is too large"),
        ("planted_shift", -1, "shift exponent -1 is negative"),
    ],
)
def test_a_planted_fault_ends_the_process(
    planted: Path, function: str, number: int, report: str
) -> None:
    command = [sys.executable, "-c", PROGRAM, str(planted), function, str(number)]
    done = subprocess.run(
        command, env=environment(), capture_output=True, text=True, check=False, timeout=200
    )
    assert (done.stdout == "returned 0\n") == (done.returncode == 0) == (report == "")
    assert report in done.stderr
    if report:
        assert "planted.cu" in done.stderr
