"""Deletion of old checkpoints, except for those that are being read.

A reader holds a shared lock on the manifest (for files of Megatron-LM and Megatron Core, on the
file `complete`) for as long as it exists. A checkpoint is deleted only under an exclusive lock; if
another process holds the lock, the checkpoint is kept. A checkpoint is renamed before its files are
deleted, so that an incomplete one never has a checkpoint's name. On a file system without locks,
readers cannot be detected.

Megatron-LM overwrites the files of an iteration one by one, in place, and does not look at
`complete`. The file `complete` therefore lists the files that we wrote, with a digest of their zip
directory, which contains the size and the CRC-32 of each record. This detects an overwritten file
without reading all of it. In a `.distcp` file, which consists of several zips, the directory is
that of the last one. `.metadata` has a digest of all its bytes, and `metadata.json` is not listed.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import weakref
import zipfile
from contextlib import suppress
from dataclasses import dataclass
from hashlib import file_digest
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.checkpoint.find import COMPLETE, CheckpointFolder, iteration_folder, scan
from megatron.checkpoint.manifest import MANIFEST
from megatron.checkpoint.shard import digest_of
from megatron.checkpoint.trust import open_descriptor, open_plain
from megatron.durable import TEMPORARY, remove_tree, sync_folder, unique_sibling
from megatron.errors import CheckpointError

if TYPE_CHECKING:
    from megatron.checkpoint.reader import Reader

_LOCKED = {"native": MANIFEST, "legacy": COMPLETE, "core": COMPLETE}  # the file to lock, by format
_LOCK_IS_TAKEN = {errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES}
_INDEX = ".metadata"  # the only listed file of Megatron Core that does not end in a zip
_FILES = ("mp_rank_*/*.pt", "*.pt", "__*.distcp", _INDEX)
_NOTE = (
    "The files that this program wrote. --keep-latest and --save-retain-interval may delete them "
    "if none has changed since. Readers lock this file."
)
_MAX_LIST_BYTES = 16 << 20


@dataclass(frozen=True)
class RetentionPolicy:
    """The checkpoints to keep once a newer one is published.

    Attributes:
        latest: Number of most recent checkpoints to keep (--keep-latest). None sets no limit.
        every: Keep checkpoints whose iteration is a multiple of this number
            (--save-retain-interval). Without `latest`, a save deletes at most one other checkpoint,
            the one that the tracker named before the save, as in Megatron Core.
    """

    latest: int | None = None
    every: int | None = None

    def to_delete(
        self, checkpoints: list[CheckpointFolder], newest: int, previous: str | None
    ) -> list[CheckpointFolder]:
        """Return the checkpoints that the policy deletes.

        Args:
            checkpoints: The checkpoints that may be deleted, newest first.
            newest: The iteration that has just been published, which is kept.
            previous: The folder that the tracker named previously, such as iter_0000100.
        """
        if self.latest is not None:
            old = checkpoints[self.latest :]
        else:
            old = [
                checkpoint
                for checkpoint in checkpoints
                if self.every is not None and checkpoint.path.name == previous
            ]

        def is_kept(iteration: int) -> bool:
            return iteration == newest or (self.every is not None and iteration % self.every == 0)

        return [checkpoint for checkpoint in old if not is_kept(checkpoint.iteration)]


def lock_for_reading(folder: Path, kind: str = "native") -> int:
    """Keep a checkpoint from being deleted until the returned descriptor is closed.

    Args:
        folder: The checkpoint's folder.
        kind: Its format: "native", "legacy" or "core".

    Raises:
        CheckpointError: The checkpoint is being deleted, or the file that serves as the lock is not
            a regular file.
        OSError: The file that serves as the lock cannot be opened.
    """
    descriptor = open_descriptor(folder / _LOCKED[kind])
    if not _lock(descriptor, fcntl.LOCK_SH):
        os.close(descriptor)
        flags = "--keep-latest or --save-retain-interval"
        raise CheckpointError(f"it is being deleted by another job's {flags}")
    return descriptor


def lock_if_listed(reader: Reader, kind: str) -> None:
    """Lock a checkpoint in another program's format while a reader exists, if we wrote its files.

    Args:
        reader: The reader, whose `path` is set.
        kind: The format: "legacy" or "core".

    Raises:
        CheckpointError: The checkpoint is being deleted, mixes files from two saves, or cannot be
            read.
    """
    path = reader.path
    try:
        if is_as_listed(path):
            weakref.finalize(reader, os.close, lock_for_reading(path, kind))
    except OSError as error:
        message = f"{error.filename or path}: cannot be read: {error.strerror}"
        raise CheckpointError(message) from error


def prune(
    root: Path, newest: int, keep: RetentionPolicy, previous: str | None = None
) -> list[Path]:
    """Delete older checkpoints that this program wrote, except for those that are being read.

    Four more kinds of checkpoints are kept: `release`; those of later iterations, left by a run
    that then went back to an earlier one; those in another program's format with files that differ
    from the list in `complete`, because that program may still be writing them; and the targets of
    symbolic links.

    Args:
        root: Folder of checkpoints.
        newest: The iteration of the checkpoint that has just been published, which is kept.
        keep: Which of the checkpoints up to `newest` to keep.
        previous: The folder that the tracker named previously, such as iter_0000100.

    Returns:
        The folders that were deleted.

    Raises:
        OSError: A checkpoint could not be read or deleted; the remaining ones are complete.
        CheckpointError: The folder cannot be listed.
    """
    assert keep.latest is None or keep.latest >= 1
    candidates = [
        checkpoint
        for checkpoint in scan(root)[0]
        if checkpoint.iteration <= newest
        and checkpoint.path.name == iteration_folder(checkpoint.iteration)
        and not checkpoint.path.is_symlink()
        and (checkpoint.format == "native" or _is_as_written(checkpoint.path))
    ]
    deleted = []
    for checkpoint in keep.to_delete(candidates, newest, previous):
        # Network file systems grant exclusive locks only on files opened for writing.
        file = checkpoint.path / _LOCKED[checkpoint.format]
        descriptor = os.open(file, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if not _lock(descriptor, fcntl.LOCK_EX):
                continue
            temporary = unique_sibling(checkpoint.path, TEMPORARY)
            os.rename(checkpoint.path, temporary)
            sync_folder(root)
            remove_tree(temporary)
            deleted.append(checkpoint.path)
        finally:
            os.close(descriptor)
    return deleted


def _is_as_written(folder: Path) -> bool:
    try:
        return is_as_listed(folder)
    except CheckpointError:  # partly overwritten
        return False


def _lock(descriptor: int, kind: int) -> bool:
    """Take the lock if it is free, and return whether it was.

    Return True if the file system does not support locks.
    """
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in _LOCK_IS_TAKEN
    return True


def list_files(folder: Path) -> bytes:
    """Return the content of `complete` for a folder to which all other files have been written.

    Raises:
        OSError: A file cannot be read.
    """
    return json.dumps({"note": _NOTE, "files": _digests(folder)}, indent=1).encode() + b"\n"


def is_as_listed(folder: Path) -> bool:
    """Return whether the files in a folder are exactly those that `complete` lists.

    Return False if there is no readable list, or if another program has rewritten all of the files.

    Raises:
        CheckpointError: Another program has rewritten, added or removed some of the files, so they
            belong to two saves; or one of the paths is not a regular file.
        OSError: A file other than `complete` cannot be read.
    """
    try:
        with open_plain(folder / COMPLETE) as file:
            listed = dict(json.loads(file.read(_MAX_LIST_BYTES))["files"])
    except (OSError, ValueError, RecursionError, LookupError, TypeError):
        return False
    if not listed or not all(type(value) is str for value in listed.values()):
        return False
    digests = _digests(folder)
    if digests == listed:
        return True
    unchanged = sorted(name for name in listed if digests.get(name) == listed[name])
    if not unchanged:
        return False
    changed = sorted((digests.keys() | listed.keys()) - set(unchanged))

    def some(names: list[str]) -> str:
        return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")

    raise CheckpointError(
        f"{folder}: contains files from two saves: {some(unchanged)} unchanged since this program "
        f"wrote the checkpoint, but {some(changed)} written or removed since then: load another "
        f"checkpoint, or delete {folder / COMPLETE} to read the files as they are"
    )


def _digests(folder: Path) -> dict[str, str]:
    """Return the digest of each file's zip directory (of `.metadata`, of the whole file), by path.

    The directory of a file with several zips is that of the last one. The digest is "" for links
    and for incomplete files, which have no zip directory.
    """
    digests = {}
    for path in (path for pattern in _FILES for path in folder.glob(pattern)):
        digest = ""
        if not path.is_symlink():
            with open_plain(path) as file, suppress(zipfile.BadZipFile):
                if path.name == _INDEX:
                    digest = file_digest(file, "sha256").hexdigest()
                else:
                    entries = zipfile.ZipFile(file).infolist()
                    records = [(entry.filename, entry.file_size, entry.CRC) for entry in entries]
                    digest = digest_of(json.dumps(records).encode())
        digests[str(path.relative_to(folder))] = digest
    return digests
