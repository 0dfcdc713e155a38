"""Messages between the web server, rank 0 and the other ranks: typed JSON, never pickle.

A message is a JSON list of records of one dataclass. On the socket between the web server and
rank 0 a 4-byte big-endian length stands before it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from megatron.errors import UserError
from megatron.inference.request import Event, Finished, Prompt, Request, Stats, Token

if TYPE_CHECKING:
    from pydantic import TypeAdapter

_LENGTH = struct.Struct(">I")
# The largest message is a batch of requests with their prompts' ids, which is far smaller.
MAX_MESSAGE = 256 << 20  # bytes

Record = TypeVar("Record")


@dataclass(frozen=True)
class Add:
    """Take this request."""

    request: Request
    command: Literal["add"] = "add"


@dataclass(frozen=True)
class Cancel:
    """End this request."""

    request: str
    command: Literal["cancel"] = "cancel"


@dataclass(frozen=True)
class Shutdown:
    """End all requests and the loop."""

    command: Literal["shutdown"] = "shutdown"


Command = Add | Cancel | Shutdown


@dataclass(frozen=True)
class Report:
    """What the engine did in a step.

    Events are sorted by kind, because lists of a single kind are read three times as fast as a
    list of a union. A request's own events keep their order: it has at most one `Prompt`, before
    its tokens, and one `Finished`, after them.
    """

    stats: Stats
    prompts: tuple[Prompt, ...]
    tokens: tuple[Token, ...]
    finished: tuple[Finished, ...]

    @classmethod
    def of(cls, events: Sequence[Event], stats: Stats) -> Report:
        """Return the report of these events and the statistics after them."""
        return cls(
            stats,
            tuple(event for event in events if isinstance(event, Prompt)),
            tuple(event for event in events if isinstance(event, Token)),
            tuple(event for event in events if isinstance(event, Finished)),
        )

    @property
    def events(self) -> tuple[Event, ...]:
        """All events, each request's in order."""
        return (*self.prompts, *self.tokens, *self.finished)


class MessageError(UserError):
    """Bytes that are not a message of ours."""


def pack(kind: Any, *records: Any) -> bytes:
    """Return records as one message, with its length before it."""
    body = write(kind, records)
    return _LENGTH.pack(len(body)) + body


def write(kind: Any, records: Sequence[Any]) -> bytes:
    """Return records as a JSON list.

    Args:
        kind: Dataclass of every record, or a union of dataclasses.
        records: Instances of it.
    """
    return _adapter(kind).dump_json(list(records))


def read(kind: Any, data: bytes) -> list[Any]:
    """Return the records of a JSON list.

    Args:
        kind: Dataclass of every record, or a union of dataclasses.
        data: The list as JSON.

    Raises:
        MessageError: The bytes are not such a list. The message names the field.
        RequestError: A value of a request is out of range.
    """
    from pydantic import ValidationError

    try:
        return _adapter(kind).validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise MessageError(f"{place}: {first['msg']}") from None


@cache
def _adapter(kind: Any) -> TypeAdapter[list[Any]]:
    # Imported here because it takes 70 ms, for which a server's start would wait.
    from pydantic import ConfigDict, TypeAdapter

    # Scores may be infinite, which JSON itself cannot say.
    config = ConfigDict(extra="forbid", strict=True, ser_json_inf_nan="constants")
    return TypeAdapter(list[kind], config=config)


class Unpacker(Generic[Record]):
    """A reader of packed messages that arrive in pieces of any size."""

    def __init__(self, kind: Any) -> None:
        """Start with no bytes.

        Args:
            kind: Dataclass of every record, or a union of dataclasses.
        """
        self._kind = kind
        _adapter(kind)  # made now, so that the first message does not wait for it
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Record]:
        """Yield the records of all messages that are complete with these bytes.

        Raises:
            MessageError: A length or a body that `pack` does not write.
        """
        self._buffer += data
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > MAX_MESSAGE:
                raise MessageError(f"a message of {length:,} bytes; at most {MAX_MESSAGE:,}")
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[_LENGTH.size : end])
            del self._buffer[:end]
            yield from read(self._kind, body)
