"""Readers of corpora: JSON lines (plain, .gz, .bz2, .zst), parquet and text, in blocks of lines.

In every format, a block consists of whole lines of JSON, with one document per line. For a plain
JSON lines file, a block records only the position of its lines, so that the process that parses the
lines also reads them.

Memory use is bounded for any file: a line that is longer than the caller allows is never read or
decompressed as a whole. It becomes a separate block without text, which `parse_block` reports.
"""

from __future__ import annotations

import contextlib
import glob
import gzip
import io
import itertools
import json
import os
import sys
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import orjson

from megatron.config.arguments import MAX_LINE_MB
from megatron.data.named import paths_of
from megatron.errors import DataError

BLOCK_BYTES = 2 << 20
_JSON_SUFFIXES = (".jsonl", ".json", ".ndjson")
_PARQUET, _TEXT = ".parquet", ".txt"
_SAMPLES = ".out"  # the suffix of generated samples in `megatron generate` and Megatron-LM
PACKED_SUFFIXES = (".gz", ".bz2", ".zst")
_KNOWN = f"{', '.join(_JSON_SUFFIXES)}, each also with .gz, .bz2 or .zst; {_PARQUET}, {_TEXT}"
_START = 1 << 12  # bytes within which the first line of a file without a suffix must begin
_ROWS_AT_A_TIME = 16  # rows read at a time; a value may be as large as the longest line
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_JSON_KINDS = {bool: "true or false", int: "a number", float: "a number", type(None): "null"}
_JSON_KINDS |= {str: "a string", list: "a list", dict: "an object"}

Value = str | list[str]  # a document's text, or its sentences if it is already split


class TextBlock(NamedTuple):
    """Whole lines of one file.

    Attributes:
        path: The file.
        offset: The number of bytes of (decompressed) text before the block.
        size: The number of bytes in the block.
        bytes_read: The number of bytes of the file on disk up to the block's end, for progress
            reports.
        data: The lines, or `None` if they are to be read from the file at `offset`.
        problem: If the block is a single line without text, the reason; otherwise "".
    """

    path: str
    offset: int
    size: int
    bytes_read: int
    data: bytes | None = None
    problem: str = ""

    def read(self) -> bytes:
        """Return the bytes of the lines, reading them from the file if necessary.

        Raises:
            DataError: The line is too long, or the file cannot be read or has shrunk since it was
                listed.
        """
        if self.problem:
            raise DataError(
                f"--input {self.path}: {self.problem} (it starts at byte {self.offset}): shorten "
                "or remove the line"
            )
        if self.data is not None:
            return self.data
        try:
            with open(self.path, "rb", buffering=0) as file:
                file.seek(self.offset)
                data = file.read(self.size)
        except OSError as error:
            raise DataError(
                f"--input {self.path}: cannot be read ({error.strerror or error}): restore the "
                "file, or make it readable, and run again"
            ) from error
        if len(data) != self.size:
            raise DataError(
                f"--input {self.path}: the file has shrunk: run again when no program is writing "
                "to it"
            )
        return data


class BadLine(NamedTuple):
    """A line without a document: its number in the block, its byte offset, and the reason."""

    line: int
    offset: int
    reason: str


class Documents(NamedTuple):
    """The documents of one block.

    Attributes:
        values: The value of each key, for each document.
        locations: The line and byte offset of each document in the block.
        lines: The number of lines in the block, including blank and bad ones.
        bad: The lines without a document.
    """

    values: list[list[Value]]
    locations: list[tuple[int, int]]
    lines: int
    bad: list[BadLine]


def parse_block(block: TextBlock, keys: Sequence[str]) -> Documents:
    """Read and parse the documents of a block.

    Args:
        block: The block, as yielded by `read_blocks`.
        keys: The keys of the values to read from each line.

    Raises:
        DataError: The file cannot be read, or has shrunk since it was listed.
    """
    if block.problem:
        return Documents([], [], 1, [BadLine(0, 0, block.problem)])
    return parse_lines(block.read(), keys)


def parse_lines(data: bytes, keys: Sequence[str]) -> Documents:
    """Parse a block of lines into documents, skipping blank lines.

    Args:
        data: The lines, each a JSON object.
        keys: The keys of the values to read from each line.
    """
    lines = data.removesuffix(b"\n").split(b"\n")
    documents = Documents([], [], len(lines), [])
    offset = 0
    for number, line in enumerate(lines):
        if line and not line.isspace():
            try:
                record = load_line(line)
                documents.values.append([_value(record, key) for key in keys])
                documents.locations.append((number, offset))
            except ValueError as error:
                documents.bad.append(BadLine(number, offset, str(error)))
        offset += len(line) + 1
    return documents


def load_line(line: bytes) -> Any:
    """Parse the JSON of one line.

    NaN and Infinity are allowed, as in Python's json, because many corpora have them in fields
    other than the text.

    Raises:
        ValueError: The line is not JSON. The message says what is wrong.
    """
    try:
        return orjson.loads(line)
    except orjson.JSONDecodeError:
        pass
    try:
        record = json.loads(line.decode("utf-8"))
        # Half a surrogate pair is not text, because it cannot be encoded as UTF-8.
        json.dumps(record, ensure_ascii=False).encode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"bad UTF-8 (byte {error.start} of the line)") from None
    except UnicodeEncodeError:
        raise ValueError("broken JSON (half a surrogate pair in a string)") from None
    except json.JSONDecodeError as error:
        what = error.msg.removesuffix(" at")  # the end of the message for an unterminated string
        raise ValueError(f"broken JSON ({what} at character {error.pos})") from None
    except RecursionError:
        raise ValueError("broken JSON (nested too deeply)") from None
    except ValueError:  # Python limits the digits of integers that it converts
        max_digits = sys.get_int_max_str_digits()
        raise ValueError(
            f"a number of more than {max_digits:,} digits: write it as a string"
        ) from None
    return record


def json_kind(value: Any) -> str:
    """Describe the type of a JSON value, for messages."""
    return _JSON_KINDS[type(value)]


def _value(record: Any, key: str) -> Value:
    if not isinstance(record, dict):
        raise ValueError(f"expected a JSON object, found {json_kind(record)}")
    if key not in record:
        raise ValueError(f"no key {key!r}")
    value = record[key]
    if isinstance(value, str):
        return value
    # A list of strings is a document that is already split into sentences.
    if isinstance(value, list) and all(isinstance(sentence, str) for sentence in value):
        return value
    raise ValueError(f"{key!r} is {json_kind(value)}, expected a string")


def find_inputs(patterns: Sequence[str], more: tuple[str, ...] = ()) -> list[str]:
    """Return the files that the patterns in `--input` match.

    A pattern is a file, a glob, a folder, or a name that the user has defined (`named.paths_of`). A
    folder stands for all files below it with a known suffix. A file without a suffix, such as
    wiki_00, counts as JSON lines if it begins with a JSON object. The same is true of a file of
    generated samples (.out), except in folders. Files are in the order of the patterns, and within
    a glob or folder they are sorted by name.

    Args:
        patterns: The values of `--input`.
        more: Suffixes of additional formats, which the caller reads itself.

    Raises:
        DataError: A pattern matches no file, a file is named twice (its text would count twice), is
            a broken link or has an unknown suffix, or `paths_of` rejects a name.
    """
    files: dict[str, str] = {}  # by absolute path
    formats = ", ".join((*more, _KNOWN))

    def is_known(path: str) -> bool:
        return bool(_suffix(path)) or path.lower().endswith(more)

    for pattern in itertools.chain.from_iterable(map(paths_of, patterns)):
        if os.path.isdir(pattern):
            below = (str(path) for path in Path(pattern).rglob("*") if path.is_file())
            texts = (path for path in below if not path.lower().endswith(_SAMPLES))
            matches = sorted(path for path in texts if is_known(path))
            problem = (
                f"this folder contains no file with a known suffix ({formats}): give another "
                "folder, or rename its files"
            )
        else:
            exists = os.path.exists(pattern)
            matches = [pattern] if exists else sorted(set(glob.glob(pattern, recursive=True)))
            problem = "no such file or folder, and no file matches this pattern: check the path"
        if not matches:
            raise DataError(f"--input {pattern}: {problem}")
        for path in matches:
            absolute = os.path.abspath(path)
            if absolute in files:
                raise DataError(f"--input {path}: this file is given twice: give it once")
            files[absolute] = path
    for path in files.values():
        if not os.path.exists(path):
            raise DataError(
                f"--input {path}: this is a link to a file that does not exist: fix the link"
            )
        if not is_known(path):
            raise DataError(f"--input {path}: unknown suffix; expected {formats}; rename the file")
    return [*files.values()]


def read_blocks(
    paths: Iterable[str],
    keys: Sequence[str],
    block_bytes: int = BLOCK_BYTES,
    *,
    max_line_mb: int = MAX_LINE_MB,
    bounds: tuple[int, int] | None = None,
) -> Iterator[TextBlock]:
    """Yield all lines of the files in order, in blocks of about `block_bytes`.

    Args:
        paths: The files, as returned by `find_inputs`.
        keys: The parquet columns to read. The first is the key of a text file's document.
        block_bytes: The size of a block, which is extended to the end of a line. A text file is a
            single block.
        max_line_mb: The size of the longest line to read, in MiB.
        bounds: A range of bytes, end excluded. Only lines that begin in this range are read. All
            files must satisfy `is_splittable`.

    Raises:
        DataError: A file cannot be read or is damaged, a text file is not UTF-8, or a parquet file
            lacks a column.
        MemoryError: Arrow ran out of memory.
    """
    longest = max_line_mb << 20
    block_bytes = min(block_bytes, longest)
    for path in paths:
        suffix = _suffix(path)
        try:
            if suffix == _PARQUET:
                yield from _parquet_blocks(path, keys, longest, block_bytes)
            elif suffix == _TEXT:
                yield _text_block(path, keys[0], longest)
            elif not is_splittable(path):
                yield from _streamed_blocks(path, longest, block_bytes)
            else:
                yield from _plain_blocks(path, longest, block_bytes, bounds)
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(
                f"--input {path}: unreadable or truncated: {error}; copy the file again, or rename "
                "it if it has another format"
            ) from error


def is_splittable(path: str) -> bool:
    """Return whether a file holds plain JSON lines, which can be read from any position."""
    is_plain = not path.lower().endswith((*PACKED_SUFFIXES, _PARQUET, _TEXT))
    return is_plain and os.path.isfile(path)


def _suffix(path: str) -> str | None:
    """Return the suffix that determines the format, or `None` if it is unknown.

    Suffixes of compression (.gz, .bz2, .zst) are ignored. A file without a suffix, or with the
    suffix .out of generated samples, counts as JSON lines if it begins with a JSON object.
    """
    name = Path(path).name.lower()
    for packed in PACKED_SUFFIXES:
        name = name.removesuffix(packed)
    known = (*_JSON_SUFFIXES, _PARQUET, _TEXT)
    known_suffix = next((suffix for suffix in known if name.endswith(suffix)), None)
    may_be_json = known_suffix is None and ("." not in name or name.endswith(_SAMPLES))
    is_json = may_be_json and _begins_with_an_object(path)
    return _JSON_SUFFIXES[0] if is_json else known_suffix


def _begins_with_an_object(path: str) -> bool:
    """Return whether the (decompressed) content of a regular file begins with a JSON object."""
    if not os.path.isfile(path):  # reading from a pipe would consume its first bytes
        return False
    try:
        with open(path, "rb") as raw, _unpack(path, raw) as file:
            start = file.read(_START)
    except (OSError, EOFError, zlib.error):
        return False
    return start.removeprefix(BYTE_ORDER_MARK).lstrip().startswith(b"{")


def _plain_blocks(
    path: str, longest: int, block_bytes: int, bounds: tuple[int, int] | None = None
) -> Iterator[TextBlock]:
    total = os.path.getsize(path)
    begin, end = bounds or (0, total)
    if end > total:
        raise DataError(
            f"--input {path}: the file has shrunk: run again when no program is writing to it"
        )
    with open(path, "rb") as file:
        start = len(BYTE_ORDER_MARK) if file.read(3) == BYTE_ORDER_MARK else 0
        if begin > start:
            file.seek(begin - 1)
            file.readline(end - begin + 1)  # the rest of an earlier line, which may be very long
            start = file.tell()
        while start < end:
            file.seek(min(start + block_bytes, end) - 1)
            # Read the rest of the line that holds the block's last byte.
            file.readline(longest + 1)
            size = min(file.tell(), total) - start
            if size > longest:
                file.seek(start)
                data = file.read(size)
                yield from _split_off_last_line(
                    TextBlock(path, start, size, start + size, data), longest
                )
                _finish_line(file, data)
            else:
                yield TextBlock(path, start, size, start + size)
            start = file.tell()


def _streamed_blocks(path: str, longest: int, block_bytes: int) -> Iterator[TextBlock]:
    """Read a file that can only be read sequentially: a compressed file or a pipe."""
    with open(path, "rb") as raw, _unpack(path, raw) as file:
        offset = 0
        while data := file.read(block_bytes):
            data += file.readline(longest + 1)
            size = len(data)
            if offset == 0:
                data = data.removeprefix(BYTE_ORDER_MARK)
            bytes_read = raw.tell() if raw.seekable() else 0
            block = TextBlock(path, offset + size - len(data), len(data), bytes_read, data)
            yield from _split_off_last_line(block, longest)
            offset += size + _finish_line(file, data)


def _split_off_last_line(block: TextBlock, longest: int) -> Iterator[TextBlock]:
    """Yield the block, with its last line as a separate block if the line may be too long."""
    data = block.data
    assert data is not None
    if len(data) <= longest:
        yield block
        return
    cut = data.rfind(b"\n", 0, -1) + 1
    if cut:
        yield block._replace(size=cut, data=data[:cut])
    line = block._replace(offset=block.offset + cut, size=block.size - cut, data=data[cut:])
    yield line if line.size <= longest else _without_text(line, longest)


def _without_text(line: TextBlock, longest: int) -> TextBlock:
    return line._replace(data=b"", problem=f"the line is longer than {longest >> 20} MiB")


def _finish_line(file: BinaryIO, data: bytes) -> int:
    """Skip the remainder of the line in which `data` ends, and return the number of bytes."""
    size = 0
    while data and not data.endswith(b"\n"):
        data = file.readline(BLOCK_BYTES)
        size += len(data)
    return size


def _unpack(path: str, raw: BinaryIO) -> BinaryIO:
    """Return a stream that decompresses `raw` as the suffix of `path` requires."""
    if path.lower().endswith(".gz"):
        return io.BufferedReader(gzip.GzipFile(fileobj=raw), 1 << 20)
    if path.lower().endswith((".bz2", ".zst")):
        import pyarrow

        # zstandard's reader does not notice a truncated file, and Python's bz2 stops silently at a
        # damaged second part. Arrow's readers raise an OSError.
        codec = "bz2" if path.lower().endswith(".bz2") else "zstd"
        return io.BufferedReader(pyarrow.CompressedInputStream(raw, codec), 1 << 20)
    return raw


def parquet_columns(path: str) -> list[str]:
    """Return the names of a parquet file's columns.

    Raises:
        DataError: The file cannot be read.
    """
    import pyarrow
    from pyarrow import parquet

    try:
        return list(parquet.read_schema(path).names)
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(
            f"--input {path}: not a readable parquet file ({error}); copy it again"
        ) from error


def _parquet_blocks(
    path: str, keys: Sequence[str], longest: int, block_bytes: int
) -> Iterator[TextBlock]:
    """Read rows as JSON lines, one line per row."""
    import pyarrow
    from pyarrow import parquet

    try:
        file = parquet.ParquetFile(path)
        columns = file.schema_arrow.names
        for key in keys:
            if key not in columns:
                available = ", ".join(columns)
                raise DataError(
                    f"--json-keys {key}: no such column in {path}: choose one of {available}"
                )
        rows, offset, lines, size = 0, 0, list[bytes](), 0
        size_on_disk, total = os.path.getsize(path), max(file.metadata.num_rows, 1)

        def block() -> TextBlock:
            return TextBlock(path, offset, size, size_on_disk * rows // total, b"".join(lines))

        total_bytes = sum(
            file.metadata.row_group(index).total_byte_size for index in range(file.num_row_groups)
        )
        batch_rows = max(1, min(_ROWS_AT_A_TIME, total * block_bytes // max(total_bytes, 1)))
        for batch in file.iter_batches(batch_size=batch_rows, columns=list(keys)):
            for row in (batch.slice(index, 1) for index in range(batch.num_rows)):
                if size >= block_bytes or (lines and row.nbytes > longest):
                    yield block()
                    offset, lines, size = offset + size, [], 0
                rows += 1
                if row.nbytes > longest:
                    yield _without_text(block(), longest)
                    continue
                lines.append(_json_line(row))
                size += len(lines[-1])
        if lines:
            yield block()
    except MemoryError:  # Arrow's own MemoryError is also an ArrowException
        raise
    except pyarrow.ArrowException as error:
        raise DataError(
            f"--input {path}: not a readable parquet file ({error}); copy it again"
        ) from error


def _json_line(row: Any) -> bytes:
    """Return a row as a line of JSON, or as a line that `parse_lines` reports as bad."""
    try:
        return _dump_line({key: _as_text(value) for key, value in row.to_pylist()[0].items()})
    except UnicodeDecodeError as error:
        return error.object.replace(b"\n", b" ") + b"\n"  # reported as bad UTF-8
    except (ValueError, OverflowError):  # for example a time that Python cannot represent
        return _dump_line(dict.fromkeys(row.column_names))


def _as_text(value: Any) -> Any:
    """Return bytes in UTF-8 as a string: Hive and older versions of Spark declare text as binary.

    Other bytes, such as those of an image, and other values are returned unchanged.
    """
    if isinstance(value, bytes):
        with contextlib.suppress(UnicodeDecodeError):
            return value.decode("utf-8")
    return value


def _dump_line(value: dict[str, Any]) -> bytes:
    """Return a value as a line of JSON. Its strings must have been decoded from UTF-8.

    Raises:
        MemoryError: There is too little memory, which orjson reports as an error about surrogates.
    """
    try:
        # A value that JSON cannot represent is not text either. As null, it is reported.
        return orjson.dumps(value, default=lambda _: None, option=orjson.OPT_APPEND_NEWLINE)
    except TypeError as error:
        if "surrogates" in str(error):
            raise MemoryError(str(error)) from error
        raise


def _text_block(path: str, key: str, longest: int) -> TextBlock:
    """Read a whole text file as one document."""
    with open(path, "rb") as raw, _unpack(path, raw) as file:
        data = file.read(longest + 1)
    size_on_disk = os.path.getsize(path)
    if len(data) > longest:
        return _without_text(TextBlock(path, 0, len(data), size_on_disk), longest)
    try:
        text = data.removeprefix(BYTE_ORDER_MARK).decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"--input {path}: not UTF-8 at byte {error.start}: convert the file"
        ) from error
    line = _dump_line({key: text})
    return TextBlock(path, 0, len(line), size_on_disk, line)
