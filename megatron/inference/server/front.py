"""The web server's process. Rank 0 starts it with two sockets, and it ends when rank 0 does.

Its two arguments are file descriptors: first the socket to rank 0, whose first message is the
settings, then the bound socket that clients connect to. This module does not import torch.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
import sys
from dataclasses import replace

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from megatron.command import run_command
from megatron.inference.messages import Unpacker
from megatron.inference.server.app import build_app
from megatron.inference.server.middleware import Metrics
from megatron.inference.server.service import EngineClient, Service
from megatron.inference.server.settings import CHUNK, FrontSettings, ServerLimits
from megatron.tokenizer import build_tokenizer

_SPARE_FILES = 64  # file descriptors for purposes other than clients
_SHUTDOWN_SECONDS = 5  # seconds that running requests have left when the server ends


def main() -> int:
    """Serve until rank 0 ends, and return the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    channel, listener = (socket.socket(fileno=int(argument)) for argument in sys.argv[1:])
    return run_command(lambda: asyncio.run(serve(channel, listener)))


async def serve(channel: socket.socket, listener: socket.socket) -> None:
    """Answer clients until the channel closes.

    Args:
        channel: Socket to rank 0.
        listener: Bound socket that clients connect to.
    """
    reader, writer = await asyncio.open_connection(sock=channel)
    unpacker = Unpacker[FrontSettings](FrontSettings)
    settings: FrontSettings | None = None
    while settings is None:
        data = await reader.read(CHUNK)
        if not data:  # rank 0 ended before it had loaded a model, and has printed the reason
            return
        settings = next(unpacker.feed(data), None)  # rank 0 sends nothing more before a request
    # Every connection needs a file descriptor: raise the limit, or accept fewer connections.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limits = settings.limits
    max_files = limits.connections + _SPARE_FILES
    if hard != resource.RLIM_INFINITY:
        max_files = min(max_files, hard)
    if soft < max_files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max_files, hard))
    limits = replace(limits, connections=max_files - _SPARE_FILES)
    settings = replace(settings, limits=limits)
    engine = EngineClient(reader, writer, settings.server.max_queued_requests)
    service = Service(settings, build_tokenizer(settings.tokenizer), engine)
    server = uvicorn.Server(_configure(service))
    events = asyncio.create_task(engine.run())
    events.add_done_callback(lambda _: setattr(server, "should_exit", True))
    try:
        await service.texts.start()
        await server.serve(sockets=[listener])
    finally:
        events.cancel()
        await service.texts.close()
    if events.done() and not events.cancelled():
        events.result()  # raises the channel's error, if any


def _configure(service: Service) -> uvicorn.Config:
    return uvicorn.Config(
        build_app(service, Metrics(service.engine)),
        http=timed_protocol(service.settings.limits),
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="error",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=_SHUTDOWN_SECONDS,
        h11_max_incomplete_event_size=1 << 16,
    )


def timed_protocol(limits: ServerLimits) -> type[H11Protocol]:
    """Return a uvicorn protocol that closes connections whose headers do not arrive in time.

    It also closes connections in excess of the maximum number.

    uvicorn itself waits for headers forever, and any byte stops its keep-alive timer, so clients
    that send a byte a minute could occupy all connections.

    Args:
        limits: Time limits, and the maximum number of connections.
    """

    class TimelyProtocol(H11Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)  # type: ignore[arg-type]
            self._start_timer()
            if len(self.connections) > limits.connections:
                self.transport.abort()

        def data_received(self, data: bytes) -> None:
            request = self.cycle
            super().data_received(data)
            if self.cycle is not request:
                self._timer.cancel()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if self.cycle.response_complete:  # otherwise a pipelined request has begun
                self._timer.cancel()
                self._start_timer()

        def connection_lost(self, exc: Exception | None) -> None:
            self._timer.cancel()
            super().connection_lost(exc)

        def _start_timer(self) -> None:
            self._timer = self.loop.call_later(limits.read_seconds, self._end_slow)

        def _end_slow(self) -> None:
            if self.transport.is_closing():
                return
            if self.conn.our_state is h11.IDLE:
                headers = [("content-length", "0"), ("connection", "close")]
                response = h11.Response(status_code=408, headers=headers)
                for event in (response, h11.EndOfMessage()):
                    self.transport.write(self.conn.send(event) or b"")
            self.transport.close()

    return TimelyProtocol
