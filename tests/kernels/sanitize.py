"""Run the kernel tests on the emulator with AddressSanitizer and UndefinedBehaviorSanitizer.

    python -m tests.kernels.sanitize                             every test of emulated kernels
    python -m tests.kernels.sanitize tests/kernels/test_norm.py  any arguments of pytest

The kernels and the host code that launches them are compiled with both sanitizers. A read or write
outside a tensor, or undefined behavior, ends the run with a report of the source line. Needs nvcc
(for its headers) and g++ with libasan and libubsan.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence

SANITIZERS = "address,undefined"
_LIBRARIES = ("libasan.so", "libubsan.so", "libstdc++.so")


def environment() -> Mapping[str, str]:
    """Return the environment of a process that loads a library with sanitizers."""
    found = []
    for name in _LIBRARIES:
        command = ["g++", f"-print-file-name={name}"]
        found.append(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return {
        **os.environ,
        "LD_PRELOAD": ":".join(path.strip() for path in found),
        "ASAN_OPTIONS": "detect_leaks=0",  # Python frees little at its end
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "MEGATRON_TEST_SANITIZERS": SANITIZERS,
        "OMP_NUM_THREADS": "1",
    }


def main(words: Sequence[str]) -> int:
    """Run pytest and return its exit code."""
    chosen = words or ["tests/kernels"]
    command = [sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", *chosen]
    return subprocess.run(command, env=environment(), check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
