"""Read a safetensors file through the descriptor on which its owner and type were checked."""

from __future__ import annotations

import hashlib
import os
from io import BufferedReader
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from megatron.checkpoint.entries import DTYPES
from megatron.checkpoint.shard import PIECE, Placement, parse_header
from megatron.checkpoint.trust import open_plain, open_trusted
from megatron.errors import CheckpointError

_LENGTH = 8  # bytes at the start of a file that give the length of its header
_MAX_HEADER = 100_000_000  # bytes; safetensors' own limit


class MappedFile:
    """A safetensors file of a checkpoint, mapped into memory.

    The mapping is made through the descriptor that was checked, so tensors come from that file even
    if its path later refers to a different one. No descriptor stays open, because a checkpoint may
    have more files than a process may hold open; `open` refuses any file but the mapped one.

    Attributes:
        path: The file.
        size: The file's size in bytes.
    """

    def __init__(self, path: Path, *, allow_foreign: bool = False) -> None:
        """Open and map a file.

        Args:
            path: The file.
            allow_foreign: Accept a file owned by another user (`open_trusted`).

        Raises:
            CheckpointError: The file cannot be opened or mapped, or is not a trusted regular file.
        """
        self.path = path
        try:
            with open_trusted(path, allow_foreign=allow_foreign) as file:
                status = os.fstat(file.fileno())
                self.size, self._identity = status.st_size, (status.st_dev, status.st_ino)
                # Map the open file rather than its path, as a private mapping like safetensors'.
                name = f"/proc/self/fd/{file.fileno()}"
                self._bytes = torch.from_file(name, size=self.size, dtype=torch.uint8)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
        except RuntimeError as error:  # the file shrank, or there is no address space left
            raise CheckpointError(f"{path}: cannot be mapped: {error}") from error

    def open(self) -> BufferedReader:
        """Open the mapped file again for ordinary reads.

        Reading the file reports a failing disk as an error. Reading the mapping would kill the
        process instead.

        Raises:
            CheckpointError: The path now refers to a different file.
            OSError: The file cannot be opened.
        """
        file = open_plain(self.path)
        status = os.fstat(file.fileno())
        if (status.st_dev, status.st_ino) != self._identity:
            file.close()
            raise CheckpointError(f"{self.path}: replaced while it was read")
        return file

    def digest(self, start: int, size: int) -> str:
        """Return the SHA-256 of the `size` bytes at offset `start`, or of fewer at the file's end.

        Raises:
            CheckpointError: The path now refers to a different file.
            OSError: The bytes cannot be read.
        """
        digest, memory = hashlib.sha256(), memoryview(bytearray(min(size, PIECE)))
        with self.open() as file:
            file.seek(start)
            while size and (count := file.readinto(memory[:size])):
                digest.update(memory[:count])
                size -= count
        return digest.hexdigest()

    def header(self) -> dict[str, Placement]:
        """Return the position of every tensor, after checking that the tensors fill the file.

        Raises:
            CheckpointError: The file is not a valid safetensors file.
        """
        length = int.from_bytes(self._head(_LENGTH), "little")
        try:
            if length > min(_MAX_HEADER, self.size - _LENGTH):
                raise ValueError(f"a header of {length:,} bytes in a file of {self.size:,}")
            placements = parse_header(self._head(_LENGTH + length))
            end = _LENGTH + length
            for name, placement in sorted(
                placements.items(), key=lambda item: (item[1].start, item[1].size)
            ):
                if placement.dtype not in DTYPES:
                    raise ValueError(f"{name} has the unknown type {placement.dtype!r:.40}")
                is_whole = (
                    placement.size == prod(placement.shape) * DTYPES[placement.dtype].itemsize
                )
                if placement.start != end or not is_whole:
                    raise ValueError(f"{name} has a wrong position or size")
                end += placement.size
            if end != self.size:
                raise ValueError(f"{self.size:,} bytes, but header and tensors have {end:,}")
        except ValueError as error:
            raise CheckpointError(f"{self.path}: not a safetensors file: {error}") from error
        return placements

    def tensor(self, placement: Placement) -> Tensor:
        """Return the tensor at a position, as a view of the mapping unless it is misaligned.

        The mapping is read from disk when the tensor is used.
        """
        data = self._bytes[placement.start : placement.start + placement.size]
        dtype = DTYPES[placement.dtype]
        if placement.start % dtype.itemsize:
            data = data.clone()  # other programs may write a header of any length
        return data.view(dtype).view(placement.shape)

    def _head(self, size: int) -> bytes:
        return self._bytes[:size].numpy().tobytes()
