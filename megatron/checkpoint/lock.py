"""A lock that lets only one job save into a folder of checkpoints.

Two jobs that save into one folder would delete each other's temporary files and overwrite each
other's iterations. The first job writes its host and process into a lock file; a second is refused.
The lock ends with its process, so the next job, on any machine, takes over the folder at once. If
the file system does not support locks, the file's text decides: the folder is taken over from a
process that has ended on this machine, but never from one on another machine.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
from pathlib import Path

from megatron.checkpoint.entries import Json
from megatron.durable import storage_errors
from megatron.errors import CheckpointError

LOCK = "save.lock"
_MAX_BYTES = 1024


class SaveLock(contextlib.AbstractContextManager["SaveLock"]):
    """The lock of a folder, from construction to `release`; a context manager for rank 0."""

    def __init__(self, root: Path | str) -> None:
        """Take the lock.

        Raises:
            CheckpointError: Another job holds the folder.
            StorageError: The folder cannot be written.
        """
        self.path = Path(root).absolute() / LOCK
        with storage_errors(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor: int | None = os.open(
                self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644
            )
        try:
            self._take(self._descriptor)
        except BaseException:
            os.close(self._descriptor)
            raise

    def _take(self, descriptor: int) -> None:
        # The advisory lock ends with the process, however it dies, and is not passed on to
        # forked data loaders. The file's text says who holds it.
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            raise CheckpointError(self._refusal(_read(descriptor))) from None
        except OSError:  # the file system does not support locks, so only the text decides
            holder = _read(descriptor)
            if holder is not None and _may_live(holder):
                raise CheckpointError(self._refusal(holder)) from None
        # Process numbers are reused eventually; the start time tells such processes apart.
        pid = os.getpid()
        holder = {"host": socket.gethostname(), "pid": pid, "started": _start_time(pid)}
        with storage_errors(self.path):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(holder).encode(), 0)
            os.fsync(descriptor)

    def _refusal(self, holder: Json) -> str:
        who = "another job"
        if holder is not None:
            who = f"process {holder['pid']} on {holder['host']}"
        remedy = "wait for it to end, or give another folder to --save"
        told = f"{self.path}: {who} is saving into this folder: {remedy}"
        return f"{told}. If that job is gone, delete the file"

    def release(self) -> None:
        """Release the lock. Calling it again does nothing."""
        if self._descriptor is None:
            return
        with contextlib.suppress(OSError):
            # Empty the file but keep it: a waiting job could still lock a removed file.
            os.ftruncate(self._descriptor, 0)
        os.close(self._descriptor)
        self._descriptor = None

    def __exit__(self, *_: object) -> None:
        """Release the lock."""
        self.release()


def _start_time(pid: int) -> str | None:
    """Return the clock ticks from boot to the process's start, or None if they are unknown."""
    try:
        # The command may hold spaces and parentheses; the fields after it do not.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return fields[19]


def _read(descriptor: int) -> Json:
    """Return who holds the lock, or None for an empty or unreadable file."""
    try:
        holder = json.loads(os.pread(descriptor, _MAX_BYTES, 0))
    except (OSError, ValueError):
        return None
    is_ours = isinstance(holder, dict) and type(holder.get("pid")) is int
    return holder if is_ours and isinstance(holder.get("host"), str) else None


def _may_live(holder: Json) -> bool:
    """Return whether the holder may still be running. A process on another machine always may."""
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
