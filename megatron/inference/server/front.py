"""The front process: started by rank 0 with two sockets, ends when rank 0 does.

    python -m megatron.inference.server.front CHANNEL LISTENER

CHANNEL and LISTENER are file descriptors: of the socket to rank 0, whose first message is the
settings, and of the bound socket that clients connect to.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
import sys
from dataclasses import replace

import uvicorn

from megatron.inference.server.app import build_app
from megatron.inference.server.chat import ChatTemplate, special_tokens
from megatron.inference.server.connections import protocol_with
from megatron.inference.server.engine_client import EngineClient
from megatron.inference.server.framing import Unpacker
from megatron.inference.server.metrics import Metrics
from megatron.inference.server.service import Service
from megatron.inference.server.settings import FrontSettings
from megatron.tokenizer import build_tokenizer

_CHUNK = 1 << 16
_SPARE_FILES = 64  # descriptors that are not for clients
_LAST_ANSWERS = 5  # seconds for requests that run when the server ends


def main() -> int:
    """Serve until rank 0 is gone; the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    channel, listener = (socket.socket(fileno=int(word)) for word in sys.argv[1:])
    asyncio.run(serve(channel, listener))
    return 0


async def serve(channel: socket.socket, listener: socket.socket) -> None:
    """Answer clients until the channel closes."""
    reader, writer = await asyncio.open_connection(sock=channel)
    settings = _with_descriptors(await _receive_settings(reader))
    engine = EngineClient(reader, writer, settings.limits.queued)
    service = Service(settings, build_tokenizer(settings.tokenizer), engine, Metrics(engine))
    server = uvicorn.Server(_configure(service))
    events = asyncio.create_task(engine.run())
    events.add_done_callback(lambda _: setattr(server, "should_exit", True))
    try:
        await server.serve(sockets=[listener])
    finally:
        events.cancel()
    if events.done() and not events.cancelled():
        events.result()  # raises what went wrong with the channel


def _configure(service: Service) -> uvicorn.Config:
    settings = service.settings
    template = None
    if settings.chat_template is not None:
        special = special_tokens(settings.tokenizer.tokenizer_model)
        template = ChatTemplate(settings.chat_template, special)
    return uvicorn.Config(
        build_app(service, template),
        http=protocol_with(settings.limits),
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="error",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=_LAST_ANSWERS,
        h11_max_incomplete_event_size=1 << 16,
    )


async def _receive_settings(reader: asyncio.StreamReader) -> FrontSettings:
    """Rank 0's first message. It sends no other before it is asked for something."""
    unpacker = Unpacker()
    while data := await reader.read(_CHUNK):
        for message in unpacker.feed(data):
            return FrontSettings.from_json(message)
    raise EOFError("rank 0 left before it sent the settings")


def _with_descriptors(settings: FrontSettings) -> FrontSettings:
    """Every connection takes a file descriptor: have as many as needed, or fewer connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = settings.limits.connections + _SPARE_FILES
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    connections = min(settings.limits.connections, wanted - _SPARE_FILES)
    return replace(settings, limits=replace(settings.limits, connections=connections))


if __name__ == "__main__":
    sys.exit(main())
