"""Rank 0's end of the socket to the front: commands come in, events and statistics go out."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict

from megatron.inference.request import Event, RequestError, Stats
from megatron.inference.server.framing import FramingError, Unpacker, pack
from megatron.inference.wire import Command, Shutdown, command_from_json, event_to_json

_CHUNK = 1 << 16


class SocketInbox:
    """The `worker.Inbox` of a server. Two threads do the waiting, so that the engine never does.

    The front's end, by whatever, is the command to shut down.

    Args:
        connection: to the front; closed by `close`.
        stats: what the engine is doing, told along with events.
    """

    def __init__(self, connection: socket.socket, stats: Callable[[], Stats]) -> None:
        self._connection = connection
        self._stats = stats
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._messages: queue.SimpleQueue[tuple[Sequence[Event], Stats] | None] = (
            queue.SimpleQueue()
        )
        self._threads = [
            threading.Thread(target=work, name=f"front-{work.__name__}", daemon=True)
            for work in (self._receive, self._transmit)
        ]
        for thread in self._threads:
            thread.start()

    def poll(self, wait: float) -> list[Command]:
        """What has arrived, in order. Waits up to `wait` seconds for the first; 0: not at all."""
        commands: list[Command] = []
        try:
            commands.append(self._commands.get(block=wait > 0, timeout=wait or None))
            while True:
                commands.append(self._commands.get_nowait())
        except queue.Empty:
            return commands

    def send(self, events: Sequence[Event]) -> None:
        """Hand these on, with the statistics after them."""
        self._messages.put((tuple(events), self._stats()))

    def shut_down(self) -> None:
        """As if the front were gone."""
        self._commands.put(Shutdown())

    def close(self) -> None:
        """Send what is left, and close."""
        self._messages.put(None)
        self._threads[1].join(timeout=5.0)
        self._connection.close()

    def _receive(self) -> None:
        unpacker = Unpacker()
        try:
            while data := self._connection.recv(_CHUNK):
                for message in unpacker.feed(data):
                    self._commands.put(command_from_json(message))
        except (OSError, FramingError, RequestError):
            pass  # our own front sends no such thing: it has gone wrong, and is as good as gone
        self._commands.put(Shutdown())

    def _transmit(self) -> None:
        try:
            while (message := self._messages.get()) is not None:
                events, stats = message
                values = [event_to_json(event) for event in events]
                self._connection.sendall(pack({"events": values, "stats": asdict(stats)}))
            self._connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the front is gone: `_receive` says so
