"""Reading corpora: JSON lines (plain, .gz, .zst), parquet and text files, in blocks of lines.

Whatever the format, a block is some whole lines of JSON, a document a line. Of a plain JSON lines
file only the place is given, so that whoever parses the block also reads it.
"""

from __future__ import annotations

import glob
import gzip
import io
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from megatron.errors import DataError

BLOCK_BYTES = 2 << 20
_JSON_SUFFIXES = (".jsonl", ".json", ".ndjson")
_TEXT_SUFFIXES = (".txt",)
_PARQUET_SUFFIXES = (".parquet",)
_PACKED_SUFFIXES = (".gz", ".zst")
_PARQUET_ROWS = 1000
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Block:
    """Whole lines of one file.

    Attributes:
        path: the file.
        offset: bytes of (unpacked) text before the block.
        size: bytes of the block.
        done: bytes of the file, as it lies on the disk, up to the block's end: for progress.
        data: the lines, or None where they stand in the file at `offset`.
    """

    path: str
    offset: int
    size: int
    done: int
    data: bytes | None = None

    def read(self) -> bytes:
        """The lines.

        Raises:
            DataError: the file became shorter since it was listed.
        """
        if self.data is not None:
            return self.data
        with open(self.path, "rb", buffering=0) as file:
            file.seek(self.offset)
            data = file.read(self.size)
        if len(data) != self.size:
            raise DataError(f"--input {self.path}: the file shrank while it was read")
        return data


def find_inputs(patterns: Sequence[str]) -> list[str]:
    """Files that `--input` names: files, globs, and all readable files below directories.

    The order is that of the patterns; inside a glob or directory, that of the names.

    Raises:
        DataError: a pattern matches no file, or one that a pattern before it named too, whose text
            would count twice; or a file has an unknown ending.
    """
    found: list[str] = []
    seen: set[str] = set()
    for pattern in patterns:
        if os.path.isdir(pattern):
            below = (str(path) for path in Path(pattern).rglob("*") if path.is_file())
            matches = sorted(path for path in below if _suffix(path))
        elif os.path.exists(pattern):
            matches = [pattern]
        else:
            matches = sorted(glob.glob(pattern, recursive=True))
        if not matches:
            raise DataError(f"--input {pattern}: {_nothing_at(pattern)}")
        matches = list(dict.fromkeys(matches))
        places = [os.path.abspath(path) for path in matches]
        again = next((m for m, place in zip(matches, places, strict=True) if place in seen), None)
        if again is not None:
            raise DataError(f"--input {again}: is given twice: give it once")
        seen.update(places)
        found += matches
    for path in found:
        if not os.path.exists(path):
            raise DataError(f"--input {path}: a link to what is not there")
        if not _suffix(path):
            raise DataError(
                f"--input {path}: unknown ending; expected {_known_endings()}; rename the file"
            )
    return found


def _nothing_at(pattern: str) -> str:
    if os.path.isdir(pattern):
        return f"this folder holds no file of a known ending ({_known_endings()})"
    if glob.has_magic(pattern):
        return "no such file, and none that fits the pattern"
    return "no such file or folder"


def _known_endings() -> str:
    plain = ", ".join(_JSON_SUFFIXES)
    others = ", ".join((*_PARQUET_SUFFIXES, *_TEXT_SUFFIXES))
    return f"{plain}, each also with .gz or .zst; {others}"


def read_blocks(
    paths: Iterable[str], keys: Sequence[str], block_bytes: int = BLOCK_BYTES
) -> Iterator[Block]:
    """All lines of the files in order, in blocks of about `block_bytes`.

    Args:
        paths: as `find_inputs` gives them.
        keys: parquet columns to read, and (the first) the key of a text file's document.

    Raises:
        DataError: a file cannot be read or is damaged.
    """
    for path in paths:
        suffix = _suffix(path)
        try:
            if suffix in _PARQUET_SUFFIXES:
                yield from _parquet_blocks(path, keys)
            elif suffix in _TEXT_SUFFIXES:
                yield _text_block(path, keys[0])
            elif path.lower().endswith(_PACKED_SUFFIXES) or not os.path.isfile(path):
                yield from _streamed_blocks(path, block_bytes)
            else:
                yield from _plain_blocks(path, block_bytes)
        except (OSError, EOFError) as error:
            raise DataError(f"--input {path}: {error}; the file is unreadable or cut") from error


def _suffix(path: str) -> str | None:
    """Ending that says the format, without packing; None: unknown."""
    name = Path(path).name.lower()
    for packed in _PACKED_SUFFIXES:
        name = name.removesuffix(packed)
    for suffix in (*_JSON_SUFFIXES, *_PARQUET_SUFFIXES, *_TEXT_SUFFIXES):
        if name.endswith(suffix):
            return suffix
    return None


def _plain_blocks(path: str, block_bytes: int) -> Iterator[Block]:
    total = os.path.getsize(path)
    with open(path, "rb") as file:
        start = _skip_byte_order_mark(file)
        while start < total:
            file.seek(min(start + block_bytes, total) - 1)
            # The rest of the line that the block's last byte stands in.
            file.readline()
            end = min(file.tell(), total)
            yield Block(path, start, end - start, end)
            start = end


def _skip_byte_order_mark(file: BinaryIO) -> int:
    return len(_BYTE_ORDER_MARK) if file.read(3) == _BYTE_ORDER_MARK else 0


def _streamed_blocks(path: str, block_bytes: int) -> Iterator[Block]:
    """What can only be read from front to back: packed files and pipes."""
    with open(path, "rb") as raw, _unpack(path, raw) as file:
        offset = 0
        while data := file.read(block_bytes):
            data += file.readline()
            size = len(data)
            if offset == 0:
                data = data.removeprefix(_BYTE_ORDER_MARK)
            done = raw.tell() if raw.seekable() else 0
            yield Block(path, offset + size - len(data), len(data), done, data)
            offset += size


def _unpack(path: str, raw: BinaryIO) -> BinaryIO:
    """The unpacked bytes of `raw`, which the ending of its name says how to get."""
    if path.lower().endswith(".gz"):
        return io.BufferedReader(gzip.GzipFile(fileobj=raw), 1 << 20)
    if path.lower().endswith(".zst"):
        return io.BufferedReader(_ZstdReader(raw), 1 << 20)
    return raw


class _ZstdReader(io.RawIOBase):
    """Unpacks zstandard frames; zstandard's own reader takes a cut file for a whole one."""

    def __init__(self, raw: BinaryIO) -> None:
        import zstandard

        self._raw = raw
        self._unpacker = zstandard.ZstdDecompressor()
        self._frame: Any = None
        self._pending = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._pending:
            if not self._unpack_more():
                return 0
        count = min(len(buffer), len(self._pending))
        buffer[:count] = self._pending[:count]
        self._pending = self._pending[count:]
        return count

    def _unpack_more(self) -> bool:
        """Append to `_pending`; False at the end of the last frame."""
        import zstandard

        done = self._frame is None or self._frame.eof
        packed = self._frame.unused_data if done and self._frame is not None else b""
        packed = packed or self._raw.read(1 << 17)
        if not packed:
            if done:
                return False
            raise EOFError("the last zstandard frame is incomplete")
        if done:
            self._frame = self._unpacker.decompressobj()
        try:
            self._pending += self._frame.decompress(packed)
        except zstandard.ZstdError as error:
            raise OSError(str(error)) from error
        return True


def _parquet_blocks(path: str, keys: Sequence[str]) -> Iterator[Block]:
    """Rows as JSON lines, so that a row is a line."""
    import orjson
    import pyarrow
    from pyarrow import parquet

    try:
        file = parquet.ParquetFile(path)
        missing = [key for key in keys if key not in file.schema_arrow.names]
        if missing:
            raise DataError(
                f"--json-keys {missing[0]}: no such column in {path}; it has "
                f"{', '.join(file.schema_arrow.names)}"
            )
        total, rows, offset = max(file.metadata.num_rows, 1), 0, 0
        size_on_disk = os.path.getsize(path)
        for batch in file.iter_batches(batch_size=_PARQUET_ROWS, columns=list(keys)):
            data = b"".join(
                orjson.dumps(row, default=_refuse, option=orjson.OPT_APPEND_NEWLINE)
                for row in batch.to_pylist()
            )
            rows += batch.num_rows
            yield Block(path, offset, len(data), size_on_disk * rows // total, data)
            offset += len(data)
    except pyarrow.ArrowException as error:
        raise DataError(f"--input {path}: not a readable parquet file ({error})") from error


def _refuse(value: Any) -> Any:
    """A value that JSON has no form for is not text either; null is reported with its row."""
    return None


def _text_block(path: str, key: str) -> Block:
    """A whole text file as one document."""
    import orjson

    with open(path, "rb") as raw:
        data = _unpack(path, raw).read()
    try:
        text = data.removeprefix(_BYTE_ORDER_MARK).decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"--input {path}: not UTF-8 at byte {error.start}; convert the file"
        ) from error
    line = orjson.dumps({key: text}, option=orjson.OPT_APPEND_NEWLINE)
    return Block(path, 0, len(line), os.path.getsize(path), line)
