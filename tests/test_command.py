"""How commands end if nobody reads their output."""

import contextlib
import gc
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

from megatron import command
from megatron.command import format_panel, prepare_streams, print_line, run_command
from megatron.errors import CheckpointError, ConfigError, drop_unwritten
from tests.repository import ROOT

PRINTS = """
import sys
from megatron.command import run_command
sys.exit(run_command(lambda: print("line\\n" * {count})))
"""


def test_a_reader_that_leaves_ends_a_command_quietly() -> None:
    for count in (1, 100_000):
        process = subprocess.Popen(
            [sys.executable, "-c", PRINTS.format(count=count)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert process.stdout is not None
        process.stdout.close()
        _, said = process.communicate(timeout=240)
        assert (process.returncode, said) == (141, b"")


def test_a_run_whose_log_nobody_reads_says_why_it_ends() -> None:
    script = """
import sys
from megatron.command import print_line
from megatron.processes.process import run_process
sys.exit(run_process([], lambda launch: print_line("iteration 1")))
"""
    process = subprocess.Popen(
        [sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.close()
    _, said = process.communicate(timeout=240)
    assert process.returncode == 141
    assert said.startswith(b"error: the program that read this run's log has ended")
    assert b"Traceback" not in said


@pytest.mark.parametrize(("place", "code"), [("inside", 0), ("after", 141)])
def test_a_run_outlives_its_log_only_until_its_training_is_over(place: str, code: int) -> None:
    script = f"""
import sys
from megatron.command import print_line, surviving_closed_output
from megatron.processes.process import run_process
def work(launch):
    with surviving_closed_output(lambda: print("told", file=sys.stderr)):
        {'print_line("iteration 1")' if place == "inside" else "pass"}
    print_line("iteration 2")
    return 0
sys.exit(run_process([], work))
"""
    process = subprocess.Popen(
        [sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.close()
    _, said = process.communicate(timeout=240)
    assert process.returncode == code
    assert said.count(b"the program that read this run's log has ended") == 1
    assert (b"told" in said) == (place == "inside")


def test_lines_are_printed_where_stderr_is_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    print_line("iteration 1")
    assert capsys.readouterr().out == "iteration 1\n"


def test_streams_that_are_open_at_the_start_stay_the_only_files() -> None:
    gc.collect()  # no file of an earlier test is closed in the meantime
    before = os.listdir("/proc/self/fd")
    prepare_streams()
    with open(os.devnull, "w") as stream:
        drop_unwritten(stream)
    assert sorted(os.listdir("/proc/self/fd")) == sorted(before)


def test_streams_that_were_closed_at_the_start_are_the_null_device() -> None:
    """Libraries are covered too: the next file to be opened does not get the streams' numbers."""
    script = """
import os, sys, tempfile
from megatron.command import run_command
def work():
    print("out"); print("err", file=sys.stderr); sys.stderr.isatty()
    with tempfile.TemporaryFile() as file:
        os.write(1, b"x"); os.write(2, b"x")
        return 7 if file.fileno() > 2 and os.fstat(file.fileno()).st_size == 0 else 1
sys.exit(run_command(work))
"""
    command = ["sh", "-c", 'exec "$0" -c "$1" <&- >&- 2>&-', sys.executable, script]
    assert subprocess.run(command, cwd=ROOT, check=False).returncode == 7


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux has this device")
def test_a_run_continues_where_the_disk_of_its_log_is_full() -> None:
    script = """
import sys
from megatron.command import print_line
from megatron.processes.process import run_process
from megatron.errors import warn
from megatron.processes.process import print_notices
def work(launch):
    print_notices(["iteration 0"], launch)
    warn("of it")
    print_line("iteration 1")
    print_line("iteration 2")
    return 0
sys.exit(run_process([], work))
"""
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-c", script], cwd=ROOT, stdout=full, stderr=subprocess.PIPE,
            text=True, check=False,
        )  # fmt: skip
        subprocess.run(
            [sys.executable, "-c", script], cwd=ROOT, stdout=full, stderr=full, check=True
        )
    assert done.returncode == 0  # 120 means lines were left that could not be written
    full_log = "(log: No space left on device)"
    said = [f"{full_log} note: iteration 0", "WARNING: of it"]
    assert done.stderr.splitlines() == [
        *said, *(f"{full_log} iteration {number}" for number in (1, 2))
    ]  # fmt: skip


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux has this device")
def test_an_error_keeps_its_exit_code_where_the_disk_of_its_log_is_full() -> None:
    script = """
import sys
from megatron.command import run_command
from megatron.command import format_panel, run_command
from megatron.errors import CheckpointError, ConfigError
from megatron.processes.process import run_process
def work(*launch):
    raise CheckpointError("not there")
sys.exit(run_command(work) if len(sys.argv) > 1 else run_process([], work))
"""
    for more in ([], ["command"]):
        with open("/dev/full", "wb") as full:
            done = subprocess.run(
                [sys.executable, "-c", script, *more],
                cwd=ROOT, stdout=full, stderr=full, check=False,
            )  # fmt: skip
        assert done.returncode == CheckpointError.exit_code


_TORCH = """
import os, signal, sys
os.kill(os.getpid(), signal.SIGINT)
sys.exit(7)
"""
_LONG_IMPORTS = (
    "pretrain_gpt.py",
    "pretrain_bert.py",
    "pretrain_t5.py",
    "tasks/main.py",
    "tools/generate_samples_gpt.py",
    "tools/run_text_generation_server.py",
)


def test_an_interruption_while_torch_is_imported_ends_a_script_in_silence(tmp_path: Path) -> None:
    """No traceback of the interrupted import is shown, and SIGINT stays ignored if it was."""
    (tmp_path / "torch.py").write_text(_TORCH)
    variables = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    for trap, code in (("", 130), ('trap "" INT; ', 7)):
        command = ["sh", "-c", f'{trap}exec "$0" "$@"', sys.executable]
        processes = {
            script: subprocess.Popen(
                [*command, ROOT / script], env=variables, stderr=subprocess.PIPE, text=True
            )
            for script in _LONG_IMPORTS
        }
        for script, process in processes.items():
            assert (process.communicate(timeout=240)[1], process.returncode) == ("", code), script


def test_an_interruption_of_a_run_unwinds_and_ends_it_in_silence() -> None:
    script = """
import os, signal, sys
from megatron.command import guard_imports, run_command
guard_imports()
from megatron.processes.process import run_process
def work(*launch):
    try:
        os.kill(os.getpid(), signal.SIGINT)
    finally:
        print("temporary files go", flush=True)
    return 7
sys.exit(run_command(work) if len(sys.argv) > 1 else run_process([], work))
"""
    for more in ([], ["command"]):
        done = subprocess.run(
            [sys.executable, "-c", script, *more],
            cwd=ROOT, capture_output=True, text=True, check=False,
        )  # fmt: skip
        said = (done.stdout, done.stderr, done.returncode)
        assert said == ("temporary files go\n", "", 130), more


def test_a_second_sigterm_does_not_stop_the_removal_of_temporary_files() -> None:
    """`timeout` sends two: one to the command and one to its group."""
    script = """
import os, signal, sys
from megatron.command import run_command
def work():
    try:
        os.kill(os.getpid(), signal.SIGTERM)
    finally:
        os.kill(os.getpid(), signal.SIGTERM)
        print("temporary files go", flush=True)
sys.exit(run_command(work))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr, done.returncode) == ("temporary files go\n", "", 143)


@pytest.mark.parametrize("is_ignored", [False, True])
def test_a_closed_terminal_ends_a_command_without_temporary_files(is_ignored: bool) -> None:
    """`nohup` ignores the signal. The tests themselves may run under it."""
    script = "" if is_ignored else "import signal; signal.signal(signal.SIGHUP, signal.SIG_DFL)"
    script += """
import os, signal, sys
from megatron.command import run_command
def work():
    try:
        os.kill(os.getpid(), signal.SIGHUP)
    finally:
        print("temporary files go", flush=True)
    print("done")
sys.exit(run_command(work))
"""
    command = [sys.executable, "-c", script]
    done = subprocess.run(
        ["nohup", *command] if is_ignored else command,
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    ending = ("temporary files go\ndone\n", 0) if is_ignored else ("temporary files go\n", 129)
    assert (done.stdout, done.returncode) == ending


def test_other_broken_pipes_are_errors() -> None:
    script = PRINTS.replace(
        'print("line\\n" * {count})', "(_ for _ in ()).throw(BrokenPipeError())"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, check=False
    )
    assert done.returncode == 1
    assert b"BrokenPipeError" in done.stderr


def test_an_immediate_end_loses_no_output() -> None:
    script = """
import atexit, sys
from megatron.command import exit_immediately
atexit.register(print, "late")
sys.stdout.write("out")
sys.stderr.write("err")
exit_immediately(7)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr, done.returncode) == ("out", "err", 7)


def test_a_rehearsal_needs_room_for_what_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []

    def refuse(*given: int) -> NoReturn:
        asked.append(given)
        raise OSError

    def leave(code: int) -> NoReturn:
        raise SystemExit(code)

    with monkeypatch.context() as patch:  # this process takes the part of the forked one
        patch.setattr(command.resource, "getrlimit", lambda _: (1 << 30, -1))
        patch.setattr(command.atexit, "register", lambda *_: None)
        for name, value in (("fork", 0), ("open", -1), ("dup2", 0)):
            patch.setattr(command.os, name, lambda *_, value=value: value)
        patch.setattr(command.os, "_exit", leave)
        patch.setattr(command.mmap, "mmap", refuse)
        with pytest.raises(SystemExit, match="10"):
            command._begin_rehearsal()
    assert asked == [(-1, 16 << 20)]


def test_a_panel_has_aligned_values_between_rules() -> None:
    assert format_panel("title", [("a", "1"), ("long name", "2")]) == (
        "--------------\ntitle\n--------------\n  a          1\n  long name  2\n--------------"
    )
    assert format_panel("title" * 5, [("a", "1")]).startswith("-" * 25 + "\n")
    wide = format_panel("title", [("a", "x" * 200)]).splitlines()
    assert [len(line) for line in wide] == [100, 5, 100, 205, 100]


@pytest.mark.parametrize(
    ("work", "code", "said"),
    [
        (lambda: None, 0, ""),
        (lambda: 7, 7, ""),
        (lambda: _raise(KeyboardInterrupt()), 130, ""),
        (lambda: _raise(ConfigError(["one", "two"])), 9, "error: one\ntwo\n"),
        (lambda: _raise(ValueError("out of memory")), 10, "error: out of memory"),
    ],
)
def test_the_exit_code_of_a_command(
    work: Callable[[], int | None], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    assert run_command(work) == code
    assert signal.getsignal(signal.SIGTERM) is before
    assert capsys.readouterr().err.startswith(said)


def test_other_errors_of_a_command_are_our_bugs() -> None:
    with pytest.raises(ValueError, match="a bug"):
        run_command(lambda: _raise(ValueError("a bug")))


def _raise(error: BaseException) -> NoReturn:
    raise error


def test_a_full_pipe_is_not_a_closed_one() -> None:
    """A broken pipe of something else is an error, even if stdout accepts nothing at the moment."""
    script = PRINTS.replace(
        'print("line\\n" * {count})', "(_ for _ in ()).throw(BrokenPipeError())"
    )
    reader, writer = os.pipe()
    try:
        os.set_blocking(writer, False)
        with contextlib.suppress(BlockingIOError):
            while os.write(writer, bytes(1 << 16)):
                pass
        done = subprocess.run(
            [sys.executable, "-c", script],
            cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, check=False,
        )  # fmt: skip
    finally:
        os.close(reader)
        os.close(writer)
    assert done.returncode == 1
    assert b"BrokenPipeError" in done.stderr


def test_a_line_is_printed_at_once_in_any_encoding() -> None:
    """It must not wait in a buffer for the end of a run, which may be killed."""
    script = """
import os
from megatron.command import prepare_streams, print_line
prepare_streams()
print_line("a line in \\u6771\\u4eac")
os._exit(0)
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT, capture_output=True, check=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUNBUFFERED": ""},
    )  # fmt: skip
    assert done.stdout == b"a line in \\u6771\\u4eac\n"
