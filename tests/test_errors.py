"""Errors that say memory is short, as each library words them."""

from __future__ import annotations

import errno
import os
import subprocess
import sys

import pyarrow
import pytest

from megatron.errors import DataError, ShortageError, shortage_errors, shortage_of
from tests.repository import ROOT

_SAID = [
    MemoryError(),
    OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)),
    pyarrow.ArrowMemoryError("malloc of size 64 failed"),
    RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 131072 bytes"),
    RuntimeError("CUDA out of memory. Tried to allocate 1.20 GiB"),
    RuntimeError("unable to mmap 4194304 bytes from file <x>: Cannot allocate memory (12)"),
    RuntimeError("can't start new thread"),
    RuntimeError("std::bad_alloc"),
    ImportError("libtorch_cpu.so: failed to map segment from shared object"),
]


@pytest.mark.parametrize("error", _SAID, ids=lambda error: type(error).__name__)
def test_a_shortage_is_recognized(error: Exception) -> None:
    shown = pytest.raises(ShortageError, match=r"^out of memory.*Use fewer of them")
    with shown, shortage_errors("Use fewer of them"):
        raise error


def test_a_shortage_below_a_file_s_error_is_recognized() -> None:
    def read(number: int) -> None:
        try:
            raise OSError(number, os.strerror(number))
        except OSError as error:
            raise DataError("unreadable") from error

    with pytest.raises(ShortageError), shortage_errors(""):
        read(errno.ENOMEM)
    with pytest.raises(DataError), shortage_errors(""):
        read(errno.EIO)


def test_other_errors_stay_themselves() -> None:
    named = ShortageError("more precise")
    assert shortage_of(named) is named
    for error in (ValueError("memory"), KeyError("x"), DataError("x"), OSError(errno.ENOSPC, "x")):
        assert shortage_of(error) is None


def test_the_amount_and_the_limit_are_named() -> None:
    script = """
import resource
from megatron.errors import shortage_of
resource.setrlimit(resource.RLIMIT_AS, (4_000_000_000, -1))
print(shortage_of(RuntimeError("Tried to allocate 1.20 GiB, out of memory"), "Use less"))
"""
    said = subprocess.check_output([sys.executable, "-c", script], cwd=ROOT, text=True)
    limit = "(`ulimit -v` gives each process 4.00 GB)"
    assert said == f"out of memory: cannot allocate 1.20 GiB {limit}. Use less\n"


def test_a_library_that_cannot_be_loaded_for_lack_of_memory_is_one_line() -> None:
    script = """
from megatron.command import guard_imports
guard_imports()
raise ImportError("libtorch_cpu.so: failed to map segment from shared object")
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == ShortageError.exit_code
    assert done.stderr.startswith("error: out of memory")
    assert done.stderr.count("\n") == 1
