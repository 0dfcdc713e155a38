"""Tensors in a safetensors file, hashed from memory while they are written.

Layout of the file: 8 bytes header length (little-endian), JSON header, tensors without gaps.
The header is hashed, and each tensor is; together with the file's size that covers every byte.
Hashing what memory holds, not what the disk returns, means that a write that went wrong cannot
verify later.

Each thread writes and hashes a tensor piece by piece. A CPU's tensors are used as they lie; a GPU's
come through a little pinned memory, the next piece while one is written, so that a save takes as
long as files and digests do, and no memory that grows with it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron.checkpoint.entries import dtype_name
from megatron.device import Ferries
from megatron.environment import usable_cores

# Hashing, reading and writing release the interpreter lock; more only contend for the disk.
THREADS = min(8, max(4, usable_cores() // 2))
PIECE = 4 << 20  # bytes read, written and hashed at a time


@dataclass(frozen=True)
class Placement:
    """Where a tensor lies in a shard file.

    Attributes:
        dtype: safetensors' name of the number type.
        shape: of the part that the file holds.
        start: first byte, counted from the start of the file.
        size: bytes.
    """

    dtype: str
    shape: tuple[int, ...]
    start: int
    size: int


def digest_of(data: bytes | memoryview) -> str:
    return hashlib.sha256(data).hexdigest()


def plan_shard(
    tensors: Mapping[str, torch.Tensor], *, metadata: Mapping[str, str] | None = None
) -> tuple[bytes, dict[str, Placement]]:
    """The header's bytes and every tensor's place, from names, types and shapes alone.

    Args:
        tensors: by name.
        metadata: safetensors' `__metadata__`, what others expect of the file; None: none.
    """
    # Widest types first: every tensor then starts at a multiple of its element size.
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    spans: dict[str, tuple[int, int]] = {}
    end = 0
    for name in order:
        start, end = end, end + tensors[name].numel() * tensors[name].element_size()
        spans[name] = (start, end)
    entries = {
        name: {
            "dtype": dtype_name(tensors[name].dtype),
            "shape": list(tensors[name].shape),
            "data_offsets": list(span),
        }
        for name, span in spans.items()
    }
    about = {} if metadata is None else {"__metadata__": dict(metadata)}
    text = json.dumps(about | entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    places = {
        name: Placement(
            dtype=dtype_name(tensors[name].dtype),
            shape=tuple(tensors[name].shape),
            start=len(header) + start,
            size=end - start,
        )
        for name, (start, end) in spans.items()
    }
    return header, places


def parse_header(data: bytes) -> dict[str, Placement]:
    """Every tensor's place, from the header's bytes: `plan_shard` the other way round.

    Raises:
        ValueError: it is no header, or names a tensor twice.
    """
    try:
        entries = json.loads(data[8:], object_pairs_hook=_without_doubles)
        return {
            name: Placement(
                dtype=entry["dtype"],
                shape=tuple(entry["shape"]),
                start=len(data) + entry["data_offsets"][0],
                size=entry["data_offsets"][1] - entry["data_offsets"][0],
            )
            for name, entry in entries.items()
            if name != "__metadata__"
        }
    except (TypeError, LookupError, AttributeError, RecursionError) as error:
        raise ValueError(f"not a header of safetensors: {error}") from error


def _without_doubles(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name stands twice in the header")
    return found


def write_shard(
    path: Path,
    tensors: Mapping[str, torch.Tensor],
    header: bytes,
    places: Mapping[str, Placement],
    threads: int = THREADS,
) -> dict[str, str]:
    """Write what `plan_shard` planned to a new file, flush it, and return digests by name.

    Raises:
        OSError: from whichever writer thread met it; the file is then incomplete.
    """
    # The largest first, so that the threads end together.
    order, ferries = sorted(places, key=lambda name: -places[name].size), Ferries(PIECE)
    with open(path, "xb", buffering=0) as file:
        descriptor = file.fileno()
        _write_at(descriptor, memoryview(header), 0)

        def write(name: str) -> str:
            digest, position = hashlib.sha256(), places[name].start
            for data in _pieces(tensors[name], ferries):
                _write_at(descriptor, data, position)
                digest.update(data)
                position += len(data)
            return digest.hexdigest()

        with ThreadPoolExecutor(threads) as pool:
            digests = dict(zip(order, pool.map(write, order), strict=True))
        os.fsync(descriptor)
    return digests


def _pieces(tensor: torch.Tensor, ferries: Ferries) -> Iterable[memoryview]:
    """A tensor's bytes in host memory, in row-major order; each piece until the next one."""
    if tensor.device.type == "cpu" or not tensor.is_contiguous() or not tensor.numel():
        data = memory_of(tensor)
        return (data[start : start + PIECE] for start in range(0, len(data), PIECE))
    return ferries.to(tensor.device).take(bytes_of(tensor))


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor's memory: 1-D, uint8."""
    return tensor.detach().view(-1).view(torch.uint8)


def memory_of(tensor: torch.Tensor) -> memoryview:
    """A tensor's bytes in row-major order; copied only from another device or when strided."""
    return bytes_of(tensor.detach().to("cpu").contiguous()).numpy().data


def _write_at(descriptor: int, data: memoryview, position: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, position)
        data, position = data[written:], position + written


def digest_of_range(path: Path, start: int, size: int) -> str:
    """Digest of `size` bytes of a file from `start`; of fewer where the file ends sooner."""
    digest, memory = hashlib.sha256(), memoryview(bytearray(min(size, PIECE)))
    with open(path, "rb", buffering=0) as file:
        file.seek(start)
        while size and (count := file.readinto(memory[:size])):
            digest.update(memory[:count])
            size -= count
    return digest.hexdigest()
