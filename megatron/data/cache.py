"""Index arrays kept on disk, named by the md5 of a text that describes them.

The file names are those of Megatron-LM, `<md5>.dsc` and `<md5>_<suffix>.npy`, so each program finds
the other's caches. A file appears under its name complete or not at all: it is written under a
temporary name, flushed and renamed. Any number of processes and jobs may therefore build the same
arrays at the same time; they write the same bytes. An array on disk is used only if it loads, has
the expected type and shape, passes the caller's check and is not older than the dataset. Otherwise
it is built again.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron.durable import renamed_when_done
from megatron.errors import DataError, warn

Arrays = tuple[NDArray[Any], ...]


class ArraySpec(NamedTuple):
    """The required type and shape of a cached array, and the end of its file name."""

    suffix: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]


class IndexCache(NamedTuple):
    """The folders in which index arrays are kept.

    Attributes:
        folders: The folders, searched in order. New arrays are written to the last one. If there
            are none, nothing is kept.
        warns: Whether this process reports a folder that cannot be written to.
    """

    folders: tuple[Path, ...]
    warns: bool = True

    def load_or_build(
        self,
        description: str,
        specs: Sequence[ArraySpec],
        build: Callable[[], Arrays],
        *,
        is_sound: Callable[[Arrays], bool] = lambda arrays: True,
        source: Path | None = None,
    ) -> Arrays:
        """Return the arrays that `description` names, memory-mapped or newly built.

        Args:
            description: The text whose md5 names the files.
            specs: The expected arrays, in the order in which `build` returns them.
            build: A function that makes the arrays. It is called only if they are not found.
            is_sound: A further check of arrays found on disk.
            source: The file that the arrays are made from. Arrays older than it are not used.

        Raises:
            DataError: The arrays do not fit in memory.
        """
        stem = hashlib.md5(description.encode(), usedforsecurity=False).hexdigest()
        for folder in self.folders:
            found = _load(folder / stem, specs, source)
            if found is not None and is_sound(found):
                return found
        try:
            arrays = build()
        except MemoryError:
            size = sum(spec.dtype.itemsize * math.prod(spec.shape) for spec in specs)
            raise DataError(
                f"an index of {size / 1e9:,.1f} GB does not fit in memory; it lists every sample "
                "of the run: give fewer --train-iters or --train-samples, fewer --eval-iters or a "
                "larger --eval-interval"
            ) from None
        for folder in self.folders[-1:]:
            with saving(f"index cache {folder}", warns=self.warns):
                folder.mkdir(parents=True, exist_ok=True)
                for spec, array in zip(specs, arrays, strict=True):
                    with renamed_when_done(folder / f"{stem}_{spec.suffix}.npy") as file:
                        np.save(file, array, allow_pickle=False)
                with renamed_when_done(folder / f"{stem}.dsc") as file:
                    file.write(description.encode())
                # Mapped pages are shared by all processes of a node; newly built arrays are not.
                return _load(folder / stem, specs, source) or arrays
        return arrays


@contextlib.contextmanager
def saving(what: str, *, warns: bool) -> Iterator[None]:
    """Run the body, and replace an OSError in it by a warning.

    The warning names the consequence and the remedy.

    Args:
        what: The index and its place, for the warning.
        warns: Whether this process prints the warning.
    """
    try:
        yield
    except OSError as error:
        if warns:
            warn(
                f"{what}: cannot write ({error.strerror}); the index is kept in memory and built "
                "again at every start. Set --data-cache-path to a writable folder"
            )


@contextlib.contextmanager
def builder_first(is_builder: bool, barrier: Callable[[], None]) -> Iterator[None]:
    """Run the body in one process, then in the others, which find its files.

    If they find none, because disks are local to a node, each process builds its own.

    Args:
        is_builder: True in exactly one process.
        barrier: A function that waits until every process has called it. It is called once per
            process, even after an error, so that the other processes run into the same error
            instead of waiting forever.
    """
    if not is_builder:
        barrier()
    try:
        yield
    finally:
        if is_builder:
            barrier()


def open_array(path: Path, source: Path | None) -> np.memmap[Any, Any] | None:
    """Map the array in `path`; return `None` if it is missing, damaged or older than `source`."""
    try:
        if source is not None and path.stat().st_mtime < source.stat().st_mtime:
            return None
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception:  # numpy parses the header as Python, which a damaged one fails in any way
        return None
    return array if isinstance(array, np.memmap) else None


def _load(stem: Path, specs: Sequence[ArraySpec], source: Path | None) -> Arrays | None:
    """Map the arrays; return `None` if one is missing, stale, damaged or does not match."""
    arrays = []
    for spec in specs:
        array = open_array(Path(f"{stem}_{spec.suffix}.npy"), source)
        if array is None or array.dtype != spec.dtype or array.shape != spec.shape:
            return None
        arrays.append(array.view(np.ndarray))
    return tuple(arrays)
