"""One job per folder: a second is refused, and a dead one's lock is taken over."""

import errno
import json
import os
import signal
import socket
import time
from pathlib import Path

import pytest

from megatron.checkpoint.lock import LOCK, _start_time, save_lock
from megatron.errors import CheckpointError, StorageError
from tests.checkpoint.states import open_below


def _hold(root):
    """Start a child that holds the folder until it is killed; return its process ID."""
    ready, done = os.pipe()
    child = os.fork()
    if child == 0:
        with save_lock(root):
            os.write(done, b"x")
            time.sleep(600)
        os._exit(0)
    assert os.read(ready, 1) == b"x"
    os.close(ready)
    os.close(done)
    return child


def _end(child):
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def test_a_second_job_is_refused_until_the_first_has_gone(tmp_path):
    child = _hold(tmp_path)
    try:
        for _ in range(2):
            refusal = pytest.raises(CheckpointError, match=rf"process {child} on .*--save")
            with refusal, save_lock(tmp_path):
                pass
    finally:
        _end(child)
    with save_lock(tmp_path) as file:  # a killed process's lock is taken over
        assert json.loads(file.read_text())["pid"] == os.getpid()


def test_a_process_of_another_user_may_live(tmp_path, monkeypatch):
    def no_locks(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    def not_ours(*_):
        raise PermissionError

    monkeypatch.setattr("megatron.checkpoint.lock.fcntl.lockf", no_locks)
    monkeypatch.setattr(os, "kill", not_ours)
    holder = {"host": socket.gethostname(), "pid": 1, "started": "hidden"}
    (tmp_path / LOCK).write_text(json.dumps(holder))
    with pytest.raises(CheckpointError, match="process 1 on"), save_lock(tmp_path):
        pass


def test_a_release_lets_the_next_in(tmp_path):
    with save_lock(tmp_path / "new" / "folder") as file:
        assert open_below(tmp_path) == [str(file)]
    assert open_below(tmp_path) == []
    assert file.stat().st_mode & 0o711 == 0o600
    assert not file.read_text()
    _end(_hold(tmp_path / "new" / "folder"))


@pytest.mark.parametrize(
    ("holder", "refused"),
    [
        ({"host": "elsewhere", "pid": 1, "started": "1"}, True),
        ({"host": socket.gethostname(), "pid": 1, "started": "not its start"}, False),
        ({"host": socket.gethostname(), "pid": 1 << 22, "started": "1"}, False),
        ({"host": socket.gethostname(), "pid": 1 << 22, "started": None}, False),
        # A container's processes have the same IDs in its next run.
        (
            {"host": socket.gethostname(), "pid": os.getpid(), "started": _start_time(os.getpid())},
            False,
        ),
        ({"host": socket.gethostname(), "pid": "1"}, False),
        ({"pid": 1}, False),
        ("words", False),
    ],
)
def test_what_the_file_says_decides_where_there_are_no_locks(
    tmp_path, monkeypatch, holder, refused
):
    def no_locks(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("megatron.checkpoint.lock.fcntl.lockf", no_locks)
    (tmp_path / LOCK).write_text(json.dumps(holder))
    if refused:
        with (
            pytest.raises(CheckpointError, match="process 1 on elsewhere"),
            save_lock(tmp_path),
        ):
            pass
        assert json.loads((tmp_path / LOCK).read_text()) == holder
    else:
        with save_lock(tmp_path):
            pass


def test_a_process_is_known_by_its_start_where_there_are_no_locks(tmp_path, monkeypatch):
    child = _hold(tmp_path)
    holder = json.loads((tmp_path / LOCK).read_text())
    assert (holder["host"], holder["pid"]) == (socket.gethostname(), child)
    fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
    assert holder["started"] == fields[22 - 3]  # proc(5) also counts the two fields before these

    def no_locks(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("megatron.checkpoint.lock.fcntl.lockf", no_locks)
    try:
        with pytest.raises(CheckpointError, match=f"process {child} on"), save_lock(tmp_path):
            pass

        def gone(_, number):
            assert number == 0  # signal 0 sends nothing
            raise ProcessLookupError

        monkeypatch.setattr(os, "kill", gone)
        with save_lock(tmp_path) as file:
            assert json.loads(file.read_text())["pid"] == os.getpid()
    finally:
        monkeypatch.undo()
        _end(child)


def test_the_text_of_the_lock_is_replaced(tmp_path):
    (tmp_path / LOCK).write_text("x" * 500)
    with save_lock(tmp_path) as file:
        assert json.loads(file.read_text())["pid"] == os.getpid()


def test_a_job_that_died_on_another_machine_holds_nothing(tmp_path):
    (tmp_path / LOCK).write_text(json.dumps({"host": "elsewhere", "pid": 1, "started": "1"}))
    with save_lock(tmp_path) as file:
        assert json.loads(file.read_text())["pid"] == os.getpid()


def test_a_folder_that_cannot_be_written_is_a_storage_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError), save_lock(tmp_path / "file"):
        pass
