"""Run the kernel tests on the emulator with AddressSanitizer and UndefinedBehaviorSanitizer.

    python -m tests.kernels.sanitize                             every test of emulated kernels
    python -m tests.kernels.sanitize tests/kernels/test_norm.py  some of them

The kernels and the host code that launches them are compiled with both sanitizers. A read or write
outside a tensor, or undefined behavior, ends the run with a report of the source line. Needs nvcc
(for its headers) and g++ with libasan and libubsan.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Mapping

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


def main() -> int:
    """Run pytest and return its exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("paths", nargs="*", default=["tests/kernels"], help="files of tests")
    options = ["-q", "-s", "-x", "-p", "no:cacheprovider", "--timeout", "1200"]
    command = [sys.executable, "-m", "pytest", *options, *parser.parse_args().paths]
    return subprocess.run(command, env=environment(), check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
