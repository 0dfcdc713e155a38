"""Read and write files in torch.save's format, and find the files of a Megatron-LM checkpoint.

A file is a zip of uncompressed records:

    <top>/data.pkl      the pickled tree, in which tensors refer to storages by key
    <top>/data/<key>    the bytes of a storage
    <top>/byteorder     "little"

Records are memory-mapped, never extracted, so opening a file is cheap and names in it are never
used as paths. Files are written one tensor at a time, whereas `torch.save` needs all tensors of a
file in memory at once. This is the only module that may use `pickle.Pickler`.

The files of a checkpoint:

    mp_rank_TT[_PPP]/model_optim_rng.pt    everything, or everything except the optimizer states
    mp_rank_TT[_PPP]_EEE/model_optim_rng.pt
                                           the same in Megatron Core, for each expert-parallel rank
    mp_rank_TT[_PPP]/distrib_optim.pt      optimizer states, with --use-distributed-optimizer
                                           (23.06, 23.08)
    mp_rank_TT[_PPP]/model_rng.pt          the same as model_optim_rng.pt, in 23.04
    mp_rank_TT[_PPP]_DDD/optim.pt          optimizer states of each data-parallel rank, in 23.04;
                                           not read
"""

from __future__ import annotations

import collections
import io
import itertools
import math
import mmap
import pickle
import re
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from megatron.checkpoint.legacy.unpickler import (
    STORAGES,
    Namespace,
    TensorRef,
    read_pickle,
    show,
)
from megatron.checkpoint.shard import memory_of
from megatron.checkpoint.trust import open_trusted
from megatron.durable import new_file
from megatron.errors import CheckpointError

MODEL_FILE = "model_optim_rng.pt"
DISTRIBUTED_FILE = "distrib_optim.pt"
MODEL_FILE_OF_23_04 = "model_rng.pt"
STATES_FILE_OF_23_04 = "optim.pt"

_LOCAL_HEADER = 30  # bytes before a record's name; the last four are the lengths of name and extra
_LOCAL_SIGNATURE = b"PK\x03\x04"
_ENCRYPTED = 1
_CHUNK = 64 << 20
_MAX_CHUNKS = 1000  # virtual stages
_PROTOCOL = 2  # the pickle protocol that torch.save writes and that the oldest readers support
_VERSION = b"3\n"  # version of the container since PyTorch 1.6
_ALIGNMENT = 64  # bytes; lets a reader map the tensors
_PADDING_ID = b"FB"  # PyTorch's mark for padding
_LARGE = 1 << 30  # bytes; larger records have a ZIP64 header
_ZIP64_FIELD = 20  # bytes
_RANK_FOLDER = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?")
_STORAGE_TYPES = {dtype: getattr(torch, name) for name, dtype in STORAGES.items()}


class TorchZip:
    """A file in torch.save's format. The names of its records leave out the top-level folder.

    Attributes:
        path: The file.
        buffer: The whole file, mapped into memory, or `window`.
    """

    def __init__(
        self, path: Path, *, allow_foreign: bool = False, window: memoryview | None = None
    ) -> None:
        """Open a file, or one that is embedded in another file.

        Args:
            path: The file.
            allow_foreign: Accept a file owned by another user.
            window: The bytes of the embedded file, if `path` has already been opened and checked.

        Raises:
            CheckpointError: The file cannot be opened, is refused (`open_trusted`), was not written
                by torch.save, is truncated, compressed or big-endian, or has record names that
                occur twice or are paths out of the file's folder.
        """
        self.path = path
        try:
            if window is not None:
                self.buffer: mmap.mmap | memoryview = window
                infos = _list_records(_Window(window))
            else:
                with open_trusted(path, allow_foreign=allow_foreign) as file:
                    self.buffer = map_file(file)
                    infos = _list_records(file)
        except (zipfile.BadZipFile, ValueError, OSError) as error:
            what = "not a file of torch.save since PyTorch 1.6, or damaged"
            raise CheckpointError(f"{path}: {what}: {error}") from error
        self._records: dict[str, tuple[int, zipfile.ZipInfo]] = {}  # first byte, zip entry
        tops = set()
        for info in infos:
            top, _, name = info.filename.partition("/")
            parts = name.split("/")
            if not top or "\\" in info.filename or not {"", ".", ".."}.isdisjoint((top, *parts)):
                raise CheckpointError(f"{path}: refused: record name {info.filename!r}")
            tops.add(top)
            if name in self._records:
                raise CheckpointError(f"{path}: record {name!r} occurs twice")
            self._records[name] = self._locate(info), info
        if len(tops) != 1:
            raise CheckpointError(f"{path}: contains the records of {len(tops)} files")
        if "byteorder" in self._records and bytes(self.record("byteorder")) != b"little":
            raise CheckpointError(f"{path}: big-endian files are not supported")

    def _locate(self, info: zipfile.ZipInfo) -> int:
        """Return the offset of a record's first byte in the file.

        Raises:
            CheckpointError: The record is compressed, or is not where the directory says.
        """
        stored = info.compress_type == zipfile.ZIP_STORED and info.compress_size == info.file_size
        if not stored or info.flag_bits & _ENCRYPTED:
            what = f"{info.filename} is compressed or encrypted"
            raise CheckpointError(f"{self.path}: refused: {what}")
        offset, name = info.header_offset, info.filename.encode()
        end = offset + _LOCAL_HEADER + len(name)
        local = bytes(self.buffer[offset:end]) if offset >= 0 else b""
        if not local.startswith(_LOCAL_SIGNATURE) or not local.endswith(name):
            what = f"{info.filename} is not where it should be"
            raise CheckpointError(f"{self.path}: damaged: {what}")
        lengths = (int.from_bytes(local[i : i + 2], "little") for i in (26, 28))
        start = offset + _LOCAL_HEADER + sum(lengths)
        if start + info.file_size > len(self.buffer):
            raise CheckpointError(f"{self.path}: {info.filename} lies outside the file: truncated?")
        return start

    def record(self, name: str) -> memoryview:
        """Return a record's bytes.

        Raises:
            CheckpointError: There is no such record.
        """
        if name not in self._records:
            raise CheckpointError(f"{self.path}: record {name!r} is missing")
        start, info = self._records[name]
        return memoryview(self.buffer)[start : start + info.file_size]

    def tree(self, names: Mapping[tuple[str, str], Any] | None = None) -> dict[Any, Any]:
        """Return the pickled tree, after comparing it with its CRC-32.

        Args:
            names: The names that the pickle may use, as in `read_pickle`.

        Raises:
            CheckpointError: The tree is missing, damaged, refused, or not a dict.
        """
        self.check("data.pkl")
        tree = read_pickle(bytes(self.record("data.pkl")), str(self.path), names=names)
        if not isinstance(tree, dict):
            raise CheckpointError(f"{self.path}: does not contain a dict")
        return tree

    def find(self, ref: TensorRef) -> memoryview:
        """Return the bytes of a tensor's storage.

        Raises:
            CheckpointError: The storage is missing, or its size differs from the size in the tree.
        """
        data = self.record(f"data/{ref.storage.key}")
        if len(data) != ref.storage.numel * ref.storage.dtype.itemsize:
            raise CheckpointError(f"{self.path}: storage {ref.storage.key} has the wrong size")
        return data

    def load(self, ref: TensorRef) -> torch.Tensor:
        """Return a tensor as a view of the mapped file, without copying it.

        Raises:
            CheckpointError: The storage is missing, or its size differs from the size in the tree.
        """
        data = self.find(ref)
        if not math.prod(ref.shape):
            return torch.empty(ref.shape, dtype=ref.storage.dtype)
        flat = torch.frombuffer(data, dtype=ref.storage.dtype)
        return flat.as_strided(ref.shape, ref.stride, ref.offset)

    def number(self, value: Any) -> int | float:
        """Return a finite number that was saved as a number or as a one-element tensor.

        Raises:
            CheckpointError: The value is not a finite number.
        """
        if isinstance(value, TensorRef) and math.prod(value.shape) == 1:
            value = self.load(value).item()
        if type(value) not in (int, float) or not math.isfinite(value):
            raise CheckpointError(f"{self.path}: {show(value)} is not a finite number")
        return value

    def verify(self) -> None:
        """Compare all records with their CRC-32.

        Raises:
            CheckpointError: A record differs. The message names the first.
        """
        for name in self._records:
            self.check(name)

    def check(self, name: str) -> None:
        """Compare a record with its CRC-32.

        Raises:
            CheckpointError: The record is missing or differs from its CRC-32.
        """
        data, crc = self.record(name), 0
        for position in range(0, len(data), _CHUNK):
            crc = zlib.crc32(data[position : position + _CHUNK], crc)
        if crc != self._records[name][1].CRC:
            raise CheckpointError(f"{self.path}: damaged: record {name!r} fails its CRC-32")


class _Window(io.RawIOBase):
    """A file object that reads from bytes in memory without copying all of them."""

    def __init__(self, data: memoryview) -> None:
        self._data, self._position = data, 0

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = (0, self._position, len(self._data))[whence]
        if start + offset < 0:
            raise OSError("a position before the start")
        self._position = start + offset
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        end = len(self._data) if size is None or size < 0 else self._position + size
        part = bytes(self._data[self._position : end])
        self._position += len(part)
        return part


def map_file(file: IO[bytes]) -> mmap.mmap:
    """Map a file copy-on-write, so that writing to its tensors does not change the file.

    Raises:
        ValueError: The file is empty.
    """
    return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)


def _list_records(file: IO[bytes] | _Window) -> list[zipfile.ZipInfo]:
    with zipfile.ZipFile(file) as archive:
        return archive.infolist()


def write_torch_file(path: Path, tree: Any) -> None:
    """Write a new file that `torch.load` can read, and flush it to disk. The folder is not flushed.

    Args:
        path: The file. Its stem is the prefix of the record names, as with torch.save.
        tree: Dicts, lists, tuples, scalars, argparse.Namespace and tensors. Lazy tensors are read
            when their records are written.

    Raises:
        OSError: The file cannot be written.
    """
    with new_file(path) as file:
        append_torch_file(file, tree, path.stem)


def append_torch_file(file: IO[bytes], tree: Any, stem: str = "archive") -> None:
    """Append a torch.save file to an open file, which may already contain others.

    Args:
        file: The file.
        tree: The content, as for `write_torch_file`.
        stem: The prefix of the record names.

    Raises:
        OSError: The file cannot be written.
    """
    data, tensors = write_pickle(tree)
    with zipfile.ZipFile(_Tail(file), "w", zipfile.ZIP_STORED) as archive:
        _add_record(archive, f"{stem}/data.pkl", data)
        _add_record(archive, f"{stem}/byteorder", memoryview(b"little"))
        for key, tensor in enumerate(tensors):
            _add_record(archive, f"{stem}/data/{key}", memory_of(tensor))
        _add_record(archive, f"{stem}/version", memoryview(_VERSION))


def write_pickle(tree: Any) -> tuple[memoryview, list[Tensor]]:
    """Return the pickle of a tree, and the tensors to which the pickle refers by index."""
    buffer = io.BytesIO()
    pickler = _Pickler(buffer)
    pickler.dump(tree)
    return buffer.getbuffer(), pickler.tensors


class _Tail(io.RawIOBase):
    """A file object that begins at the current end of another file."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._start = file, file.tell()

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._file.tell() - self._start

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        assert whence == io.SEEK_SET
        return self._file.seek(self._start + offset) - self._start

    def write(self, data: Any) -> int:
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()


def _add_record(archive: zipfile.ZipFile, name: str, data: memoryview) -> None:
    """Write a record whose first byte is at a multiple of `_ALIGNMENT` in the file."""
    info = zipfile.ZipInfo(name)
    info.file_size = len(data)
    is_large = len(data) >= _LARGE
    assert archive.fp is not None
    begin = archive.fp.tell() + _LOCAL_HEADER + len(name) + _ZIP64_FIELD * is_large
    padding = -(begin + 4) % _ALIGNMENT
    info.extra = _PADDING_ID + padding.to_bytes(2, "little") + bytes(padding)
    with archive.open(info, "w", force_zip64=is_large) as record:
        for position in range(0, len(data), _CHUNK):
            record.write(data[position : position + _CHUNK])


@dataclass(frozen=True, eq=False)
class _Storage:
    """A reference to a tensor's bytes, which are stored in a separate record."""

    kind: Any
    key: str
    numel: int


class _Pickler(pickle.Pickler):
    """A pickler that replaces every tensor with a reference to a record.

    Attributes:
        tensors: The tensors in the order of their records.
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
        storage = _Storage(_STORAGE_TYPES[obj.dtype], str(len(self.tensors)), obj.numel())
        self.tensors.append(obj)
        shape = tuple(obj.shape)
        strides = torch.empty(shape, device="meta").stride()
        hooks: Any = collections.OrderedDict()
        return torch._utils._rebuild_tensor_v2, (storage, 0, shape, strides, False, hooks)


@dataclass(frozen=True)
class RankFile:
    """The file of one rank.

    Attributes:
        tensor_rank: The tensor-parallel rank.
        stage: The pipeline stage.
        zip: The records of the file, which contain the bytes of its tensors.
        tree: The pickled tree, in which tensors are `TensorRef`s.
        expert_rank: The expert-parallel rank.
    """

    tensor_rank: int
    stage: int
    zip: TorchZip
    tree: Mapping[str, Any]
    expert_rank: int = 0

    @property
    def chunks(self) -> list[Any]:
        """The value of `model`, or the values of `model0`, `model1`, ... for virtual stages."""
        if "model0" not in self.tree:
            return [self.tree.get("model")]
        numbered = (self.tree.get(f"model{index}") for index in range(_MAX_CHUNKS))
        return list(itertools.takewhile(lambda chunk: chunk is not None, numbered))


def open_files(path: Path, *, allow_foreign: bool = False) -> list[RankFile]:
    """Open the files in a checkpoint's folder, ordered by stage, expert rank and tensor rank.

    Args:
        path: The folder.
        allow_foreign: Accept files owned by other users.

    Raises:
        CheckpointError: The grid is incomplete, the files come from different saves, or a file is
            damaged, refused or in an unsupported format.
    """
    files = []
    for folder in sorted(path.glob("mp_rank_*")):
        old = folder / MODEL_FILE_OF_23_04
        has_model = old.exists() or (folder / MODEL_FILE).exists()
        # In 23.04, the folder of a data rank can look like that of a pipeline stage.
        if (folder / STATES_FILE_OF_23_04).exists() and not has_model:
            continue
        match = _RANK_FOLDER.fullmatch(folder.name)
        if match is None:
            raise CheckpointError(f"{folder}: not the name of a rank's folder")
        opened = _open(old if old.exists() else folder / MODEL_FILE, allow_foreign)
        rank, *others = (int(number) for number in match.groups() if number is not None)
        args = opened[1].get("args")
        fields = args.fields if isinstance(args, Namespace) else {}
        experts = fields.get("expert_model_parallel_size")
        # The last number is the expert-parallel rank, if there is expert parallelism.
        expert = others.pop() if others and type(experts) is int and experts > 1 else 0
        if len(others) > 1:
            raise CheckpointError(
                f"{folder}: folders per data rank (expert parallelism) are not supported"
            )
        files.append(RankFile(rank, sum(others), *opened, expert))
    files.sort(key=lambda file: (file.stage, file.expert_rank, file.tensor_rank))
    positions = [(file.stage, file.expert_rank, file.tensor_rank) for file in files]
    grid = itertools.product(*(range(1 + max(axis)) for axis in zip(*positions, strict=True)))
    if positions != list(grid):
        raise CheckpointError(f"{path}: mp_rank_* folders are missing or duplicated")
    for key in ("iteration", "checkpoint_version"):
        if len({show(file.tree.get(key)) for file in files}) != 1:
            what = f"the files differ in {key}: do they come from different saves?"
            raise CheckpointError(f"{path}: {what}")
    return files


def open_distributed(file: RankFile, *, allow_foreign: bool = False) -> RankFile | None:
    """Open a rank's file of the distributed optimizer, or return None if it has none.

    Args:
        file: The rank's other file.
        allow_foreign: Accept a file owned by another user.

    Raises:
        CheckpointError: The file is damaged or refused.
    """
    path = file.zip.path.parent / DISTRIBUTED_FILE
    if not path.exists():
        return None
    return RankFile(file.tensor_rank, file.stage, *_open(path, allow_foreign))


def old_optimizer_files(path: Path) -> Iterator[Path]:
    """Return a folder's optimizer files of version 23.04, which are not read."""
    return path.glob(f"mp_rank_*/{STATES_FILE_OF_23_04}")


def _open(path: Path, allow_foreign: bool) -> tuple[TorchZip, Mapping[str, Any]]:
    if path.is_symlink() or not path.is_file():
        raise CheckpointError(f"{path}: missing, or not a regular file")
    archive = TorchZip(path, allow_foreign=allow_foreign)
    return archive, archive.tree()
