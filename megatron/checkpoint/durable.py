"""File operations that are on the disk when they return."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megatron.errors import StorageError

TEMPORARY = ".tmp-"


@contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Turn an operating system's refusal into a StorageError that names the path."""
    try:
        yield
    except OSError as error:
        where = error.filename or path
        raise StorageError(f"{where}: {error.strerror or error}") from error


@contextmanager
def writing_to(flag: str, path: str | Path) -> Iterator[None]:
    """The same for a path that a flag names: the flag, its value and the remedy."""
    try:
        with storage_errors(Path(path)):
            yield
    except StorageError as error:
        raise StorageError(
            f"{flag} {path} cannot be written ({error}): free space, or give another path"
        ) from error


def unique_suffix(kind: str) -> str:
    """`kind` and an unpredictable tail, for names that no other process chooses."""
    return f"{kind}{uuid.uuid4().hex}"


def sync_folder(path: Path) -> None:
    """Make the folder's entries (creations, renames, removals) durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_file(path: Path, data: bytes) -> None:
    """Write a new file and flush it to the disk. The folder is not flushed."""
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def replace_file(path: Path, data: bytes) -> None:
    """Replace a file's content: readers, and a machine that loses power, see old or new."""
    temporary = path.with_name(path.name + unique_suffix(TEMPORARY))
    try:
        write_file(temporary, data)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    sync_folder(path.parent)


def remove_tree(path: Path) -> None:
    """Delete a folder as far as possible; what stays is reaped by the next save."""
    shutil.rmtree(path, ignore_errors=True)
