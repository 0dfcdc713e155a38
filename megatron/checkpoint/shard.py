"""Write tensors to a safetensors file, hashing them in memory while they are written.

Layout of the file: 8 bytes with the header's length (little-endian), the JSON header, the tensors
without gaps. The header and each tensor have a digest. Together with the file's size, these digests
cover every byte. The digests are computed from the bytes in memory, not from bytes read back from
disk, so a failed write does not pass verification later.

Each thread writes and hashes a tensor chunk by chunk. CPU tensors are used in place. GPU tensors
pass through a small pinned buffer: the next chunk is copied while the current one is written. A
save therefore takes only as long as writing and hashing do, and the memory that it needs does not
grow with the checkpoint.
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

from megatron.checkpoint.entries import LazyTensor, dtype_name
from megatron.device import StagingBuffers
from megatron.durable import create
from megatron.environment import usable_cores

# Hashing, reading and writing release the GIL. More threads would only contend for the disk.
THREADS = min(8, max(4, usable_cores() // 2))
PIECE = 4 << 20  # bytes read, written and hashed at a time


@dataclass(frozen=True)
class Placement:
    """The position of a tensor in a shard file.

    Attributes:
        dtype: Safetensors' name for the dtype.
        shape: The shape of the tensor in this file, which may be part of a larger one.
        start: The offset of its first byte in the file.
        size: Its size in bytes.
    """

    dtype: str
    shape: tuple[int, ...]
    start: int
    size: int


def digest_of(data: bytes | memoryview) -> str:
    """Return the SHA-256 digest of bytes, in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def plan_shard(
    tensors: Mapping[str, torch.Tensor], *, metadata: Mapping[str, str] | None = None
) -> tuple[bytes, dict[str, Placement]]:
    """Return the header of a file with these tensors, and the position of each tensor in the file.

    Args:
        tensors: The tensors by name. Only names, dtypes and shapes are used, not values.
        metadata: Safetensors' `__metadata__`, which some other programs require.

    Raises:
        ValueError: Safetensors does not support the dtype of a tensor.
    """
    # Put the widest types first, so that every tensor starts at a multiple of its element size.
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    entries, end = {}, 0
    for name in order:
        tensor = tensors[name]
        start, end = end, end + tensor.numel() * tensor.element_size()
        dtype, shape = dtype_name(tensor.dtype), list(tensor.shape)
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    about = {} if metadata is None else {"__metadata__": dict(metadata)}
    text = json.dumps(about | entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return header, parse_header(header)


def parse_header(data: bytes) -> dict[str, Placement]:
    """Parse a header and return the position of each tensor in the file.

    Raises:
        ValueError: The bytes are not a header, or the header contains a name twice.
    """
    if len(data) < 8 or int.from_bytes(data[:8], "little") != len(data) - 8:
        raise ValueError(
            "not a safetensors header: its length differs from the length that it states"
        )

    def reject_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
        values = dict(pairs)
        if len(values) < len(pairs):
            raise ValueError("a name occurs twice in the header")
        return values

    try:
        entries = json.loads(data[8:], object_pairs_hook=reject_duplicates)
        entries.pop("__metadata__", None)
        placements = {}
        for name, entry in entries.items():
            dtype, shape, (start, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
            if type(dtype) is not str or any(type(n) is not int for n in (*shape, start, end)):
                raise TypeError(f"{name}: a value of the wrong type")
            if min(*shape, start, end - start) < 0:
                raise TypeError(f"{name}: a negative number")
            placements[name] = Placement(dtype, tuple(shape), len(data) + start, end - start)
        return placements
    except (TypeError, LookupError, AttributeError, RecursionError) as error:
        raise ValueError(f"not a safetensors header: {error}") from error


def write_shard(
    path: Path,
    tensors: Mapping[str, torch.Tensor],
    header: bytes,
    placements: Mapping[str, Placement],
    threads: int = THREADS,
) -> dict[str, str]:
    """Write tensors to a new file, flush it to disk, and return the tensors' SHA-256 by name.

    Args:
        path: The file, which must not exist.
        tensors: The tensors by name, as passed to `plan_shard`.
        header: The header that `plan_shard` returned.
        placements: The positions that `plan_shard` returned.
        threads: Number of tensors written at a time.

    Raises:
        OSError: The file exists, or writing failed in one of the threads, so the file is
            incomplete.
    """
    # Write the largest tensors first, so that the threads finish at about the same time.
    order = sorted(placements, key=lambda name: -placements[name].size)
    buffers = StagingBuffers(PIECE)
    with create(path, buffering=0) as file:
        descriptor = file.fileno()
        _write_at(descriptor, memoryview(header), 0)

        def write(name: str) -> str:
            digest, position = hashlib.sha256(), placements[name].start
            for data in _pieces(tensors[name], buffers):
                _write_at(descriptor, data, position)
                digest.update(data)
                position += len(data)
            return digest.hexdigest()

        with ThreadPoolExecutor(threads) as pool:
            digests = dict(zip(order, pool.map(write, order), strict=True))
        os.fsync(descriptor)
    return digests


def _pieces(tensor: torch.Tensor, buffers: StagingBuffers) -> Iterable[memoryview]:
    """Return an iterable over a tensor's bytes in row-major order, as chunks in host memory.

    Each chunk is valid until the next one is requested.
    """
    if isinstance(tensor, LazyTensor):
        return (piece for part in tensor.parts() for piece in _cut(memory_of(part)))
    if tensor.device.type == "cpu" or not tensor.is_contiguous() or not tensor.numel():
        return _cut(memory_of(tensor))
    return buffers.for_device(tensor.device).download(bytes_of(tensor))


def _cut(data: memoryview) -> Iterable[memoryview]:
    return (data[start : start + PIECE] for start in range(0, len(data), PIECE))


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a 1-D uint8 view of a contiguous tensor's memory."""
    return tensor.detach().view(-1).view(torch.uint8)


def memory_of(tensor: torch.Tensor) -> memoryview:
    """Return a tensor's bytes in row-major order, in host memory.

    They are copied only if the tensor is not contiguous or not on the CPU.
    """
    return bytes_of(tensor.detach().to("cpu").contiguous()).numpy().data


def _write_at(descriptor: int, data: memoryview, position: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, position)
        data, position = data[written:], position + written
