"""Files that are written completely or not at all, even if the process or machine fails.

Every temporary file of the package is created by `create`, so no other user can create a file with
that name first. Files in folders that other users may write to are opened with `open_trusted`.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from io import DEFAULT_BUFFER_SIZE, BufferedReader
from pathlib import Path
from typing import BinaryIO

from megatron.errors import ConfigError, StorageError, warn

TEMPORARY = ".tmp-"
UNVERIFIED = ".unverified-"
PLOT_SUFFIXES = (".png", ".pdf", ".svg")  # allowed file extensions of plots
_ACCESS_ERRORS = (errno.EACCES, errno.EPERM, errno.EROFS)
_NAME_ERRORS = (errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP)

# A check of a complete folder before it gets its final name. It rejects a folder by raising.
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
        if isinstance(error.__cause__, StorageError):
            raise  # already reported by a nested `writing_to`
        remedy = _remedy(error.__cause__, Path(path))
        raise StorageError(f"{flag} {path} cannot be written ({error}): {remedy}") from error


def _remedy(error: BaseException | None, path: Path) -> str:
    """Return what to do about a path that cannot be written because of `error`."""
    code = error.errno if isinstance(error, OSError) else None
    if code in _NAME_ERRORS:
        return "give another path"
    if code in _ACCESS_ERRORS:
        first = "make it writable"
    else:
        lacks_folder = code == errno.ENOENT and not path.absolute().parent.is_dir()
        first = "create the folder" if lacks_folder else "free space"
    return f"{first}, or give another path"


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


def check_writable(flag: str, path: Path) -> None:
    """Check that a file can be written later, to fail before long work rather than after it.

    An existing file keeps its content, and a file created for the check is removed.

    Args:
        flag: The flag that names the file, for the message.
        path: The file.

    Raises:
        StorageError: The file cannot be written.
    """
    with writing_to(flag, path):
        is_new = not path.exists()
        path.open("a").close()
        if is_new:  # an empty file would make the next run refuse to overwrite it
            path.unlink()


def plot_name_problems(flag: str, path: Path) -> list[str]:
    """Return an error line if the file name of a plot does not have a supported extension."""
    if path.suffix.lower() in PLOT_SUFFIXES:
        return []
    return [f"{flag} {path}: give a name that ends in {', '.join(PLOT_SUFFIXES)}"]


def unique_sibling(path: Path, kind: str) -> Path:
    """Return the path with `kind` and a random suffix appended, so that it is unique."""
    return path.with_name(f"{path.name}{kind}{uuid.uuid4().hex}")


def sync_folder(path: Path) -> None:
    """Make the folder's entries (creations, renames, removals) durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def create(path: Path, buffering: int = DEFAULT_BUFFER_SIZE) -> BinaryIO:
    """Create a file that others may read but not write, and open it for writing and reading.

    Raises:
        FileExistsError: The name is taken, even if only by a link. A link is never followed.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return open(path, "x+b", buffering, opener=lambda name, _: os.open(name, flags, 0o644))


def open_trusted(path: Path, *owners: int) -> BufferedReader:
    """Open a file for reading if only this user, root or one of `owners` could have written it.

    The check is made on the open file, so it holds even if another file takes the name in the
    meantime.

    Raises:
        OSError: The file cannot be opened, is a link or not a regular file, belongs to another
            user, or is writable by others.
    """

    def open_checked(name: str, flags: int) -> int:
        # Without O_NONBLOCK, opening a named pipe would wait for a writer.
        descriptor = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK)
        status = os.fstat(descriptor)
        is_trusted = status.st_uid in (os.getuid(), 0, *owners) and not status.st_mode & 0o022
        if not (stat.S_ISREG(status.st_mode) and is_trusted):
            os.close(descriptor)
            raise PermissionError(errno.EPERM, "other users may have written it", name)
        return descriptor

    return open(path, "rb", opener=open_checked)


def private_folder(path: Path) -> Path:
    """Return the path of a folder with mode 0700, creating the folder if it does not exist.

    Raises:
        OSError: The folder cannot be created, is a link, belongs to another user, or is accessible
            to others.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise PermissionError(errno.EPERM, "it is not a private folder of this user", str(path))
    return path


@contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """Yield a new file, and flush it to disk at the end. Its folder is not flushed."""
    with create(path) as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Yield a new file that gets its final name if the body succeeds and is removed if it fails.

    Its folder is not flushed.
    """
    temporary = unique_sibling(path, TEMPORARY)
    try:
        with new_file(temporary) as file:
            yield file
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def replace_file(path: Path, data: bytes) -> None:
    """Create or replace a file. Readers see the old or the new one, even after a power failure."""
    with atomic_file(path) as file:
        file.write(data)
    sync_folder(path.parent)


def check_unpublished(check: Check, temporary: Path, final: Path) -> None:
    """Check a folder before it gets its final name.

    If the check fails or does not finish, the folder is kept as `final` with `.unverified-<unique>`
    appended, for inspection. No program loads it.

    Args:
        check: The check, or `None` to skip it.
        temporary: The complete folder under its temporary name.
        final: The intended name of the folder.
    """
    if check is None:
        return
    try:
        check(temporary)
    except BaseException:
        unverified = unique_sibling(final, UNVERIFIED)
        with storage_errors(final):
            temporary.rename(unverified)
            sync_folder(final.parent)
        remedy = "inspect it, or delete it"
        warn(f"{final} was not verified: the unverified output is in {unverified}: {remedy}")
        raise


def remove_tree(path: Path) -> None:
    """Delete a folder, ignoring errors. The next save removes whatever is left."""
    shutil.rmtree(path, ignore_errors=True)
