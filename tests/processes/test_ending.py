"""Requests to exit: signals and the clock."""

import json
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from megatron import command
from megatron.errors import (
    EXIT_OK,
    EXIT_SAVED_ON_SIGNAL,
    ConfigError,
    NumericsError,
    OutputClosedError,
    StorageError,
)
from megatron.processes.ending import ExitRequest, end_run, report
from megatron.processes.launch import Launch
from megatron.processes.process import run_process
from megatron.processes.watchdog import GRACE, LOST, Verdict
from tests.repository import ROOT


@pytest.fixture
def _handlers():
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("_handlers")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_becomes_a_request(number):
    request = ExitRequest(handle_signals=True, duration_minutes=None)
    assert not request.is_requested
    os.kill(os.getpid(), number)
    assert request.is_requested
    assert request.code == EXIT_SAVED_ON_SIGNAL
    assert signal.Signals(number).name in request.reason


@pytest.mark.usefixtures("_handlers")
def test_impatient_interrupts_end_the_process():
    ExitRequest(handle_signals=True, duration_minutes=None)
    os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)


# Python calls exit functions before it removes signal handlers, and this object after it.
_LATE = """
import os, signal, sys
from megatron.errors import EXIT_OK, EXIT_SAVED_ON_SIGNAL
from megatron.processes.ending import ExitRequest

class Late:
    def __del__(self, kill=os.kill, pid=os.getpid(), number=signal.SIGTERM):
        kill(pid, number)

sys.modules["late"] = Late()
request = ExitRequest(handle_signals=True, duration_minutes=None)
if sys.argv[1:]:
    request.close()
sys.exit(3)
"""


@pytest.mark.parametrize(("words", "code"), [(["close"], 3), ([], -signal.SIGTERM)])
def test_a_signal_during_the_exit_does_not_change_its_code(words, code):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", _LATE, *words], env=environment, timeout=60, check=False
    )
    assert done.returncode == code


_BROKEN = dist.DistBackendError("[/src/pair.cc:553] Connection closed by peer. See the logs.")
_STEP = "iteration 4, optimizer step"


@pytest.mark.parametrize(
    ("error", "iteration", "waits", "silent", "ending"),
    [
        (StorageError("the disk is full:\nmake room"), 4, True, set(), (8, "the disk is full")),
        (StorageError(""), 4, True, set(), (8, "StorageError")),
        (ValueError("no\nway"), 0, False, set(), (1, "ValueError in optimizer step: no")),
        (ValueError("no"), 4, False, {1}, (1, f"ValueError in {_STEP}: no")),
        (
            ValueError("no. More"),
            4,
            True,
            {1},
            (1, f"rank 1 ended without reporting an error, in {_STEP} (no)"),
        ),
        (
            _BROKEN,
            4,
            False,
            set(),
            (1, f"a connection broke, in {_STEP} (Connection closed by peer)"),
        ),
    ],
)
@pytest.mark.parametrize("is_own", [True, False])
def test_why_a_run_ends(error, iteration, waits, silent, ending, is_own, capsys):
    """Only the process that ends the run prints its error, unless it blames another process."""
    calls = []

    class Watched:
        def end_run(self, code, reason, *, blames_peer):
            calls.append(blames_peer)
            return Verdict(code, 0, reason(frozenset(silent))), is_own

        def exit_message(self, verdict):
            return None if is_own else f"ends: {verdict.reason}"

        def end_within(self, *arguments):
            calls.append(arguments)

        def delay_exit(self):
            calls.append("waits")

    waits_for = object() if waits else None
    journal = SimpleNamespace(position=(0, iteration, "optimizer step"), waits_for=waits_for)
    raised = end_run(error, Launch(rank=1, world_size=2), journal, Watched())
    code, reason = ending
    blames_peer = not isinstance(error, StorageError) and (waits or error is _BROKEN)
    assert raised.code == code
    assert calls == [blames_peer, (GRACE, code, None), "waits"]
    told = capsys.readouterr().err
    if not is_own:
        assert told == f"ends: {reason}\n"
    elif blames_peer:
        assert told == f"[rank 1] error: {reason}: {LOST}\n"
    elif isinstance(error, StorageError):
        assert told == f"[rank 1] error: {error}\n"
    else:
        assert told.startswith("[rank 1] error: this is a bug, not a mistake on your part\n")
        assert told.endswith(f"ValueError: {error}\n")


@pytest.mark.parametrize(
    ("error", "launch", "told"),
    [
        (ConfigError(["--a: no", "--b: no"]), Launch(1, 2), "error: --a: no\nerror: --b: no\n"),
        (NumericsError("not finite"), Launch(1, 2), "error: not finite\n"),
        (StorageError("full"), Launch(1, 2), "[rank 1] error: full\n"),
        (StorageError("full"), Launch(), "error: full\n"),
    ],
)
def test_an_error_of_all_ranks_names_none(error, launch, told, capsys, tmp_path, monkeypatch):
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    report(error, launch)
    assert capsys.readouterr().err == told
    message = json.loads(file.read_text())["message"]  # for torchrun's own report
    assert message["message"] == told.rstrip()
    assert abs(int(message["extraInfo"]["timestamp"]) - time.time()) < 60


def test_time_is_up():
    request = ExitRequest(handle_signals=False, duration_minutes=0)
    assert ExitRequest(False, None).reason == "another rank asked to exit"
    assert request.is_requested
    assert request.code == EXIT_OK
    assert "--exit-duration-in-mins 0" in request.reason
    assert not ExitRequest(handle_signals=False, duration_minutes=60).is_requested


def test_a_log_that_nobody_reads_is_a_request():
    request = ExitRequest(handle_signals=False, duration_minutes=None)
    assert request.code == EXIT_OK
    request.report_unread_log()
    assert (request.code, request.is_requested) == (OutputClosedError.exit_code, True)
    assert request.reason == "nobody is reading this log anymore"


def test_a_limit_is_in_minutes(monkeypatch):
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    request = ExitRequest(handle_signals=False, duration_minutes=2)
    now += 119.9
    assert not request.is_requested
    now = 220.0
    assert request.is_requested


def test_a_file_that_appears_is_a_request(tmp_path, monkeypatch):
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    request = ExitRequest(False, None, str(tmp_path / "stop"))
    assert not request.is_requested
    (tmp_path / "stop").touch()
    assert not request.is_requested  # it checks once a second
    assert request.reason == f"--kill-switch-file {tmp_path}/stop exists"
    now += 1.0
    assert request.is_requested
    (tmp_path / "stop").unlink()
    assert request.is_requested
    assert request.code == 0


@pytest.mark.usefixtures("_handlers")
def test_work_that_has_begun_can_clean_up_after_ctrl_c():
    signal.signal(signal.SIGINT, command._end)  # as imports are guarded

    def work(_):
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        raise KeyboardInterrupt

    assert run_process([], work) == 130
