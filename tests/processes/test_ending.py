"""Requests to exit: signals and the clock."""

import os
import signal
import subprocess
import sys

import pytest

from megatron import command
from megatron.errors import EXIT_OK, EXIT_SAVED_ON_SIGNAL
from megatron.processes.ending import ExitRequest
from megatron.processes.process import run_process
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


def test_time_is_up():
    request = ExitRequest(handle_signals=False, duration_minutes=0)
    assert request.is_requested
    assert request.code == EXIT_OK
    assert "--exit-duration-in-mins 0" in request.reason
    assert not ExitRequest(handle_signals=False, duration_minutes=60).is_requested


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
