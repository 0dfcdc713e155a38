"""Tables stored as HDF5 block files, so processes can share the work and resume after any block.

A table of `count` rows is divided into blocks of `size` rows. `a-b.hdf5` contains rows a to b - 1.
A file is written under a temporary name, flushed, and renamed when it is complete. File names and
layout are the same as in Megatron-LM 23.08: contiguous data sets without attributes or filters.

HDF5 files are not trusted. Data sets are compared with the expected types and shapes before they
are read. They must not refer to other files, be compressed, or claim more rows than are stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as StillRunning
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from megatron.durable import atomic_file, sync_folder, writing_to
from megatron.errors import DataError, warn
from megatron.extras import packages_of
from megatron.parallel.collectives import all_reduce
from megatron.parallel.layout import Axis

if TYPE_CHECKING:
    import h5py

_WAIT = 5.0  # seconds between two heartbeats of the first process
_RUN = 1 << 16  # consecutive rows of a table to check at a time
REBUILD_HINT = "run tools/retro/main.py again, which rebuilds missing and damaged files"

Arrays = dict[str, NDArray[Any]]


class TableBlock(NamedTuple):
    """A range of a table's rows, and the file that stores it.

    Attributes:
        start: The first row.
        stop: The row after the last.
        path: The file, which may not exist yet.
    """

    start: int
    stop: int
    path: Path

    @property
    def rows(self) -> int:
        """The number of rows."""
        return self.stop - self.start


class DataSet(NamedTuple):
    """The expected type and shape of a data set in a file.

    Attributes:
        dtype: The NumPy type, such as "u4".
        shape: The length of each dimension. `None` accepts any length.
        may_be_flat: Whether to accept the shape (0,) too, which Megatron-LM writes for zero rows.
    """

    dtype: str
    shape: tuple[int | None, ...]
    may_be_flat: bool = False


# A function that returns the data sets that a block must contain, by name.
Contents = Callable[[TableBlock], Mapping[str, DataSet]]


def plan_blocks(folder: Path, count: int, size: int) -> list[TableBlock]:
    """Return all blocks of a table.

    Args:
        folder: The folder of the block files.
        count: The number of rows in the table.
        size: The number of rows in every block except the last.
    """
    if count == 0:
        return []
    # Megatron-LM's formula. File names depend on its rounding.
    digits = int(np.ceil(np.log(count) / np.log(10)) + 1)
    bounds = ((start, min(count, start + size)) for start in range(0, count, size))
    return [
        TableBlock(start, stop, folder / f"{start:0{digits}}-{stop:0{digits}}.hdf5")
        for start, stop in bounds
    ]


def evenly_spaced(count: int, limit: int) -> Iterator[slice]:
    """Yield slices of a table's rows: all, or evenly spaced runs of at most about `limit` rows.

    Args:
        count: The number of rows in the table.
        limit: The approximate maximum number of rows to yield.
    """
    step = _RUN * max(1, -(-count // limit))
    return (slice(start, min(count, start + _RUN)) for start in range(0, count, step))


def missing_blocks(
    blocks: Sequence[TableBlock], contents: Contents, world: Axis
) -> list[TableBlock]:
    """Return, identically on all processes, the blocks that do not exist yet. Collective.

    A damaged file is reported with a warning and counts as missing. The file is not removed: the
    new one replaces it when complete. The processes divide the files among themselves.

    Args:
        blocks: The blocks to look for.
        contents: The data sets that each block must contain.
        world: The processes that share the folder.
    """
    is_missing = torch.zeros(len(blocks), dtype=torch.int32)
    for index in range(world.rank, len(blocks), world.size):
        block = blocks[index]
        try:
            with open_block(block, contents):
                pass
        except FileNotFoundError:
            is_missing[index] = 1
        except DataError as error:
            is_missing[index] = 1
            warn(f"{error}; it will be rebuilt")
    missing: list[int] = all_reduce(is_missing, world).nonzero().flatten().tolist()
    return [blocks[index] for index in missing]


def blocks_to_do(
    blocks: Sequence[TableBlock], contents: Contents, world: Axis, label: str = ""
) -> Iterator[TableBlock]:
    """Yield the missing blocks that this process must write. Collective.

    The processes wait for each other after every block, so no process waits longer than the time
    for one block. When the iterator is exhausted, all blocks exist.

    Args:
        blocks: All blocks of a table.
        contents: The data sets that each block must contain.
        world: The processes that share the folder.
        label: The label of the progress bar, or "" for no bar.
    """
    missing = missing_blocks(blocks, contents, world)
    with _bar(blocks, missing, label if world.is_first else "") as advance:
        for first in range(0, len(missing), world.size):
            if first + world.rank < len(missing):
                yield missing[first + world.rank]
            world.barrier()
            advance(sum(block.rows for block in missing[first : first + world.size]))


@contextmanager
def _bar(
    blocks: Sequence[TableBlock], missing: Sequence[TableBlock], label: str
) -> Iterator[Callable[[int], object]]:
    """Yield a function that advances a progress bar by a given number of rows."""
    if not label or not missing:
        yield lambda rows: None
        return
    from tqdm import tqdm

    total = sum(block.rows for block in blocks)
    done = total - sum(block.rows for block in missing)
    with tqdm(total=total, initial=done, desc=label, unit=" rows", dynamic_ncols=True) as bar:
        yield bar.update


def on_first(work: Callable[[], object], world: Axis) -> None:
    """Run `work` on the first process while the others wait. Collective.

    The processes exchange a status every few seconds, because waiting at a barrier could exceed the
    timeout of collective operations.

    Raises:
        Exception: On the first process, any error that `work` raises.
        DataError: On the other processes, if `work` raised an error on the first.
    """
    if world.size == 1:
        work()
        return
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(work) if world.is_first else None
        error: BaseException | None = None
        while True:
            state = torch.zeros(1, dtype=torch.int32)
            if future is not None:
                try:
                    error = future.exception(timeout=_WAIT)
                    state += 1 if error is None else 2
                except StillRunning:
                    pass
            outcome = int(all_reduce(state, world))
            if outcome:
                break
    if error is not None:
        raise error
    if outcome > 1:
        raise DataError("the first process failed: see its message")


@contextmanager
def new_hdf5(path: Path) -> Iterator[h5py.File]:
    """Yield a new HDF5 file, which gets its final name only if the `with` body succeeds.

    If the body fails, the file is removed.

    Raises:
        StorageError: The file cannot be written.
        ConfigError: The package h5py is missing.
    """
    with packages_of("retro"):
        import h5py
    with writing_to("--retro-workdir", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(path) as file, h5py.File(file, "w") as content:
            yield content
        sync_folder(path.parent)


def write_block(block: TableBlock, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Write the file of a block atomically.

    Args:
        block: The block to write.
        arrays: The data sets by name.

    Raises:
        StorageError: The file cannot be written.
    """
    with new_hdf5(block.path) as file:
        for name, array in arrays.items():
            file.create_dataset(name, data=array)


def read_block(block: TableBlock, contents: Contents) -> Arrays:
    """Read the data sets of a block into memory.

    Raises:
        DataError: The file is missing or damaged, or its data sets differ from `contents`.
    """
    with _open_existing(block, contents) as sets:
        return {name: dataset[()] for name, dataset in sets.items()}


def map_block(block: TableBlock, contents: Contents) -> Arrays:
    """Return the data sets of a block, memory-mapped rather than read.

    Raises:
        DataError: The file is missing or damaged, or its data sets differ from `contents`.
    """
    with _open_existing(block, contents) as sets:
        return {
            name: np.memmap(block.path, dataset.dtype, "r", dataset.id.get_offset(), dataset.shape)
            if dataset.size
            else dataset[()]
            for name, dataset in sets.items()
        }


@contextmanager
def open_block(block: TableBlock, contents: Contents) -> Iterator[dict[str, h5py.Dataset]]:
    """Yield the data sets of a block, checked but not read yet.

    Raises:
        FileNotFoundError: The file does not exist.
        DataError: The file is damaged, or its data sets differ from `contents`.
    """
    with open_hdf5(block.path, contents(block)) as sets:
        yield sets


@contextmanager
def _open_existing(block: TableBlock, contents: Contents) -> Iterator[dict[str, h5py.Dataset]]:
    """Yield the checked data sets of a block. A missing file raises a DataError."""
    try:
        with open_block(block, contents) as sets:
            yield sets
    except FileNotFoundError:
        raise DataError(
            f"{block.path} does not exist: the working folder is incomplete; {REBUILD_HINT}"
        ) from None
    except DataError as error:
        raise DataError(f"{error}; {REBUILD_HINT}") from None


@contextmanager
def open_hdf5(path: Path, expected: Mapping[str, DataSet]) -> Iterator[dict[str, h5py.Dataset]]:
    """Yield the data sets of a file, checked but not read yet.

    Args:
        path: The file.
        expected: The data sets that the file must contain, by name. Other data sets are ignored.

    Raises:
        FileNotFoundError: The file does not exist.
        DataError: The file is damaged or does not contain the expected data sets.
        ConfigError: The package h5py is missing.
    """
    with packages_of("retro"):
        import h5py
    with _damage_as_data_error(path):
        file = h5py.File(path, "r")
    with file:
        with _damage_as_data_error(path):
            sets = {name: _checked_dataset(path, file, name, expected[name]) for name in expected}
        with _damage_as_data_error(path):
            yield sets


@contextmanager
def _damage_as_data_error(path: Path) -> Iterator[None]:
    """Turn the errors that h5py raises for a damaged file into a DataError that names the file."""
    try:
        yield
    except FileNotFoundError:
        raise
    except (OSError, RuntimeError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: not a readable HDF5 file ({error})") from error


def _checked_dataset(path: Path, file: h5py.File, name: str, expected: DataSet) -> h5py.Dataset:
    import h5py

    # A soft or external link could name any file.
    if not isinstance(file.get(name, getlink=True), h5py.HardLink):
        names = ", ".join(repr(str(key)) for key in list(file)[:4]) or "none"
        raise DataError(f"{path}: no data set {name!r} (the file has {names})")
    dataset = file[name]
    if not isinstance(dataset, h5py.Dataset):
        raise DataError(f"{path}: {name!r} is a group, expected a data set")
    dtype, shape = np.dtype(expected.dtype), expected.shape
    fits = len(dataset.shape) == len(shape) and all(
        length in (actual, None) for actual, length in zip(dataset.shape, shape, strict=True)
    )
    if dataset.dtype != dtype or not (fits or (expected.may_be_flat and dataset.shape == (0,))):
        expected_shape = "x".join("any" if length is None else str(length) for length in shape)
        actual = "x".join(map(str, dataset.shape))
        raise DataError(
            f"{path}: {name!r} has {actual} values of {dataset.dtype}, expected "
            f"{expected_shape} of {dtype}"
        )
    # A compressed data set of a few bytes, or one stored elsewhere, could fill the memory.
    stored = dataset.id.get_storage_size()
    if (
        dataset.external
        or dataset.is_virtual
        or dataset.chunks
        or stored != dataset.size * dtype.itemsize
    ):
        raise DataError(f"{path}: {name!r} is not stored contiguously in this file")
    if stored and dataset.id.get_offset() + stored > path.stat().st_size:
        raise DataError(f"{path}: {name!r} extends beyond the end of the file, which is truncated")
    return dataset
