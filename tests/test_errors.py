"""Errors for lack of memory, as each library words them."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pyarrow
import pytest

from megatron import errors
from megatron.data.text_stream import NoTokensError
from megatron.detoxify.perspective import ServiceError
from megatron.errors import DataError, ShortageError, UserError, shortage_errors, shortage_of
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
    OSError("ZSTD decompress failed: Allocation error : not enough memory"),
    ImportError("libtorch_cpu.so: failed to map segment from shared object"),
]


def test_exit_codes_stay_what_job_scripts_expect() -> None:
    found = {
        name: kind.exit_code
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, errors.UserError)
    }
    assert found == {
        "UserError": 1,
        "CheckpointError": 4,
        "HangError": 5,
        "DataError": 6,
        "NumericsError": 7,
        "StorageError": 8,
        "ConfigError": 9,
        "ShortageError": 10,
        "CrashLoopError": 11,
        "SuspiciousResultError": 16,
        "TransientFaultError": 17,
        "OutputClosedError": 141,
    }
    assert (errors.EXIT_OK, errors.EXIT_SAVED_ON_SIGNAL) == (0, 3)


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
    told = "too many open files: raise the limit"
    with pytest.raises(ShortageError, match=told), shortage_errors(""):
        read(errno.EMFILE)
    with pytest.raises(DataError), shortage_errors(""):
        read(errno.EIO)


def test_a_shortage_below_an_error_of_any_kind_is_recognized() -> None:
    def load() -> None:
        try:
            try:
                raise ImportError("x.so: failed to map segment from shared object")
            except ImportError as error:
                raise DataError("a tokenizer's library fails") from error
        finally:
            raise AttributeError("module has no attribute 'x'")

    with pytest.raises(ShortageError), shortage_errors(""):
        load()
    hidden = DataError("x")
    hidden.__context__, hidden.__suppress_context__ = MemoryError(), True  # raised `from None`
    assert shortage_of(hidden) is None
    assert shortage_of(DataError("the file says: out of memory")) is None


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


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux has this device")
def test_a_line_that_could_not_be_written_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "log"
    with open("/dev/full", "w") as stream, path.open("w") as log, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", stream)
        errors.print_to_stderr("lost")
        assert os.readlink(f"/proc/self/fd/{stream.fileno()}") == "/dev/full"
        os.dup2(log.fileno(), stream.fileno())  # the disk has room again
        errors.print_to_stderr("kept")
    assert path.read_text() == "kept\n"


_WAYS_TO_END = [
    "os.abort()",  # std::bad_alloc, Rust
    "os._exit(1)",  # OpenBLAS
    "os._exit(127)",  # glibc's loader
    "os.kill(os.getpid(), signal.SIGSEGV)",
    "raise MemoryError",
    "raise ImportError('x.so: failed to map segment from shared object')",
    "bytearray(2 << 30)",
]


@pytest.mark.parametrize("end", _WAYS_TO_END)
@pytest.mark.parametrize("block", ["guard_imports()", "run_command(work)"])
def test_whatever_ends_an_import_under_a_limit_is_one_line(end: str, block: str) -> None:
    script = f"""
import os, resource, signal
from megatron.command import guard_imports, rehearsed, run_command
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, -1))
def work():
    with rehearsed():
        load()
def load():
    print("a library says something", flush=True)
    {end}
code = {block}
if code is not None:
    raise SystemExit(code)
load()
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip
    assert done.returncode == ShortageError.exit_code, done.stderr
    assert (done.stdout, done.stderr.count("\n")) == ("", 1)
    assert done.stderr.startswith("error: out of memory (`ulimit -v` gives each process 1.07 GB).")


@pytest.mark.parametrize("block", ["guard_imports()", "run_command(work)"])
@pytest.mark.parametrize(
    ("end", "code", "said"),
    [
        ("raise SystemExit(7)", 7, ""),
        ("raise DataError('damaged')", 6, "DataError: damaged"),
        ("import nothing_of_this_name", 1, "ModuleNotFoundError"),
        ("pass", 0, ""),
    ],
)
def test_a_rehearsal_changes_nothing_else(block: str, end: str, code: int, said: str) -> None:
    script = f"""
import resource
from megatron.command import guard_imports, rehearsed, run_command
from megatron.errors import DataError
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, -1))
def work():
    with rehearsed():
        load()
def load():
    print("loads", flush=True)
    {end}
if {block} is None:
    load()
run_command(lambda: print("begins"))
"""
    if "run_command" in block:
        script = script.replace(
            "if run_command(work) is None:\n    load()", "code = run_command(work)"
        )
        script += "raise SystemExit(code)"
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip
    if "DataError" in end:  # only `run_command` turns it into a line
        code, said = (6, "error: damaged") if "run_command" in block else (1, said)
    assert done.returncode == code, done.stderr
    assert said in done.stderr
    assert done.stdout.startswith("loads\n")
    assert done.stdout.count("loads") == 1


def test_a_rehearsal_does_not_continue_where_the_command_handles_its_error(tmp_path: Path) -> None:
    script = """
import resource, sys
from megatron.command import rehearsed
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, -1))
try:
    with rehearsed():
        import nothing_of_this_name
except ImportError:
    with open(sys.argv[1], "a") as file:
        file.write("without it\\n")
"""
    file = tmp_path / "work"
    subprocess.run([sys.executable, "-c", script, str(file)], cwd=ROOT, check=True, timeout=240)
    assert file.read_text() == "without it\n"


@pytest.mark.parametrize("script", ["pretrain_gpt.py", "tools/preprocess_data.py"])
def test_no_limit_of_memory_breaks_the_start_of_a_script(script: str) -> None:
    """Somewhere between the limits, the loading of each library is cut off."""
    for limit in range(40, 600, 56):
        words = ["sh", "-c", f'ulimit -v {limit * 1000} && exec "$@"', "sh", sys.executable, script]
        words += ["--input", "x", "--output-prefix", "x", "--tokenizer-type", "NullTokenizer"]
        done = subprocess.run(
            [*words, "--vocab-size", "9"], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert done.returncode in (ShortageError.exit_code, DataError.exit_code, 9), limit
        assert done.stderr.startswith("error: "), limit
        assert "Traceback" not in done.stderr, limit


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


@pytest.mark.parametrize(
    ("limit", "told"),
    [(-1, "out of memory. "), (2_500_000_000, "gives each process 2.50 GB). ")],
)
def test_a_limit_of_memory_is_reported_if_there_is_one(
    limit: int, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(errors.resource, "getrlimit", lambda _: (limit, -1))
    shortage = shortage_of(MemoryError())
    assert shortage is not None
    assert told in str(shortage)


def test_an_error_has_the_exit_code_of_its_base() -> None:
    """Otherwise a scheduler would restart a run that can only fail again."""
    assert NoTokensError("").exit_code == DataError.exit_code == 6
    assert UserError("").exit_code == ServiceError("").exit_code == 1
