"""Datasets and text in object storage: `--data-path s3://bucket/folder/corpus_text_document`.

Any storage that fsspec supports can be named by its URL. Files are copied once to the folder of
--data-cache-path and read from there. The name of a copy identifies the version of the file, so a
file that has changed is copied again.
"""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

from megatron.durable import atomic_file, sync_folder
from megatron.errors import ConfigError, DataError, StorageError

_BLOCK = 8 << 20  # bytes read at a time
_VERSION = ("ETag", "etag", "md5Hash", "checksum", "LastModified", "mtime", "created")


def local_copy(name: str, flag: str, folder: str | None) -> str:
    """Copy the files at a URL to `folder`, and return the local path.

    The URL is the prefix of an indexed dataset, or a file, folder or glob pattern of text. If
    several processes need the same file, one copies it and the others wait.

    Args:
        name: The URL.
        flag: The flag whose value is the URL, for messages.
        folder: The value of --data-cache-path.

    Raises:
        ConfigError: No folder for copies is given, or the library for the URL is not installed.
        DataError: There are no files at the URL, or a file cannot be read.
        StorageError: The copy cannot be written.
    """
    if folder is None:
        raise ConfigError(
            f"{flag} {name}: give --data-cache-path, a local folder with room for a copy"
        )
    import fsspec

    try:
        system, path = fsspec.core.url_to_fs(name)
    except (ImportError, ValueError) as error:  # the message names the package, or the protocols
        raise ConfigError(f"{flag} {name}: {error}") from None
    with _remote_errors(flag, name):
        dataset_files = [f"{path}.bin", f"{path}.idx"]
        if all(system.exists(file) for file in dataset_files):
            files, is_prefix = dataset_files, True
        else:
            matches = system.find(path) if system.isdir(path) else system.glob(path)
            files, is_prefix = sorted(matches), False
        infos = [system.info(file) for file in files]
        # A pattern may also match folders.
        found = [pair for pair in zip(files, infos, strict=True) if not _is_folder(pair[1])]
        if not found:
            raise DataError(
                f"{flag} {name}: nothing was found at this URL: give the prefix of a .bin and .idx "
                "file, or text files"
            )
        files, infos = map(list, zip(*found, strict=True))
    root = _fixed_folder(path)
    names = [
        PurePosixPath(file).name if is_prefix else _relative_path(file, root) for file in files
    ]
    # Earlier versions copied all files that a pattern matches to one folder, under this digest.
    is_nested = root != path and any("/" in relative for relative in names)
    digest = _digest([name, *names] if is_nested else name, files, infos)
    target = Path(folder) / f"{PurePosixPath(path).name}-{digest}"
    for file, info, relative in zip(files, infos, names, strict=True):
        _copy(system, file, info.get("size"), target / relative, flag)
    if is_prefix:
        return str(target / PurePosixPath(path).name)
    return str(target / names[0]) if len(files) == 1 else str(target)


def _is_folder(info: dict[str, Any]) -> bool:
    return info.get("type") == "directory"


def _fixed_folder(path: str) -> str:
    """Return the part of a path before its first component with a wildcard.

    Files that a pattern matches in different folders may have the same name.
    """
    parts = PurePosixPath(path).parts
    fixed = itertools.takewhile(lambda part: not any(sign in part for sign in "*?["), parts)
    return str(PurePosixPath(*fixed))


def _relative_path(file: str, path: str) -> str:
    """Return a file's path relative to the folder `path`, or its name if it is not inside."""
    file_path = PurePosixPath(file)
    if file_path.is_relative_to(path) and str(file_path) != path:
        parts = file_path.relative_to(path).parts
        if ".." not in parts:
            return str(PurePosixPath(*parts))
    return file_path.name


def _digest(name: str | list[str], files: list[str], infos: list[dict[str, Any]]) -> str:
    """Return a digest of a name and of the files' names and versions."""
    versions = [
        [file, info.get("size"), *(str(info.get(key, "")) for key in _VERSION)]
        for file, info in zip(files, infos, strict=True)
    ]
    return hashlib.sha256(json.dumps([name, versions]).encode()).hexdigest()[:16]


def _copy(system: Any, file: str, size: int | None, target: Path, flag: str) -> None:
    """Copy a file unless a copy exists. The copy gets its final name only when it is complete.

    Some web servers do not tell the size of a file (`None`).
    """
    with _writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.with_name(f".{target.name}.lock").open("ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # held until the file is closed or this process ends
            if target.exists():
                return
            with atomic_file(target) as out:
                copied = 0
                for data in _blocks(system, file, flag):
                    out.write(data)
                    copied += len(data)
                if size is not None and copied != size:
                    raise DataError(
                        f"{flag} {file}: only {copied} of {size} bytes were received: start again"
                    )
            sync_folder(target.parent)


def _blocks(system: Any, file: str, flag: str) -> Iterator[bytes]:
    with _remote_errors(flag, file), system.open(file, "rb") as source:
        while data := source.read(_BLOCK):
            yield data


@contextmanager
def _writing(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"--data-cache-path: {target} cannot be written ({error.strerror or error}): give a "
            "writable folder with enough room"
        ) from error


@contextmanager
def _remote_errors(flag: str, name: str) -> Iterator[None]:
    """Report any error of a storage library in a single line."""
    try:
        yield
    except (DataError, ConfigError, MemoryError):
        raise
    except Exception as error:
        raise DataError(
            f"{flag} {name}: cannot be read ({type(error).__name__}: {error}): check the URL, the "
            "network, and the access rights of this machine"
        ) from error
