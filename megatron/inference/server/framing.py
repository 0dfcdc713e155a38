"""How messages travel between the front and rank 0: a 4-byte length, big-endian, then JSON."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import orjson

_LENGTH = struct.Struct(">I")
# The largest message is a batch of requests with their prompts' ids: far below. More is not ours.
MAX_MESSAGE = 256 << 20  # bytes


class FramingError(Exception):
    """What came is no message of ours."""


def pack(message: Any) -> bytes:
    """A message as it travels."""
    body = orjson.dumps(message)
    return _LENGTH.pack(len(body)) + body


class Unpacker:
    """Messages from bytes that come in any pieces."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Any]:
        """The messages that are complete now.

        Raises:
            FramingError: a length or a body that no `pack` writes.
        """
        self._buffer += data
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > MAX_MESSAGE:
                raise FramingError(f"a message of {length:,} bytes; at most {MAX_MESSAGE:,}")
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[_LENGTH.size : end])
            del self._buffer[:end]
            try:
                yield orjson.loads(body)
            except orjson.JSONDecodeError as error:
                raise FramingError(f"not JSON: {error}") from error
