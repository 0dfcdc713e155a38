"""Files that are written completely or not at all, even if the process or machine fails."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from megatron.errors import ConfigError, StorageError, warn

TEMPORARY = ".tmp-"
UNVERIFIED = ".unverified-"

# A check of a complete folder before it gets its final name, which raises to reject the folder.
Check = Callable[[Path], None] | None


@contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Turn an OSError into a StorageError that names the path."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"{error.filename or path}: {error.strerror or error}") from error


@contextmanager
def writing_to(flag: str, path: str | Path) -> Iterator[None]:
    """Turn an OSError into a StorageError that names the flag, the path and the remedy."""
    try:
        with storage_errors(Path(path)):
            yield
    except StorageError as error:
        remedy = "free space, or give another path"
        raise StorageError(f"{flag} {path} cannot be written ({error}): {remedy}") from error


def expect_no_file(flag: str, paths: Iterable[str | Path], *, overwrite: bool) -> None:
    """Refuse to replace a file or folder unless the user has given `--overwrite`.

    Args:
        flag: The flag that names the output, for the message.
        paths: The files and folders that are about to be written.
        overwrite: Whether the user has given `--overwrite`.

    Raises:
        ConfigError: One of `paths` exists.
    """
    existing = next((path for path in paths if os.path.lexists(path)), None)
    if existing is not None and not overwrite:
        remedy = "choose another name, or give --overwrite to replace it"
        raise ConfigError(f"{flag}: {existing} already exists: {remedy}")


def beside(path: Path, kind: str) -> Path:
    """Return the path with `kind` and a random tail appended, which no other process chooses."""
    return path.with_name(f"{path.name}{kind}{uuid.uuid4().hex}")


def sync_folder(path: Path) -> None:
    """Make the folder's entries (creations, renames, removals) durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def new_file(path: Path) -> Iterator[IO[bytes]]:
    """Yield a new file and flush it to the disk. The folder is not flushed."""
    with open(path, "xb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def renamed_when_done(path: Path) -> Iterator[IO[bytes]]:
    """Yield a new file that gets its name if the body succeeds and is removed if it fails.

    The folder is not flushed.
    """
    temporary = beside(path, TEMPORARY)
    try:
        with new_file(temporary) as file:
            yield file
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def replace_file(path: Path, data: bytes) -> None:
    """Replace a file. Readers see the old or the new content, even after a power failure."""
    with renamed_when_done(path) as file:
        file.write(data)
    sync_folder(path.parent)


def check_unpublished(check: Check, temporary: Path, final: Path) -> None:
    """Check a folder before it gets its name.

    If the check fails or does not finish, the folder is kept as `final` with `.unverified-<unique>`
    appended, for inspection. No program loads it.

    Args:
        check: The check, or `None` for none.
        temporary: The complete folder under its temporary name.
        final: The intended name of the folder.
    """
    if check is None:
        return
    try:
        check(temporary)
    except BaseException:
        aside = beside(final, UNVERIFIED)
        with storage_errors(final):
            temporary.rename(aside)
            sync_folder(final.parent)
        remedy = "inspect it, or delete it"
        warn(f"{final} was not verified: the unverified output is in {aside}: {remedy}")
        raise


def remove_tree(path: Path) -> None:
    """Delete a folder, ignoring errors. The next save removes the rest."""
    shutil.rmtree(path, ignore_errors=True)
