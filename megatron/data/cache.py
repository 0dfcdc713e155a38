"""Index arrays cached on disk, named by the md5 of the text that describes them.

The files have the names and contents that Megatron-LM uses, `<md5>.dsc` and `<md5>_<suffix>.npy`,
so Megatron-LM can read our caches. No incomplete file ever appears under its final name: a file is
written under a temporary name, flushed and renamed. Any number of processes and jobs can therefore
build the same arrays at the same time; they write the same bytes.

A permutation with two swapped entries looks as valid as the correct one. An additional file,
`<md5>.sha256`, therefore holds a digest of the arrays and of everything from which they were built.
Cached arrays are used only if they match the digest, are not older than the dataset, were written
by this user, root or the owner of the dataset, and cannot be changed by anyone else. Otherwise they
are built again. This includes arrays that Megatron-LM wrote, because they have no digest.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import math
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron.durable import atomic_file, open_trusted
from megatron.environment import cores_per_process
from megatron.errors import DataError, warn

Arrays = tuple[NDArray[Any], ...]
_HASH_BLOCK = 1 << 24  # bytes that a core hashes at a time
_HEX_DIGITS = 64


class ArraySpec(NamedTuple):
    """The type and shape of a cached array, and the suffix of its file name."""

    suffix: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]


class IndexCache(NamedTuple):
    """The folders in which index arrays are cached.

    Attributes:
        folders: The folders, searched in order. New arrays are written to the last one. Without
            folders, nothing is cached.
        warns: Whether this process warns about a folder that cannot be written to.
    """

    folders: tuple[Path, ...]
    warns: bool = True

    def load_or_build(
        self,
        description: str,
        specs: Sequence[ArraySpec],
        build: Callable[[], Arrays],
        *,
        inputs: Sequence[NDArray[Any]] = (),
        source: Path | None = None,
    ) -> Arrays:
        """Return the arrays that `description` identifies, memory-mapped or newly built.

        Args:
            description: The text whose md5 names the files.
            specs: The expected arrays, in the order in which `build` returns them.
            build: A function that builds the arrays. It is called only if none are cached.
            inputs: The arrays that determine the result, in addition to the description.
            source: The file from which the arrays are built. Arrays older than it are not used.

        Raises:
            DataError: The arrays do not fit in memory.
        """
        stem = hashlib.md5(description.encode(), usedforsecurity=False).hexdigest()
        suffixes, inputs_digest = (
            tuple(f"_{s.suffix}" for s in specs),
            digest_of(description, inputs),
        )
        candidates = [
            ArrayFiles(path / stem, suffixes, inputs_digest, source) for path in self.folders
        ]
        for files in candidates:
            cached = files.load()
            if cached is not None:
                return cached
        try:
            arrays = build()
        except MemoryError:
            size = sum(spec.dtype.itemsize * math.prod(spec.shape) for spec in specs)
            raise DataError(
                f"an index of {size / 1e9:,.1f} GB does not fit in memory, because it lists every "
                "sample of the run: give fewer --train-iters or --train-samples, fewer "
                "--eval-iters or a larger --eval-interval"
            ) from None
        for files in candidates[-1:]:
            with warning_if_unwritable(f"index cache {files.stem.parent}", warns=self.warns):
                mapped = files.save(arrays)
                with atomic_file(Path(f"{files.stem}.dsc")) as file:
                    file.write(description.encode())
                return mapped
        return arrays


@contextlib.contextmanager
def warning_if_unwritable(description: str, *, warns: bool) -> Iterator[None]:
    """Run the body of the `with` statement, and turn an OSError in it into a warning.

    The warning names the consequence and the remedy.

    Args:
        description: The kind of index and its path, for the warning.
        warns: Whether this process prints the warning.
    """
    try:
        yield
    except OSError as error:
        if warns:
            warn(
                f"{description}: cannot write ({error.strerror}); the index is kept in memory and "
                "built again at every start. Set --data-cache-path to a writable folder"
            )


@contextlib.contextmanager
def builder_first(is_builder: bool, barrier: Callable[[], None]) -> Iterator[None]:
    """Run the body in one process first, and then in the others, which find the files it wrote.

    If disks are local to each node, a process that finds no files builds its own.

    Args:
        is_builder: True in exactly one process.
        barrier: A function that waits until every process has called it. Each process calls it
            once, even after an error, so that the other processes hit the same error instead of
            waiting forever.
    """
    if not is_builder:
        barrier()
    try:
        yield
    finally:
        if is_builder:
            barrier()


def open_array(path: Path, source: Path | None) -> NDArray[Any] | None:
    """Memory-map the array in `path`; return `None` if it cannot be trusted or read.

    Args:
        path: The file. It must have been written by this user, root or the owner of `source`.
        source: The file from which the array is built. An array older than it is not used.
    """
    try:
        source_stat = source.stat() if source is not None else None
        with open_trusted(path, *([source_stat.st_uid] if source_stat else [])) as file:
            if source_stat is not None and os.fstat(file.fileno()).st_mtime < source_stat.st_mtime:
                return None
            if np.lib.format.read_magic(file) != (1, 0):
                return None
            shape, is_fortran, dtype = np.lib.format.read_array_header_1_0(file)
            if is_fortran or dtype.hasobject:
                return None
            return np.memmap(file, dtype, "r", file.tell(), shape).view(np.ndarray)
    except Exception:  # numpy parses the header as Python, so a damaged one can raise any error
        return None


def digest_of(text: str, arrays: Sequence[NDArray[Any]]) -> str:
    """Return a digest of a string and of arrays, including the arrays' types and shapes.

    The work is spread over the cores of this process, which hash one to two GB/s each.
    """
    layout = repr([text, *((array.dtype.str, array.shape) for array in arrays)])
    flat = [np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in arrays]
    pieces = [
        data[i : i + _HASH_BLOCK].data for data in flat for i in range(0, len(data), _HASH_BLOCK)
    ]
    with ThreadPoolExecutor(cores_per_process()) as pool:
        hashes = pool.map(hashlib.sha256, [layout.encode(), *pieces])
        return hashlib.sha256(b"".join(digest.digest() for digest in hashes)).hexdigest()


class ArrayFiles(NamedTuple):
    """Arrays in files `<stem><suffix>.npy`, and the digest of all of them in `<stem>.sha256`.

    Attributes:
        stem: The path of the files without their suffixes.
        suffixes: The suffix of each array.
        inputs_digest: The digest of everything that determines the arrays (`digest_of`), so that
            files that were renamed or built from different data are not used.
        source: The file from which the arrays are built. Arrays written by its owner are accepted.
            Arrays older than the file are not used.
    """

    stem: Path
    suffixes: tuple[str, ...]
    inputs_digest: str
    source: Path | None

    def load(self) -> Arrays | None:
        """Memory-map the arrays; return `None` if any of them cannot be used.

        A missing, stale, damaged, swapped or untrusted array cannot be used.
        """
        arrays = []
        for suffix in self.suffixes:
            array = open_array(Path(f"{self.stem}{suffix}.npy"), self.source)
            if array is None:
                return None
            arrays.append(array)
        try:
            owners = [] if self.source is None else [self.source.stat().st_uid]
            with open_trusted(Path(f"{self.stem}.sha256"), *owners) as file:
                expected = file.read(_HEX_DIGITS + 1)
        except OSError:
            return None
        return tuple(arrays) if expected == digest_of(self.inputs_digest, arrays).encode() else None

    def save(self, arrays: Arrays) -> Arrays:
        """Write the arrays, then their digest, and return the arrays memory-mapped.

        The processes of a node share memory-mapped pages, but not newly built arrays.

        Raises:
            OSError: The files cannot be written, or other users can write to them.
        """
        self.stem.parent.mkdir(parents=True, exist_ok=True)
        for suffix, array in zip(self.suffixes, arrays, strict=True):
            with atomic_file(Path(f"{self.stem}{suffix}.npy")) as file:
                np.save(file, array, allow_pickle=False)
        with atomic_file(Path(f"{self.stem}.sha256")) as file:
            file.write(digest_of(self.inputs_digest, arrays).encode())
        mapped = self.load()
        if mapped is None:
            raise PermissionError(errno.EPERM, "other users can write to its files")
        return mapped
