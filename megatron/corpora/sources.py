"""Readers of crawl files and corpora: WARC, WET, JSON lines, parquet, text.

The input is divided into pieces, the units of work. The division depends only on the files, so the
results do not depend on the number of processes.
"""

from __future__ import annotations

import gzip
import io
import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, BinaryIO, NamedTuple

from megatron.config.arguments import MAX_LINE_MB
from megatron.corpora.http_body import decode_body
from megatron.corpora.plan import CorpusPlan
from megatron.data.text_input import (
    BYTE_ORDER_MARK,
    PACKED_SUFFIXES,
    TextBlock,
    find_inputs,
    load_line,
    read_blocks,
)
from megatron.environment import name_problem
from megatron.errors import DataError
from megatron.extras import packages_of

ARCHIVES = (".warc", ".warc.gz", ".wet", ".wet.gz")
_NEVER_SPLIT = (*PACKED_SUFFIXES, ".parquet", ".txt", *ARCHIVES)
_SMALLEST_PIECE, _LARGEST_PIECE = 1 << 20, 256 << 20
_PIECES = 64  # the number of pieces for an input between 64 MiB and 16 GiB
_PAGES = ("text/html", "application/xhtml+xml")
_ENCODINGS = ("Transfer-Encoding", "Content-Encoding")
_MAX_PAGE = MAX_LINE_MB << 20
_END = 4  # bytes at the end of a record: two line breaks


class FilePart(NamedTuple):
    """A file, or a range of its lines.

    Attributes:
        path: The file.
        offset: The offset of the first byte.
        size: The number of bytes, or -1 for the whole file.
    """

    path: str
    offset: int
    size: int


Piece = tuple[FilePart, ...]


class RawRecord(NamedTuple):
    """A record of the input.

    Attributes:
        location: The file and the byte offset, for messages.
        text: The text, or "" if `problem` or `excess` is set.
        name: The record's own name, or `location` if it has none.
        fields: All fields of the record except the text.
        is_html: Whether the text is HTML.
        problem: The reason why the record is not a document, or "".
        excess: The size of a page that is too large to read, such as "200,000,000 bytes", or "".
    """

    location: str
    text: str
    name: str
    fields: dict[str, Any]
    is_html: bool = False
    problem: str = ""
    excess: str = ""


def cut_pieces(patterns: Sequence[str]) -> list[Piece]:
    """Divide the input into pieces, in order.

    A large JSON lines file is split into several pieces, and small files share a piece. A file that
    can only be read sequentially is never split.

    Args:
        patterns: Files, globs and folders.

    Raises:
        DataError: A file does not exist, is given twice, or has an unknown format or unusable name.
    """
    paths = find_inputs(patterns, ARCHIVES)
    for path in paths:
        problem = name_problem(path)
        if problem is not None:
            raise DataError(f"--input {path!a}: the name {problem}")
    sizes = {path: os.path.getsize(path) for path in paths}
    target_size = min(max(sum(sizes.values()) // _PIECES, _SMALLEST_PIECE), _LARGEST_PIECE)
    pieces: list[Piece] = []
    parts: list[FilePart] = []
    size = 0
    for path in paths:
        if path.lower().endswith(_NEVER_SPLIT):
            file_parts = [FilePart(path, 0, -1)]
        else:
            blocks = read_blocks([path], ["text"], target_size)
            file_parts = [FilePart(path, block.offset, block.size) for block in blocks]
        for part in file_parts:
            parts.append(part)
            size += sizes[path] if part.size < 0 else part.size
            if size >= target_size:
                pieces.append(tuple(parts))
                parts, size = [], 0
    return [*pieces, tuple(parts)] if parts else pieces


def read_piece(piece: Piece, plan: CorpusPlan) -> Iterator[RawRecord]:
    """Yield the records of a piece in order.

    Args:
        piece: The files and ranges to read.
        plan: The plan, which sets the keys of a document's text and name.

    Raises:
        DataError: A file is damaged.
    """
    for part in piece:
        if part.path.lower().endswith(ARCHIVES):
            yield from _read_archive(part.path)
        else:
            yield from _read_lines(part, plan)


def _read_lines(part: FilePart, plan: CorpusPlan) -> Iterator[RawRecord]:
    keys = [plan.text_key]
    blocks: Iterator[TextBlock]
    if part.size >= 0:
        # A byte order mark may precede the file's first line.
        first = part.offset if part.offset > len(BYTE_ORDER_MARK) else 0
        blocks = read_blocks([part.path], keys, bounds=(first, part.offset + part.size))
    else:
        if part.path.lower().endswith(".parquet"):
            keys = _columns(part.path, plan.text_key)
        blocks = read_blocks([part.path], keys)
    for block in blocks:
        if block.problem:
            yield RawRecord(f"{part.path}:byte {block.offset}", "", "", {}, problem=block.problem)
            continue
        offset = block.offset
        for line in block.read().removesuffix(b"\n").split(b"\n"):
            if line and not line.isspace():
                yield _read_line(line, f"{part.path}:byte {offset}", plan)
            offset += len(line) + 1


def _read_line(line: bytes, location: str, plan: CorpusPlan) -> RawRecord:
    try:
        record = load_line(line)
    except ValueError as error:
        return RawRecord(location, "", location, {}, problem=str(error))
    if not isinstance(record, dict) or not isinstance(record.get(plan.text_key), str):
        return RawRecord(
            location, "", location, {}, problem=f"no text under the key {plan.text_key!r}"
        )
    text = record.pop(plan.text_key)
    # The name also remains a field, so that --id-key url does not hide the URL.
    name = record.get(plan.id_key)
    return RawRecord(location, text, location if name in (None, "") else str(name), record)


def _columns(path: str, text_key: str) -> list[str]:
    """Return the names of a parquet file's string and integer columns, text column first."""
    import pyarrow
    from pyarrow import parquet

    try:
        schema = parquet.read_schema(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"--input {path}: not a readable parquet file ({error})") from error
    arrow_types = pyarrow.types
    predicates = (arrow_types.is_string, arrow_types.is_large_string, arrow_types.is_integer)
    other_columns = [
        f.name for f in schema if f.name != text_key and any(is_(f.type) for is_ in predicates)
    ]
    return [text_key, *other_columns]


def _read_archive(path: str) -> Iterator[RawRecord]:
    """Yield the pages of a WARC file or the texts of a WET file, skipping other records.

    Raises:
        DataError: The file is damaged or truncated.
    """
    with packages_of("corpora"):
        from fastwarc.warc import ArchiveIterator, WarcRecordType
        from resiliparse.parse.encoding import bytes_to_str, detect_encoding, map_encoding_to_html5

    has_records = False
    with _damage_as_data_error(path), open(path, "rb") as raw:
        stream: BinaryIO = raw
        if path.lower().endswith(".gz"):
            # Python's gzip reports a truncated file. FastWARC's decompressor stops silently.
            stream = io.BufferedReader(gzip.GzipFile(fileobj=raw), 1 << 20)
        elif os.path.getsize(path):
            raw.seek(-min(_END, os.path.getsize(path)), os.SEEK_END)
            if raw.read().replace(b"\r", b"")[-2:] != b"\n\n":
                raise EOFError("it ends in the middle of a record")
            raw.seek(0)
        records = ArchiveIterator(stream, auto_decode="none", record_types=WarcRecordType.any_type)
        for record in records:
            has_records = True
            data = record.reader.read(_MAX_PAGE + 1)
            if record.record_type not in (WarcRecordType.response, WarcRecordType.conversion):
                continue
            location = f"{path}:byte {record.stream_pos}"
            fields = {
                key: value.removeprefix("<").removesuffix(">")  # wget puts URLs in brackets
                for key, header in (("url", "WARC-Target-URI"), ("date", "WARC-Date"))
                if (value := record.headers.get(header))
            }
            name = record.headers.get("WARC-Record-ID") or location
            excess = f"{record.content_length:,} bytes"
            if len(data) <= _MAX_PAGE and record.is_http:
                transfer, content = map(record.http_headers.get_multiple, _ENCODINGS)
                data = decode_body(data, transfer, content, _MAX_PAGE + 1)
                excess = f"more than {_MAX_PAGE:,} bytes"
            if len(data) > _MAX_PAGE:
                yield RawRecord(location, "", name, fields, excess=excess)
            elif record.record_type == WarcRecordType.conversion:
                yield RawRecord(location, data.decode("utf-8", "replace"), name, fields)
            elif record.is_http and (record.http_content_type or "text/html") in _PAGES:
                # Some servers declare encodings that do not exist. If so, detect the encoding.
                declared = map_encoding_to_html5(record.http_charset or "", fallback_utf8=False)
                encoding = declared or detect_encoding(data) or "utf-8"
                text = bytes_to_str(data, encoding, fallback_encodings=("utf-8", "windows-1252"))
                yield RawRecord(location, text, name, fields, is_html=True)
    if not has_records and os.path.getsize(path):
        raise DataError(f"--input {path}: contains no WARC record: rename or remove the file")


@contextmanager
def _damage_as_data_error(path: str) -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError, ValueError, zlib.error) as error:
        remedy = "copy or download it again, or remove it"
        raise DataError(f"--input {path}: damaged or truncated ({error}): {remedy}") from error
