"""Decoding of HTTP bodies as crawlers store them: in chunks, compressed, or already decoded.

wget, Heritrix and browsers store bodies as the server sent them. Other crawlers store the decoded
body and keep the headers, which are then wrong. FastWARC 2.0 can decode bodies, but it ends the
file at the first body that is both compressed and in chunks, and fails on wrong headers.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable

_CHUNK_SIZE = re.compile(rb"[ \t]*([0-9A-Fa-f]{1,16})[ \t]*(?:;[^\r\n]*)?\r?\n")
_ZLIB_OR_GZIP, _RAW_DEFLATE = 32 + zlib.MAX_WBITS, -zlib.MAX_WBITS
_BLOCK = 1 << 10  # bytes decoded at a time: damage costs no more than those of its own block


def decode_body(data: bytes, transfer: Iterable[str], content: Iterable[str], limit: int) -> bytes:
    """Return a body without its encodings.

    A body that is not encoded as its headers say is returned unchanged, because the crawler has
    already decoded it. If a body is damaged or truncated, the part before the damage is returned,
    except with Brotli, in which any data can be the beginning of a body.

    Args:
        data: The body as it is stored.
        transfer: The values of all `Transfer-Encoding` headers.
        content: The values of all `Content-Encoding` headers.
        limit: The maximum number of bytes to decode, because a small body can become a huge one.
    """
    names = [name.strip().lower() for value in (*content, *transfer) for name in value.split(",")]
    for name in reversed(names):  # the encoding that was applied last is removed first
        if name == "chunked":
            data = _join_chunks(data)
        elif name in ("gzip", "x-gzip", "deflate"):
            result, complete = _inflate(data, _ZLIB_OR_GZIP, limit)
            if not result and name == "deflate":  # some servers leave out zlib's header
                result, complete = _inflate(data, _RAW_DEFLATE, limit)
                result = result if complete else b""
            data = result or data
        elif name == "br":
            result, complete = _decompress(data, "brotli", limit)
            data = result if complete else data
        elif name == "zstd":
            data = _decompress(data, "zstd", limit)[0] or data
    return data


def _join_chunks(data: bytes) -> bytes:
    parts: list[bytes] = []
    position = 0
    while match := _CHUNK_SIZE.match(data, position):
        size = int(match[1], 16)
        if size == 0:
            return b"".join(parts)
        position = match.end() + size
        parts.append(data[match.end() : position])
        position += 2 if data.startswith(b"\r\n", position) else 1
    return b"".join(parts) or data


def _inflate(data: bytes, bits: int, limit: int) -> tuple[bytes, bool]:
    """Return the decoded data, and whether it ends where it should."""
    decoder, view, result = zlib.decompressobj(bits), memoryview(data), bytearray()
    try:
        for start in range(0, len(data), _BLOCK):
            result += decoder.decompress(view[start : start + _BLOCK], limit - len(result))
            if decoder.eof or len(result) >= limit:
                return bytes(result), True
    except zlib.error:
        pass
    return bytes(result), False


def _decompress(data: bytes, codec: str, limit: int) -> tuple[bytes, bool]:
    """Return the decoded data, and whether it is undamaged."""
    import pyarrow

    result = bytearray()
    try:
        with pyarrow.CompressedInputStream(pyarrow.BufferReader(data), codec) as stream:
            while block := stream.read(min(_BLOCK, limit - len(result))):
                result += block
    except OSError:
        return bytes(result), False
    return bytes(result), True
