"""Files that are on the disk completely or not at all, whatever ends process or machine."""

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

Check = Callable[[Path], None]
"""A check of a complete folder that has no name yet. It raises if the folder must not get one."""


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
    """Turn a refusal into a StorageError with the flag that names the path, and the remedy."""
    try:
        with storage_errors(Path(path)):
            yield
    except StorageError as error:
        raise StorageError(
            f"{flag} {path} cannot be written ({error}): free space, or give another path"
        ) from error


def expect_no_file(flag: str, paths: Iterable[str | Path], *, overwrite: bool) -> None:
    """Refuse to replace a file or folder unless the user has given `--overwrite`.

    Args:
        flag: the flag that names the output, for the message.
        paths: everything that is about to be written.
        overwrite: whether the user has given `--overwrite`.

    Raises:
        ConfigError: one of `paths` exists.
    """
    existing = next((path for path in paths if os.path.lexists(path)), None)
    if existing is not None and not overwrite:
        raise ConfigError(
            f"{flag}: {existing} already exists: choose another name, or give --overwrite to "
            "replace it"
        )


def unique_suffix(kind: str) -> str:
    """Return `kind` with an unpredictable tail, for names that no other process chooses."""
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


@contextmanager
def renamed_when_done(path: Path) -> Iterator[IO[bytes]]:
    """Yield a new file that gets its name when the body succeeds, and goes when it fails.

    The folder is not flushed.
    """
    temporary = path.with_name(path.name + unique_suffix(TEMPORARY))
    try:
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def replace_file(path: Path, data: bytes) -> None:
    """Replace a file's content. Readers see the old or the new, even after a power failure."""
    with renamed_when_done(path) as file:
        file.write(data)
    sync_folder(path.parent)


def check_unpublished(check: Check | None, temporary: Path, final: Path) -> None:
    """Check a folder before it gets its name.

    If the check fails or does not finish, the folder is kept as `final` with `.unverified-<unique>`
    appended, for inspection. No program loads it.

    Args:
        check: The check, or `None` to do nothing.
        temporary: The complete folder.
        final: The name that it is to get.
    """
    if check is None:
        return
    try:
        check(temporary)
    except BaseException:
        aside = final.with_name(final.name + unique_suffix(UNVERIFIED))
        with storage_errors(final):
            temporary.rename(aside)
            sync_folder(final.parent)
        warn(
            f"{final} was not verified: what was to become it is {aside}: delete it, or find out "
            "why"
        )
        raise


def remove_tree(path: Path) -> None:
    """Delete a folder as far as possible. The next save removes the rest."""
    shutil.rmtree(path, ignore_errors=True)
