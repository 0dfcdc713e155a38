"""Connections that come to the point: uvicorn's HTTP, with a time limit for headers."""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from megatron.inference.server.limits import Limits


def protocol_with(limits: Limits) -> type[H11Protocol]:
    """uvicorn's `http=` class: closes a connection that sends no whole request in time.

    uvicorn waits for headers for ever, and any byte stops its keep-alive timer: a few clients that
    send a byte a minute would hold all connections.
    """

    class TimelyProtocol(H11Protocol):
        _timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)  # type: ignore[arg-type]
            if len(self.connections) > limits.connections:
                self.transport.abort()
                return
            self._start_timer()

        def data_received(self, data: bytes) -> None:
            request = self.cycle
            super().data_received(data)
            if self.cycle is not request:
                self._stop_timer()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if self.cycle.response_complete:  # else a pipelined request has begun
                self._start_timer()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_timer()
            super().connection_lost(exc)

        def _start_timer(self) -> None:
            self._stop_timer()
            self._timer = self.loop.call_later(limits.read_seconds, self._too_slow)

        def _stop_timer(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

        def _too_slow(self) -> None:
            if self.transport.is_closing():
                return
            if self.conn.our_state is h11.IDLE:
                for event in _timeout_response():
                    self.transport.write(self.conn.send(event) or b"")
            self.transport.close()

    return TimelyProtocol


def _timeout_response() -> list[Any]:
    headers = [("content-length", "0"), ("connection", "close")]
    return [h11.Response(status_code=408, headers=headers), h11.EndOfMessage()]
