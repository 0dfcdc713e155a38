"""A lock that lets only one job at a time save into a folder of checkpoints or of other output.

Two jobs that save into one folder would delete each other's temporary files and overwrite each
other's iterations. The first job writes its host and process id into a lock file; a second job is
refused. The lock is released when its process ends, so the next job, on any machine, can use the
folder immediately. If the file system does not support locks, the text of the file is used instead:
a job takes over the folder if the recorded process ran on the same machine and has ended, but never
from a process on another machine.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megatron.checkpoint.entries import Json
from megatron.durable import storage_errors
from megatron.errors import CheckpointError

LOCK = "save.lock"
_MAX_BYTES = 1024


@contextmanager
def save_lock(root: Path | str, flag: str = "--save") -> Iterator[Path]:
    """Hold a folder's lock while the body runs, and yield the lock file's path.

    Only rank 0 needs the lock.

    Args:
        root: The folder, created if it is missing.
        flag: The flag that names the folder, for the message.

    Raises:
        CheckpointError: Another job holds the lock.
        StorageError: The folder cannot be written to.
    """
    path = Path(root).absolute() / LOCK
    with storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(path, flags, 0o644)
    try:
        _acquire(path, descriptor, flag)
        try:
            yield path
        finally:
            with suppress(OSError):
                # Empty the file but keep it: a waiting job could still lock a removed file.
                os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)


def _acquire(path: Path, descriptor: int, flag: str) -> None:
    # The advisory lock ends with the process, however it dies, and forked data loaders do not
    # inherit it. The file's text says which process holds the lock.
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        raise CheckpointError(_refusal(path, _read(descriptor), flag)) from None
    except OSError:  # the file system does not support locks, so the file's text decides
        holder = _read(descriptor)
        if holder is not None and _may_live(holder):
            raise CheckpointError(_refusal(path, holder, flag)) from None
    # Process ids are eventually reused; the start time tells such processes apart.
    pid = os.getpid()
    holder = {"host": socket.gethostname(), "pid": pid, "started": _start_time(pid)}
    with storage_errors(path):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(holder).encode(), 0)
        os.fsync(descriptor)


def _refusal(path: Path, holder: Json, flag: str) -> str:
    owner = "another job" if holder is None else f"process {holder['pid']} on {holder['host']}"
    remedy = f"wait for it to end, or give another folder to {flag}"
    problem = f"{path}: {owner} is saving into this folder: {remedy}"
    return f"{problem}. If that job is gone, delete the file"


def _start_time(pid: int) -> str | None:
    """Return a process's start time in clock ticks since boot, or None if it is unknown."""
    try:
        # The command may contain spaces and parentheses; the fields after it do not.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return fields[19]


def _read(descriptor: int) -> Json:
    """Return the holder that the file records, or None if it is empty, unreadable or invalid."""
    try:
        holder = json.loads(os.pread(descriptor, _MAX_BYTES, 0))
    except (OSError, ValueError, RecursionError):
        return None
    is_valid = isinstance(holder, dict) and type(holder.get("pid")) is int
    return holder if is_valid and isinstance(holder.get("host"), str) else None


def _may_live(holder: Json) -> bool:
    """Return whether the holder may still be running. Assume so if it is on another machine."""
    if holder["host"] != socket.gethostname():
        return True
    if holder["pid"] == os.getpid():
        return False
    try:
        os.kill(holder["pid"], 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return _start_time(holder["pid"]) == holder.get("started")
