"""Messages between the web server, rank 0 and the other ranks: typed JSON, never pickle.

A message is a JSON list of instances of one dataclass, its records. On the socket between the web
server and rank 0, it is preceded by its length as a 4-byte big-endian integer.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from megatron.errors import UserError
from megatron.inference.request import Event, Finished, Prompt, Request, Retrieved, Stats, Token

if TYPE_CHECKING:
    from pydantic import TypeAdapter

_LENGTH = struct.Struct(">I")
# Far above the largest real message, which is a batch of requests with the ids of their prompts.
MAX_MESSAGE = 256 << 20  # bytes

Record = TypeVar("Record")


@dataclass(frozen=True)
class Add:
    """The command to accept a request."""

    request: Request
    command: Literal["add"] = "add"


@dataclass(frozen=True)
class Cancel:
    """The command to end a request."""

    request: str
    command: Literal["cancel"] = "cancel"


@dataclass(frozen=True)
class Shutdown:
    """The command to end all requests and leave the loop."""

    command: Literal["shutdown"] = "shutdown"


Command = Add | Cancel | Shutdown


@dataclass(frozen=True)
class Report:
    """The events of a step, and the engine's statistics after it.

    Events are grouped by kind, because lists of a single kind are parsed three times as fast as a
    list of a union. The events of each request keep their order: passages and at most one `Prompt`
    come before its tokens, and one `Finished` after them.
    """

    stats: Stats
    retrieved: tuple[Retrieved, ...]
    prompts: tuple[Prompt, ...]
    tokens: tuple[Token, ...]
    finished: tuple[Finished, ...]

    @classmethod
    def of(cls, events: Sequence[Event], stats: Stats) -> Report:
        """Return the report of these events and the statistics after them."""

        def of_kind(kind: type[Record]) -> tuple[Record, ...]:
            return tuple(event for event in events if isinstance(event, kind))

        kinds = of_kind(Retrieved), of_kind(Prompt), of_kind(Token), of_kind(Finished)
        return cls(stats, *kinds)

    @property
    def events(self) -> tuple[Event, ...]:
        """All events. Each request's events are in order."""
        return (*self.retrieved, *self.prompts, *self.tokens, *self.finished)


class MessageError(UserError):
    """Raised when received bytes are not a valid message."""


def pack(kind: Any, *records: Any) -> bytes:
    """Return records as one message, preceded by its length."""
    body = write(kind, records)
    return _LENGTH.pack(len(body)) + body


def write(kind: Any, records: Sequence[Any]) -> bytes:
    """Return records as a JSON list.

    Args:
        kind: Dataclass of every record, or a union of dataclasses.
        records: Instances of `kind`.
    """
    return _adapter(kind).dump_json(list(records))


def read(kind: Any, data: bytes) -> list[Any]:
    """Return the records of a JSON list.

    Args:
        kind: Dataclass of every record, or a union of dataclasses.
        data: The list as JSON.

    Raises:
        MessageError: The bytes are not such a list. The error names the field.
        RequestError: A value of a request is out of range.
    """
    from pydantic import ValidationError

    try:
        return _adapter(kind).validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        location = ".".join(str(part) for part in first["loc"])
        raise MessageError(f"{location}: {first['msg']}") from None


@cache
def _adapter(kind: Any) -> TypeAdapter[list[Any]]:
    # Imported here because the import takes 70 ms, which would delay a server's start.
    from pydantic import ConfigDict, TypeAdapter

    # Scores may be infinite, which standard JSON cannot express.
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
        _adapter(kind)  # created now, so that it does not delay the first message
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Record]:
        """Yield the records of all messages that these bytes complete.

        Raises:
            MessageError: A message is too long, or is not a list of such records.
            RequestError: A value of a request is out of range.
        """
        self._buffer += data
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > MAX_MESSAGE:
                raise MessageError(f"a message has {length:,} bytes, more than {MAX_MESSAGE:,}")
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[_LENGTH.size : end])
            del self._buffer[:end]
            yield from read(self._kind, body)
