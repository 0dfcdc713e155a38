"""Read `.metadata`, which lists the file and byte range of every chunk of every tensor."""

from __future__ import annotations

import itertools
import mmap
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megatron.checkpoint.entries import DTYPES, Box, is_tiled
from megatron.checkpoint.legacy.torch_file import TorchZip, map_file
from megatron.checkpoint.legacy.unpickler import (
    MAX_BYTES,
    SIZE,
    Factory,
    Opaque,
    Record,
    TensorRef,
    read_pickle,
    record_class,
    show,
)
from megatron.checkpoint.trust import open_trusted
from megatron.errors import CheckpointError

INDEX = ".metadata"
_MAX_INSTRUCTIONS = 20_000_000  # 70 per chunk; DeepSeek-V3 with its optimizer has 200,000 chunks
_MAX_DIMENSIONS = 6
_MAX_BLOB_TREE = 1 << 16  # bytes of a chunk's pickle, which describes a single tensor
_FILE = re.compile(r"__\d{1,9}_\d{1,9}\.distcp")
_DTYPES = {str(dtype): dtype for dtype in DTYPES.values()}
_METADATA = "torch.distributed.checkpoint.metadata"
_PLANNER = "torch.distributed.checkpoint.planner"
_NAMES: dict[tuple[str, str], Factory] = {
    **{
        (_METADATA, kind): record_class(kind)
        for kind in (
            *("Metadata", "MetadataIndex", "StorageMeta", "BytesStorageMetadata"),
            *("TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata"),
        )
    },
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): record_class("_StorageInfo"),
    # Core also stores each rank's write plan, which is not needed.
    **{(_PLANNER, kind): record_class(kind) for kind in ("SavePlan", "WriteItem")},
    (_PLANNER, "TensorWriteData"): record_class("TensorWriteData"),
    (_PLANNER, "WriteItemType"): Factory("kind", lambda arg: Opaque("kind", (arg,))),
    (_METADATA, "_MEM_FORMAT_ENCODING"): Factory("format", lambda arg: Opaque("format", (arg,))),
    ("torch.serialization", "_get_layout"): Factory("layout", lambda arg: Opaque("layout", (arg,))),
    ("torch", "Size"): SIZE,
}


class Blob(NamedTuple):
    """The byte range of a file to which torch.save wrote a chunk of a tensor or another object.

    Attributes:
        file: The file's name.
        start: The offset of the first byte in the file.
        length: The number of bytes.
    """

    file: str
    start: int
    length: int


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor, and the bytes that contain its values."""

    box: Box
    blob: Blob


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in the checkpoint. Its chunks tile it without gaps or overlaps."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


class Index:
    """The tensors in a folder, and the memory-mapped files that contain them.

    Attributes:
        tensors: The tensors by Megatron Core's names.
        blobs: The byte ranges of other objects by Megatron Core's names.
    """

    def __init__(self, folder: Path, *, allow_foreign: bool = False) -> None:
        """Read `.metadata`, and check every byte range in it against the files' sizes.

        Args:
            folder: The checkpoint's folder.
            allow_foreign: Accept files owned by other users.

        Raises:
            CheckpointError: A file is missing, damaged or refused, or contradicts another file.
        """
        self._folder, path = folder, folder / INDEX
        try:
            with open_trusted(path, allow_foreign=allow_foreign) as file:
                data = file.read(MAX_BYTES + 1)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
        tree = read_pickle(data, str(path), names=_NAMES, max_instructions=_MAX_INSTRUCTIONS)
        try:
            self.tensors, self.blobs, spans = _parse(tree)
        except _InvalidIndexError as error:
            raise CheckpointError(f"{path}: damaged: {error}") from None
        self._refs: dict[bytes, TensorRef] = {}  # chunks of one shape have the same structure
        self._files = {name: _map(folder / name, allow_foreign) for name in spans}
        for name, ranges in spans.items():
            _check_ranges(folder / name, ranges, len(self._files[name]))

    def archive(self, name: str) -> TorchZip:
        """Return the file in torch.save's format that contains an object which is not a tensor.

        Args:
            name: The object's name.

        Raises:
            CheckpointError: The bytes are damaged.
        """
        return self._open(self.blobs[name])

    def _open(self, blob: Blob) -> TorchZip:
        window = memoryview(self._files[blob.file])[blob.start : blob.start + blob.length]
        return TorchZip(self._folder / blob.file, window=window)

    def load(self, name: str, chunk: Chunk, *, verify: bool = False) -> torch.Tensor:
        """Return the values of a chunk, as a view of the mapped file.

        The view may be misaligned, so copy it before computing with it.

        Args:
            name: The tensor's name.
            chunk: One of its chunks.
            verify: Compare the chunk's bytes with their CRC-32.

        Raises:
            CheckpointError: The bytes are damaged, or contain a different tensor.
        """
        path = self._folder / chunk.blob.file
        try:
            archive = self._open(chunk.blob)
            tree = archive.record("data.pkl")
            archive.check("data.pkl")
            if len(tree) > _MAX_BLOB_TREE:
                raise CheckpointError(f"{path}: {len(tree):,} bytes of structure")
            structure, stored = bytes(tree), self.tensors[name]
            ref = self._refs.get(structure) or read_pickle(structure, str(path))
            has_dtype = isinstance(ref, TensorRef) and ref.storage.dtype == stored.dtype
            if not has_dtype or ref.shape != chunk.box.shape:
                raise CheckpointError(f"{path}: damaged: not the tensor that {INDEX} names")
            self._refs[structure] = ref
            if verify:
                archive.check(f"data/{ref.storage.key}")
            return archive.load(ref)
        except CheckpointError as error:
            raise CheckpointError(f"{error}: {name} at byte {chunk.blob.start:,}") from None


class _InvalidIndexError(Exception):
    """An error for an invalid or inconsistent index."""


def _parse(
    tree: Any,
) -> tuple[dict[str, StoredTensor], dict[str, Blob], dict[str, list[tuple[int, int]]]]:
    """Return the tensors and other objects by name, and all ranges (start, length) of each file."""
    top = _fields(tree, "Metadata")
    metadata, storage = top.get("state_dict_metadata"), top.get("storage_data")
    if type(metadata) is not dict or type(storage) is not dict:
        raise _InvalidIndexError("it has no state_dict_metadata or no storage_data")
    locations: dict[tuple[str, tuple[int, ...] | None], Blob] = {}
    spans = defaultdict[str, list[tuple[int, int]]](list)
    for key, value in storage.items():
        index, info = _fields(key, "MetadataIndex"), _fields(value, "_StorageInfo")
        name, offset = index.get("fqn"), index.get("offset")
        if type(name) is not str:
            raise _InvalidIndexError("a location has no name")
        chunk_offset = None if offset is None else _sizes(offset, name)
        if (name, chunk_offset) in locations:
            raise _InvalidIndexError(f"{name} has two locations for one chunk")
        location = locations[name, chunk_offset] = _location(info, name)
        spans[location.file].append((location.start, location.length))
    tensors: dict[str, StoredTensor] = {}
    blobs: dict[str, Blob] = {}
    count = 0
    for name, record in metadata.items():
        if type(name) is not str:
            raise _InvalidIndexError("a tensor's name is not a string")
        if isinstance(record, Record) and record.kind == "BytesStorageMetadata":
            if (name, None) not in locations:
                raise _InvalidIndexError(f"{name} has no location")
            blobs[name] = locations[name, None]
            count += 1
            continue
        tensors[name] = _tensor(name, _fields(record, "TensorStorageMetadata"), locations)
        count += len(tensors[name].chunks)
    if count != len(locations):
        raise _InvalidIndexError("storage_data has locations that belong to no tensor")
    return tensors, blobs, spans


def _tensor(
    name: str,
    fields: Mapping[str, Any],
    locations: Mapping[tuple[str, tuple[int, ...] | None], Blob],
) -> StoredTensor:
    properties = fields.get("properties")
    state = properties.state if isinstance(properties, Record) else None
    if isinstance(state, dict):
        state = (state.get("dtype"), state.get("layout"))
    dtype, layout = state[:2] if state is not None and len(state) >= 2 else (None, None)
    if type(dtype) is not str or dtype not in _DTYPES:
        raise _InvalidIndexError(f"{name} has the type {show(dtype)}")
    if layout != Opaque("layout", ("torch.strided",)):
        raise _InvalidIndexError(f"{name} is not a dense tensor")
    shape, chunks = _sizes(fields.get("size"), name), []
    records = fields.get("chunks")
    if type(records) is not list or 0 in shape or len(shape) > _MAX_DIMENSIONS:
        raise _InvalidIndexError(f"{name} has no chunks, no elements or too many dimensions")
    for record in records:
        chunk = _fields(record, "ChunkStorageMetadata")
        box = Box(_sizes(chunk.get("offsets"), name), _sizes(chunk.get("sizes"), name))
        if not box.fits(shape) or (name, box.offset) not in locations:
            raise _InvalidIndexError(f"a chunk of {name} lies outside it, or has no location")
        blob = locations[name, box.offset]
        if box.volume * _DTYPES[dtype].itemsize > blob.length:
            raise _InvalidIndexError(f"a chunk of {name} needs more bytes than are stored for it")
        chunks.append(Chunk(box, blob))
    if not is_tiled(shape, [chunk.box for chunk in chunks]):
        raise _InvalidIndexError(f"the chunks of {name} overlap or leave gaps")
    return StoredTensor(_DTYPES[dtype], shape, tuple(chunks))


def _location(info: Mapping[str, Any], name: str) -> Blob:
    file, start, length = (info.get(key) for key in ("relative_path", "offset", "length"))
    if type(file) is not str or not _FILE.fullmatch(file):
        raise _InvalidIndexError(f"{name} is in {show(file)}, which is not a file of this folder")
    if type(start) is not int or type(length) is not int or start < 0 or length <= 0:
        raise _InvalidIndexError(f"{name} is at byte {show(start)}, {show(length)} bytes long")
    if info.get("transform_descriptors"):
        raise _InvalidIndexError(f"{name} is compressed or encoded, which is not supported")
    return Blob(file, start, length)


def _fields(record: Any, kind: str) -> Mapping[str, Any]:
    if not isinstance(record, Record) or record.kind != kind or type(record.state) is not dict:
        raise _InvalidIndexError(f"{show(record)} instead of a {kind}")
    return record.state


def _sizes(value: Any, name: str) -> tuple[int, ...]:
    if type(value) is not tuple or not all(type(size) is int and size >= 0 for size in value):
        raise _InvalidIndexError(f"{name} has a shape or an offset that is not a tuple of sizes")
    return value


def _map(path: Path, allow_foreign: bool) -> mmap.mmap:
    try:
        with open_trusted(path, allow_foreign=allow_foreign) as file:
            return map_file(file)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError:  # an empty file cannot be mapped
        raise CheckpointError(f"{path}: damaged: the file is empty") from None


def _check_ranges(path: Path, ranges: list[tuple[int, int]], size: int) -> None:
    """Check that the byte ranges lie inside the file and do not overlap."""
    ranges = sorted(ranges)
    end = max(start + length for start, length in ranges)
    if end > size:
        raise CheckpointError(
            f"{path}: {size:,} bytes, but {INDEX} names {end:,}: is the file truncated?"
        )
    for (start, length), (following, _) in itertools.pairwise(ranges):
        if start + length > following:
            raise CheckpointError(f"{path}: two chunks in {INDEX} overlap at byte {following:,}")
