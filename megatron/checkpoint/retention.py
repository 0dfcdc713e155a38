"""Which checkpoints may go, and how those that are being read are left alone.

A reader holds a shared lock on the manifest (of Megatron-LM's files: on our mark beside them) for
as long as it lives; a checkpoint is deleted under an exclusive one, which is not waited for. First
it loses its name in one rename, so that nobody finds half a checkpoint under it. Where the file
system knows no locks, nobody is known to read.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from megatron.checkpoint.find import COMPLETE, Found, iteration_folder, scan
from megatron.checkpoint.legacy.mark import is_marked
from megatron.checkpoint.manifest import MANIFEST
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

    def going(self, found: list[Found], newest: int, before: str | None) -> list[Found]:
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


def _is_ours(found: Found) -> bool:
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
