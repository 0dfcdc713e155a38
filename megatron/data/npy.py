"""Shards of token ids in numpy's `.npy` format, as written by other trainers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron.errors import DataError

_SEARCH_CHUNK = 1 << 24  # the number of tokens searched for ends of documents at a time


class Shard(NamedTuple):
    """An array of token ids in a file.

    Attributes:
        path: The file.
        ids: The memory-mapped array, `[tokens]`, or `[documents, tokens]` with a document per row.
    """

    path: Path
    ids: NDArray[Any]

    def documents(self, eod: int | None) -> Iterator[NDArray[Any]]:
        """Yield the documents, each `[tokens]`.

        Args:
            eod: The id that ends a document in a `[tokens]` array. It is kept in the document. If
                `None`, the file is a single document.
        """
        if self.ids.ndim == 2:
            yield from self.ids
            return
        start = 0
        for first in range(0, len(self.ids) if eod is not None else 0, _SEARCH_CHUNK):
            ends = np.flatnonzero(self.ids[first : first + _SEARCH_CHUNK] == eod)
            for end in (first + 1 + ends).tolist():
                yield self.ids[start:end]
                start = end
        if start < len(self.ids):
            yield self.ids[start:]


def find_shards(pattern: str) -> list[Path]:
    """Return the sorted `.npy` files that a file, glob or folder names; empty if there are none."""
    path = Path(pattern)
    if path.is_dir():
        return sorted(path.glob("*.npy"))
    if path.suffix != ".npy":
        return []
    return [path] if path.exists() else sorted(path.parent.glob(path.name))


def open_shard(path: Path) -> Shard:
    """Map a shard into memory and check that no id is negative. Nothing in it is unpickled.

    Raises:
        DataError: The file cannot be read, is not a valid `.npy` file of token ids in one or two
            dimensions, or holds a negative id.
    """
    try:
        # A view as a plain array, because slicing an np.memmap takes ten times as long.
        ids = np.load(path, mmap_mode="r", allow_pickle=False).view(np.ndarray)
    except OSError as error:
        raise DataError(f"--input {path}: {error.strerror or error}: copy it again") from error
    except Exception as error:  # numpy parses the header as Python, which may raise any error
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise DataError(
            f"--input {path}: not a .npy file of numbers, or truncated ({reason}): copy or write "
            "it again"
        ) from error
    if ids.dtype.kind not in "iu" or ids.ndim not in (1, 2):
        raise DataError(
            f"--input {path}: an array {list(ids.shape)} of {ids.dtype}, expected token ids of an "
            "integer type, [tokens] or [documents, tokens]: write it again with .astype(...)"
        )
    if ids.size and int(ids.min()) < 0:
        position = int(np.argmin(ids))
        raise DataError(
            f"--input {path}: negative token id {ids.min()} at position {position}: write it again "
            "without padding"
        )
    return Shard(path, ids)
