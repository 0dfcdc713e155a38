"""One job per folder: a second is refused, a dead one's lock is taken over."""

import errno
import json
import os
import signal
import socket
import time

import pytest

from megatron.checkpoint.lock import LOCK, SaveLock
from megatron.errors import CheckpointError, StorageError


def _hold(root):
    """A child that holds the folder until it is killed; its process number."""
    ready, done = os.pipe()
    child = os.fork()
    if child == 0:
        lock = SaveLock(root)
        os.write(done, b"x")
        time.sleep(60)
        lock.release()
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
            with pytest.raises(CheckpointError, match=rf"process {child} on .*--save"):
                SaveLock(tmp_path)
    finally:
        _end(child)
    with SaveLock(tmp_path) as lock:  # a killed process's lock is taken over
        assert json.loads(lock.path.read_text())["pid"] == os.getpid()


def test_a_release_lets_the_next_in(tmp_path):
    lock = SaveLock(tmp_path / "new" / "folder")
    lock.release()
    lock.release()
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
        with pytest.raises(CheckpointError, match="process 1 on elsewhere"):
            SaveLock(tmp_path)
        assert json.loads((tmp_path / LOCK).read_text()) == holder
    else:
        SaveLock(tmp_path).release()


def test_a_job_that_died_on_another_machine_holds_nothing(tmp_path):
    (tmp_path / LOCK).write_text(json.dumps({"host": "elsewhere", "pid": 1, "started": "1"}))
    with SaveLock(tmp_path) as lock:
        assert json.loads(lock.path.read_text())["pid"] == os.getpid()


def test_a_folder_that_cannot_be_written_is_a_storage_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError):
        SaveLock(tmp_path / "file")
