"""The container that torch.save writes: a zip file of uncompressed records.

    <top>/data.pkl      the pickled tree; tensors in it name a storage
    <top>/data/<key>    the bytes of a storage
    <top>/byteorder     "little"

Records are memory-mapped, never extracted: opening costs nothing, and a name in the file is
compared, not used as a path.
"""

from __future__ import annotations

import mmap
import zipfile
import zlib
from pathlib import Path, PurePosixPath

from megatron.errors import CheckpointError

_LOCAL_HEADER = 30  # bytes before a record's name; the last four: length of name and extra
_LOCAL_SIGNATURE = b"PK\x03\x04"
_ENCRYPTED = 1
_CHUNK = 64 << 20


class TorchZip:
    """Byte ranges of one file by record name, the top folder's name left out.

    Raises:
        CheckpointError: not such a file, truncated, compressed, or with names that leave it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with open(path, "rb") as file:
                # A private copy-on-write mapping: tensors over it may be written without effect.
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            with zipfile.ZipFile(path) as archive:
                infos = archive.infolist()
        except (zipfile.BadZipFile, ValueError, OSError) as error:
            raise CheckpointError(
                f"{path}: not a file of torch.save since PyTorch 1.6, or damaged: {error}"
            ) from error
        self._ranges: dict[str, tuple[int, int]] = {}
        self._crcs: dict[str, int] = {}
        tops = set()
        for info in infos:
            top, name = self._split(info.filename)
            tops.add(top)
            if name in self._ranges:
                raise CheckpointError(f"{path}: record {name!r} is there twice")
            self._ranges[name] = self._locate(info)
            self._crcs[name] = info.CRC
        if len(tops) != 1:
            raise CheckpointError(f"{path}: records of {len(tops)} files in one")
        if "byteorder" in self._ranges and bytes(self.record("byteorder")) != b"little":
            raise CheckpointError(f"{path}: written on a big-endian machine, which is not read")

    def _split(self, filename: str) -> tuple[str, str]:
        parts = PurePosixPath(filename).parts
        unsafe = filename.startswith("/") or "\\" in filename or ".." in parts
        if unsafe or len(parts) < 2 or "/".join(parts) != filename:
            raise CheckpointError(f"{self.path}: refused: record name {filename!r}")
        return parts[0], "/".join(parts[1:])

    def _locate(self, info: zipfile.ZipInfo) -> tuple[int, int]:
        """First byte and size of a record."""
        stored = info.compress_type == zipfile.ZIP_STORED and info.compress_size == info.file_size
        if not stored or info.flag_bits & _ENCRYPTED:
            raise CheckpointError(f"{self.path}: refused: {info.filename} is packed or encrypted")
        at, name = info.header_offset, info.filename.encode()
        local = self._map[at : at + _LOCAL_HEADER + len(name)] if at >= 0 else b""
        if not local.startswith(_LOCAL_SIGNATURE) or not local.endswith(name):
            raise CheckpointError(
                f"{self.path}: damaged: {info.filename} is not where it should be"
            )
        lengths = (int.from_bytes(local[i : i + 2], "little") for i in (26, 28))
        start = at + _LOCAL_HEADER + sum(lengths)
        if start + info.file_size > len(self._map):
            raise CheckpointError(f"{self.path}: {info.filename} lies outside the file: truncated?")
        return start, info.file_size

    @property
    def buffer(self) -> mmap.mmap:
        """The whole file."""
        return self._map

    def range(self, name: str) -> tuple[int, int]:
        """First byte and size of a record. CheckpointError where there is none."""
        if name not in self._ranges:
            raise CheckpointError(f"{self.path}: record {name!r} is missing")
        return self._ranges[name]

    def record(self, name: str) -> memoryview:
        """A record's bytes. CheckpointError where there is none."""
        start, size = self.range(name)
        return memoryview(self._map)[start : start + size]

    def verify(self) -> None:
        """Compare all records with their CRC-32. CheckpointError names the first that differs."""
        for name in self._ranges:
            self.check(name)

    def check(self, name: str) -> None:
        """Compare a record with its CRC-32. CheckpointError where it differs."""
        data, crc = self.record(name), 0
        for position in range(0, len(data), _CHUNK):
            crc = zlib.crc32(data[position : position + _CHUNK], crc)
        if crc != self._crcs[name]:
            raise CheckpointError(f"{self.path}: damaged: record {name!r} fails its CRC-32")
