"""Index arrays kept on disk, named by the md5 of a text that describes them.

Megatron-LM's names, `<md5>.dsc` and `<md5>_<suffix>.npy`, so its caches are found here and ours
there. Files appear under their names complete or not at all: they are written beside, flushed and
renamed. Any number of processes and jobs may therefore build the same arrays at once; they write
the same bytes. What is on disk is used only if it loads, has the expected type and shape, passes
the caller's check and is not older than the dataset; else it is built again.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.durable import renamed_when_done
from megatron.errors import DataError, warn

Arrays = tuple[NDArray[Any], ...]


@dataclass(frozen=True)
class ArraySpec:
    """What a cached array must look like; `suffix` ends its file name."""

    suffix: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class IndexCache:
    """Where arrays are looked for, and where they go.

    Attributes:
        folders: looked through in order; new arrays go to the last. None: nothing is kept.
        warns: whether this process reports a folder that cannot be written to.
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
        """The arrays that `description` names: from disk, memory-mapped, or built and kept.

        Args:
            description: text whose md5 is the files' name.
            specs: expected arrays, in the order that `build` returns them.
            build: makes the arrays; called only if they are not found.
            is_sound: further check of arrays found on disk.
            source: file that the arrays are made from; older arrays are not used.

        Raises:
            DataError: memory does not hold what is to be built.
        """
        stem = hashlib.md5(description.encode(), usedforsecurity=False).hexdigest()
        for folder in self.folders:
            found = _load(folder, stem, specs, source)
            if found is not None and is_sound(found):
                return found
        try:
            arrays = build()
        except MemoryError:
            size = sum(spec.dtype.itemsize * math.prod(spec.shape) for spec in specs)
            raise DataError(
                f"an index of {size / 1e9:,.1f} GB does not fit in memory: it lists every sample "
                "of the run: give fewer --train-iters or --train-samples, fewer --eval-iters or a "
                "larger --eval-interval"
            ) from None
        if not self.folders:
            return arrays
        folder = self.folders[-1]
        try:
            _save(folder, stem, description, specs, arrays)
        except OSError as error:
            if self.warns:
                warn(
                    f"index cache {folder}: cannot write ({error.strerror}); the index is kept in "
                    "memory and built again at every start. Set --data-cache-path to a folder "
                    "that can be written to"
                )
            return arrays
        # Mapped pages are shared by all processes of a node; what was built is not.
        return _load(folder, stem, specs, source) or arrays


@contextlib.contextmanager
def builder_first(is_builder: bool, barrier: Callable[[], None]) -> Iterator[None]:
    """Run the body in one process, then in the others, which find its files.

    Where they do not, because disks are local to a node, each body builds for itself.

    Args:
        is_builder: true in exactly one process.
        barrier: waits until every process has called it; called once a process, also on an error,
            so that the others meet the error themselves instead of waiting for ever.
    """
    if not is_builder:
        barrier()
    try:
        yield
    finally:
        if is_builder:
            barrier()


def _load(
    folder: Path, stem: str, specs: Sequence[ArraySpec], source: Path | None
) -> Arrays | None:
    """Map the arrays, or None where one is missing, stale, torn or unlike its spec."""
    arrays = []
    for spec in specs:
        path = folder / f"{stem}_{spec.suffix}.npy"
        try:
            if source is not None and path.stat().st_mtime < source.stat().st_mtime:
                return None
            array = np.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError):
            return None
        if array.dtype != spec.dtype or array.shape != spec.shape:
            return None
        arrays.append(array.view(np.ndarray))
    return tuple(arrays)


def _save(
    folder: Path, stem: str, description: str, specs: Sequence[ArraySpec], arrays: Arrays
) -> None:
    """Write every file beside its place, then rename it there."""
    folder.mkdir(parents=True, exist_ok=True)
    for spec, array in zip(specs, arrays, strict=True):
        with renamed_when_done(folder / f"{stem}_{spec.suffix}.npy") as file:
            np.save(file, array, allow_pickle=False)
    with renamed_when_done(folder / f"{stem}.dsc") as file:
        file.write(description.encode())
