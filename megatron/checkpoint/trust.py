"""Checks that checkpoint files are safe to read.

They must be regular files that this user or root owns and that are not world-writable. Files of all
formats are opened here. A FIFO or a device would make the reader wait forever. A link may point to
files that a copy of the folder lacks. A file that another user owns or can write to may contain
whatever that user wants.

A path may refer to a different file from one moment to the next, so every file is checked through
its descriptor (`open_trusted`). In addition, `check_folder` checks all paths in a folder, to refuse
it as a whole before any file in it is opened.
"""

from __future__ import annotations

import errno
import os
import stat
from io import BufferedReader
from pathlib import Path

from megatron.errors import CheckpointError

_ALLOW = "give --allow-foreign-checkpoints to load it anyway"


def open_descriptor(path: Path, *, follows: bool = False) -> int:
    """Open a regular file for reading, without ever waiting for another process.

    Args:
        path: The file.
        follows: Follow a link to a regular file.

    Raises:
        CheckpointError: The file is a link (without `follows`), a folder, a FIFO, a socket or a
            device.
        OSError: The file cannot be opened.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follows else os.O_NOFOLLOW)
    try:
        descriptor = os.open(path, flags)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # a link; a socket or a device
            raise CheckpointError(f"{path}: not a regular file") from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointError(f"{path}: not a regular file")
    return descriptor


def open_plain(path: Path, *, follows: bool = False) -> BufferedReader:
    """Open a regular file as `open_descriptor` does, and return it as a file object.

    Args:
        path: The file.
        follows: Follow a link to a regular file.

    Raises:
        CheckpointError: The file is a link (without `follows`), a folder, a FIFO, a socket or a
            device.
        OSError: The file cannot be opened.
    """
    return open(open_descriptor(path, follows=follows), "rb")


def open_trusted(
    path: Path, *, allow_foreign: bool = False, follows: bool = False
) -> BufferedReader:
    """Open a regular file that this user or root owns and that is not world-writable.

    Args:
        path: The file.
        allow_foreign: Accept any owner and mode (--allow-foreign-checkpoints).
        follows: Follow a link to a regular file.

    Raises:
        CheckpointError: The path is not a regular file, or the file belongs to another user or is
            world-writable.
        OSError: The file cannot be opened.
    """
    file = open_plain(path, follows=follows)
    try:
        check_owner(path, os.fstat(file.fileno()), allow_foreign=allow_foreign)
    except CheckpointError:
        file.close()
        raise
    return file


def check_folder(folder: Path, *, allow_foreign: bool = False) -> None:
    """Check a checkpoint's folder and everything in it.

    Args:
        folder: The folder.
        allow_foreign: Accept any owner and mode, and a link to a path outside the parent folder.

    Raises:
        CheckpointError: The folder is a link to a path outside its parent folder; a path in it is
            neither a regular file nor a folder; or the folder or a path in it belongs to another
            user, is world-writable, or cannot be read.
    """
    try:
        if folder.is_symlink() and not allow_foreign:
            target, root = folder.resolve(), folder.parent.resolve()
            if not target.is_relative_to(root):
                remedy = f"give --load that folder itself, or {_ALLOW}"
                raise CheckpointError(f"a link out of {root}, to {target}: {remedy}")
        check_owner(folder, folder.stat(), allow_foreign=allow_foreign)
        for path in folder.rglob("*"):
            status = path.lstat()
            if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
                raise CheckpointError(f"{path.relative_to(folder)}: not a regular file")
            check_owner(path, status, allow_foreign=allow_foreign)
    except OSError as error:
        raise CheckpointError(f"{error.filename}: cannot be read: {error.strerror}") from error


def check_owner(path: Path, status: os.stat_result, *, allow_foreign: bool) -> None:
    """Check that this user or root owns a file or folder, and that it is not world-writable.

    It may be writable by its group, because on many clusters the default mode lets the members of
    a project share files.

    Args:
        path: The file or folder, for the message.
        status: The result of `stat`, with the owner and the mode.
        allow_foreign: Accept any owner and mode.

    Raises:
        CheckpointError: The file or folder belongs to another user, or is world-writable.
    """
    if allow_foreign:
        return
    if status.st_uid not in (0, os.geteuid()):
        remedy = f"copy it, or {_ALLOW} if you trust that user"
        raise CheckpointError(f"{path}: owned by another user (uid {status.st_uid}): {remedy}")
    if status.st_mode & stat.S_IWOTH:
        remedy = f"chmod o-w once you know that it is sound, or {_ALLOW}"
        raise CheckpointError(f"{path}: all users may write to it: {remedy}")
