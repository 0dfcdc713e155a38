"""Which checkpoints may go, and how those that are being read are left alone.

A reader holds a shared lock on the manifest (of Megatron-LM's files: on our mark beside them) for
as long as it lives; a checkpoint is deleted under an exclusive one, which is not waited for. First
it loses its name in one rename, so that nobody finds half a checkpoint under it. Where the file
system knows no locks, nobody is known to read.


The mark beside files for Megatron-LM that we have written: that all are there, and which.

Megatron-LM writes over the files of an iteration one by one, in place, and does not look at the
mark. So the mark names every file with a digest of its directory, which holds the size and the
CRC-32 of each of its records: what has been written over is known at once, without reading it.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from megatron.checkpoint.find import COMPLETE, FoundCheckpoint, iteration_folder, scan
from megatron.checkpoint.manifest import MANIFEST
from megatron.checkpoint.shard import digest_of
from megatron.durable import TEMPORARY, remove_tree, sync_folder, unique_suffix
from megatron.errors import CheckpointError

_LOCKED = {"native": MANIFEST, "legacy": COMPLETE}  # which file, by format
_IS_HELD = {errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES}


@dataclass(frozen=True)
class Keep:
    """Which checkpoints stay once a newer one is published.

    Attributes:
        latest: so many of the newest (--keep-latest); None: all, but see `every`.
        every: those of multiples of so many iterations (--save-retain-interval). Without `latest`
            all others stay too, but for the one that the newest succeeds, as in Megatron Core.
    """

    latest: int | None = None
    every: int | None = None

    def going(
        self, found: list[FoundCheckpoint], newest: int, before: str | None
    ) -> list[FoundCheckpoint]:
        """Those of `found`, newest first, that are to go; see `prune`."""
        if self.latest is not None:
            old = found[self.latest :]
        elif self.every is not None:
            old = [one for one in found if one.path.name == before]
        else:
            old = []
        return [
            one
            for one in old
            if one.iteration != newest and (self.every is None or one.iteration % self.every)
        ]


def hold_for_reading(folder: Path, kind: str = "native") -> int:
    """Keep a checkpoint of a format from being deleted until the returned descriptor is closed.

    Raises:
        CheckpointError: it is being deleted.
        OSError: its manifest or mark cannot be opened.
    """
    descriptor = os.open(folder / _LOCKED[kind], os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    if not _lock(descriptor, fcntl.LOCK_SH):
        os.close(descriptor)
        raise CheckpointError(
            "it is being deleted, as --keep-latest or --save-retain-interval of another job asks"
        )
    return descriptor


def prune(root: Path, newest: int, keep: Keep, before: str | None = None) -> list[Path]:
    """Delete older checkpoints of this program, those that are being read excepted.

    Left alone besides: what has a later iteration, as a run that went back leaves it; files of
    Megatron-LM without our mark, or others than it lists, which may be its own, and are not known
    to be complete; what a symbolic link leads to.

    Args:
        newest: iteration of the one that has just been published, which stays.
        keep: which of those up to `newest` stay.
        before: the folder that the tracker named until then, such as iter_0000100.

    Returns:
        The folders that are gone.

    Raises:
        OSError: one could not be deleted; those that are left are whole.
        CheckpointError: the folder cannot be listed.
    """
    assert keep.latest is None or keep.latest >= 1
    candidates = [
        one
        for one in scan(root)[0]
        if one.iteration <= newest
        and one.path.name == iteration_folder(one.iteration)
        and not one.path.is_symlink()
        and _is_ours(one)
    ]
    gone = []
    for folder, kind in ((one.path, one.format) for one in keep.going(candidates, newest, before)):
        with _held_alone(folder / _LOCKED[kind]) as is_ours:
            if not is_ours:
                continue
            nameless = folder.with_name(folder.name + unique_suffix(TEMPORARY))
            os.rename(folder, nameless)
            sync_folder(root)
            remove_tree(nameless)
            gone.append(folder)
    return gone


def _is_ours(found: FoundCheckpoint) -> bool:
    if found.format == "native":
        return (found.path / MANIFEST).is_file()
    try:
        return is_marked(found.path)
    except CheckpointError:  # written over in part
        return False


@contextmanager
def _held_alone(file: Path) -> Iterator[bool]:
    """Whether nobody reads the checkpoint, nor can begin to inside the block."""
    # Network file systems lend exclusive locks only to those who may write.
    descriptor = os.open(file, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield _lock(descriptor, fcntl.LOCK_EX)
    finally:
        os.close(descriptor)


def _lock(descriptor: int, kind: int) -> bool:
    """Take the lock if it is free; whether it was. True where there are no locks."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in _IS_HELD
    return True


_NOTE = (
    "All files are here, as listed. --keep-latest may delete them while they are as listed; who "
    "reads them locks this file."
)
_MAX_BYTES = 16 << 20


def mark_of(folder: Path) -> bytes:
    """What the mark of a checkpoint's folder holds; its files are written.

    Raises:
        OSError: one cannot be read.
    """
    return json.dumps({"note": _NOTE, "files": _files(folder)}, indent=1).encode() + b"\n"


def is_marked(folder: Path) -> bool:
    """Whether the files of a checkpoint's folder are exactly those that we wrote.

    False without a mark, and where another program has written all of them anew.

    Raises:
        CheckpointError: it has written some of them: they are of two saves.
        OSError: one cannot be read.
    """
    listed = _listed(folder / COMPLETE)
    if not listed:
        return False
    found = _files(folder)
    if found == listed:
        return True
    kept = sorted(name for name in listed if found.get(name) == listed[name])
    if not kept:
        return False
    others = sorted((found.keys() | listed.keys()) - set(kept))
    raise CheckpointError(
        f"{folder}: files of two saves: {_some(kept)} as this program wrote it, {_some(others)} "
        f"written or removed since: take another checkpoint, or delete {folder / COMPLETE} to have "
        "the files read as they are"
    )


def _listed(mark: Path) -> dict[str, str]:
    """Digests by file; nothing without a mark, or where it tells none."""
    try:
        with mark.open("rb") as file:
            content = json.loads(file.read(_MAX_BYTES))
        files = content["files"]
    except (OSError, ValueError, RecursionError, LookupError, TypeError):
        return {}
    is_plain = isinstance(files, dict) and all(type(value) is str for value in files.values())
    return files if is_plain else {}


def _files(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): _digest(path) for path in folder.glob("mp_rank_*/*.pt")}


def _digest(path: Path) -> str:
    """Of a file's directory; "" where it has none, as one that is half written."""
    if path.is_symlink():
        return ""
    try:
        with zipfile.ZipFile(path) as archive:
            records = [(one.filename, one.file_size, one.CRC) for one in archive.infolist()]
    except zipfile.BadZipFile:
        return ""
    return digest_of(json.dumps(records).encode())


def _some(names: list[str]) -> str:
    rest = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{names[0]}{rest}"
