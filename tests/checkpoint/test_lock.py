"""One job per folder: a second is refused, and a dead one's lock is taken over."""

import errno
import json
import os
import signal
import socket
import time

import pytest

from megatron.checkpoint.lock import LOCK, save_lock
from megatron.errors import CheckpointError, StorageError


def _hold(root):
    """Start a child that holds the folder until it is killed; return its process ID."""
    ready, done = os.pipe()
    child = os.fork()
    if child == 0:
        with save_lock(root):
            os.write(done, b"x")
            time.sleep(60)
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


def test_a_release_lets_the_next_in(tmp_path):
    with save_lock(tmp_path / "new" / "folder") as file:
        pass
    assert not file.read_text()
    _end(_hold(tmp_path / "new" / "folder"))


@pytest.mark.parametrize(
    ("holder", "refused"),
    [
        ({"host": "elsewhere", "pid": 1, "started": "1"}, True),
        ({"host": socket.gethostname(), "pid": 1, "started": "not its start"}, False),
        ({"host": socket.gethostname(), "pid": 1 << 22, "started": "1"}, False),
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


def test_a_job_that_died_on_another_machine_holds_nothing(tmp_path):
    (tmp_path / LOCK).write_text(json.dumps({"host": "elsewhere", "pid": 1, "started": "1"}))
    with save_lock(tmp_path) as file:
        assert json.loads(file.read_text())["pid"] == os.getpid()


def test_a_folder_that_cannot_be_written_is_a_storage_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError), save_lock(tmp_path / "file"):
        pass
