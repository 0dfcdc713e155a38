"""The front's end of the socket to rank 0: requests are admitted and sent, their events sorted."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Sequence
from typing import Any

from megatron.inference.request import (
    Event,
    Finished,
    Request,
    RequestError,
    Sampling,
    Stats,
)
from megatron.inference.server.errors import ApiError
from megatron.inference.server.framing import Unpacker, pack
from megatron.inference.wire import Add, Cancel, command_to_json, event_from_json

logger = logging.getLogger(__name__)
_CHUNK = 1 << 16
_GONE = "the engine has stopped: the server's log says why"


class Stream:
    """The events of one request, in order. It must be closed: that frees its place."""

    def __init__(self, client: EngineClient, request: Request) -> None:
        self._client = client
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._finished = False
        self.request = request

    async def batches(self) -> AsyncIterator[list[Event]]:
        """All of them, as many at a time as are there; the last is a `Finished`.

        So clients that are many get fewer and larger pieces, and not ever later ones.
        """
        while True:
            events = [await self._events.get()]
            while not self._events.empty():
                events.append(self._events.get_nowait())
            yield events
            if isinstance(events[-1], Finished):
                return

    def close(self) -> None:
        """End the request, where it has not ended."""
        if not self._finished:
            self._client.cancel(self.request.id)

    def put(self, event: Event) -> None:
        """Called by the client."""
        self._finished = self._finished or isinstance(event, Finished)
        self._events.put_nowait(event)


class EngineClient:
    """Sends requests to rank 0, as many at a time as `most` allows.

    Args:
        most: sequences that may run or wait.
    """

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, most: int
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._most = most
        self._streams: dict[str, Stream] = {}
        self._numbers = itertools.count(1)
        self.stats = Stats()
        self.alive = True

    @property
    def active(self) -> int:
        """Sequences that the engine has and has not ended."""
        return len(self._streams)

    def start(self, prompts: Sequence[tuple[tuple[int, ...], Sampling]]) -> list[Stream]:
        """Send the sequences of one client's request, all or none.

        Raises:
            ApiError: 429 too many run or wait, 503 the engine is gone.
        """
        if not self.alive:
            raise ApiError(503, _GONE)
        if self.active + len(prompts) > self._most:
            raise ApiError(
                429,
                f"{self.active} sequences run or wait and {len(prompts)} more would be over "
                f"{self._most}: try again in a moment",
            )
        streams = []
        for prompt, sampling in prompts:
            request = Request(f"r{next(self._numbers)}", prompt, sampling)
            self._streams[request.id] = stream = Stream(self, request)
            self._send(Add(request))
            streams.append(stream)
        return streams

    def cancel(self, request: str) -> None:
        """Ask for the end of a request; it keeps its place until the engine has ended it."""
        if request in self._streams:
            self._send(Cancel(request))

    async def run(self) -> None:
        """Sort what comes until rank 0 is gone; then nothing is alive."""
        unpacker = Unpacker()
        try:
            while data := await self._reader.read(_CHUNK):
                for message in unpacker.feed(data):
                    self._sort(message)
        finally:
            self.alive = False
            for name in list(self._streams):
                self._hand_on(Finished(name, "error", _GONE))
            self._writer.close()

    def _sort(self, message: dict[str, Any]) -> None:
        for event in message["events"]:
            try:
                self._hand_on(event_from_json(event))
            except RequestError as error:  # a number that is none, which JSON cannot carry
                logger.error("an event of the engine cannot be read: %s", error)
                self.cancel(event["request"])
                self._hand_on(Finished(event["request"], "error", "numbers that are not finite"))
        self.stats = Stats(**message["stats"])

    def _hand_on(self, event: Event) -> None:
        stream = self._streams.get(event.request)
        if stream is None:
            return
        if isinstance(event, Finished):
            del self._streams[event.request]
        stream.put(event)

    def _send(self, command: Add | Cancel) -> None:
        if self.alive:
            self._writer.write(pack(command_to_json(command)))
