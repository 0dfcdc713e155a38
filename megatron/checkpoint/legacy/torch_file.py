"""Writes files that `torch.load` reads, a tensor at a time: the counterpart of `torch_zip`.

`torch.save` wants all tensors of a file in memory at once; these may be deferred, and each is read
when its record is written. The only file that may touch `pickle.Pickler`.
"""

from __future__ import annotations

import collections
import io
import os
import pickle
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from megatron.checkpoint.shard import memory_of

_PROTOCOL = 2  # what torch.save writes, and what the oldest readers know
_VERSION = b"3\n"  # of the container, since PyTorch 1.6
_ALIGNMENT = 64  # bytes, so that a reader may map the tensors
_PADDING_ID = b"FB"  # as PyTorch marks it
_LOCAL_HEADER = 30  # bytes of a record's header before its name
_LARGE = 1 << 30  # bytes; larger records have a ZIP64 header
_ZIP64_FIELD = 20  # bytes
_CHUNK = 64 << 20

_STORAGES = {
    torch.float64: torch.DoubleStorage,
    torch.float32: torch.FloatStorage,
    torch.float16: torch.HalfStorage,
    torch.bfloat16: torch.BFloat16Storage,
    torch.int64: torch.LongStorage,
    torch.int32: torch.IntStorage,
    torch.uint8: torch.ByteStorage,
}


def write_torch_file(path: Path, tree: Any) -> None:
    """Write a new file and flush it to the disk. The folder is not flushed.

    Args:
        path: of the file; its stem names the records, as with torch.save.
        tree: dicts, lists, tuples, scalars, argparse.Namespace, and tensors, which may be deferred.

    Raises:
        OSError: it cannot be written.
    """
    buffer = io.BytesIO()
    pickler = _Pickler(buffer)
    pickler.dump(tree)
    with open(path, "xb") as file:
        with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
            _add(archive, f"{path.stem}/data.pkl", buffer.getbuffer())
            _add(archive, f"{path.stem}/byteorder", memoryview(b"little"))
            for key, tensor in enumerate(pickler.tensors):
                _add(archive, f"{path.stem}/data/{key}", memory_of(tensor))
            _add(archive, f"{path.stem}/version", memoryview(_VERSION))
        file.flush()
        os.fsync(file.fileno())


def _add(archive: zipfile.ZipFile, name: str, data: memoryview) -> None:
    """A record whose bytes begin at a multiple of the alignment."""
    info = zipfile.ZipInfo(name)
    info.file_size = len(data)
    is_large = len(data) >= _LARGE
    assert archive.fp is not None
    begin = archive.fp.tell() + _LOCAL_HEADER + len(name) + _ZIP64_FIELD * is_large
    padding = -(begin + 4) % _ALIGNMENT
    info.extra = _PADDING_ID + padding.to_bytes(2, "little") + bytes(padding)
    with archive.open(info, "w", force_zip64=is_large) as record:
        _copy(data, record)


def _copy(data: memoryview, record: IO[bytes]) -> None:
    for position in range(0, len(data), _CHUNK):
        record.write(data[position : position + _CHUNK])


@dataclass(frozen=True, eq=False)
class _Storage:
    """Stands for a tensor's bytes, which have a record of their own."""

    kind: Any
    key: str
    numel: int


class _Pickler(pickle.Pickler):
    """Puts a reference to a record in the place of every tensor.

    Attributes:
        tensors: in the order of their records.
    """

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file, protocol=_PROTOCOL)
        self.tensors: list[Tensor] = []

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, _Storage):
            return ("storage", obj.kind, obj.key, "cpu", obj.numel)
        return None

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, Tensor):
            return NotImplemented
        storage = _Storage(_STORAGES[obj.dtype], str(len(self.tensors)), obj.numel())
        self.tensors.append(obj)
        shape = tuple(obj.shape)
        strides = torch.empty(shape, device="meta").stride()
        hooks: Any = collections.OrderedDict()
        return torch._utils._rebuild_tensor_v2, (storage, 0, shape, strides, False, hooks)
