"""The local server behind `--live`: it serves the page, and new data as runs write it.

It is bound to 127.0.0.1, answers only requests whose Host header names this machine, and never
writes anything.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from megatron.command import print_line
from megatron.config.generation import ServerConfig
from megatron.errors import DataError
from megatron.inference.server.address import open_listener, url_of
from megatron.inference.server.front import timed_protocol
from megatron.inference.server.middleware import Guard
from megatron.inference.server.settings import ServerLimits
from megatron.report.page import as_json, page_data, render
from megatron.report.sources import open_runs

_MIN_PAUSE = 1.0  # seconds between two reads of the files, for any number of open pages...
_PAUSE_FACTOR = 5.0  # ...or this many times the duration of the last read, if that is longer
_HEADERS = {
    "Content-Security-Policy": "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


class LiveRuns:
    """Runs whose files are found and read again on request.

    Args:
        paths: Files and folders of runs. Runs may be added to them at any time.

    Raises:
        DataError: One of `paths` does not exist.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        """Find and read the runs that exist."""
        self._paths, self._sources = paths, open_runs(paths, may_be_empty=True)
        self._lock = asyncio.Lock()
        self._next_read, self._data, self._tag = 0.0, "", ""

    async def current(self) -> tuple[str, str]:
        """Return the page's data as JSON, and an ETag. The files are read at most once a second."""
        async with self._lock:
            started = time.monotonic()
            if started >= self._next_read:
                if await run_in_threadpool(self._read) or not self._data:
                    histories = [source.history for source in self._sources]
                    self._data = await run_in_threadpool(lambda: as_json(page_data(histories)))
                    self._tag = f'"{hashlib.sha256(self._data.encode()).hexdigest()}"'
                finished = time.monotonic()
                self._next_read = finished + max(_MIN_PAUSE, _PAUSE_FACTOR * (finished - started))
        return self._data, self._tag

    def _read(self) -> bool:
        previous = self._sources
        with suppress(OSError, DataError):  # a folder being replaced will be found next time
            self._sources = open_runs(self._paths, may_be_empty=True, opened=previous)
        has_changed = self._sources != previous
        for source in self._sources:
            with suppress(OSError):  # the file is being replaced, or its disk is unavailable
                has_changed |= source.read()
        return has_changed

    async def page(self) -> str:
        """Return the HTML page of the runs as they were last read."""
        async with self._lock:
            return await run_in_threadpool(
                lambda: render([source.history for source in self._sources], live=True)
            )


def build_app(runs: LiveRuns) -> ASGIApp:
    """Return the web application, which answers only requests from this machine."""

    async def page(_: Request) -> Response:
        return Response(await runs.page(), headers=_HEADERS, media_type="text/html")

    async def data(request: Request) -> Response:
        text, tag = await runs.current()
        headers = {**_HEADERS, "ETag": tag}
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(text, headers=headers, media_type="application/json")

    app = Starlette(routes=[Route("/", page), Route("/data.json", data)])
    return Guard(app, app, token=None)


def serve(paths: Sequence[Path], port: int) -> None:
    """Serve the report until Ctrl-C.

    Args:
        paths: Files and folders of runs.
        port: The port to listen on; 0 picks a free one.

    Raises:
        ConfigError: The port is in use.
        DataError: One of `paths` does not exist.
    """
    runs = LiveRuns(paths)
    listener = open_listener(ServerConfig(port=port))
    config = uvicorn.Config(
        build_app(runs),
        http=timed_protocol(ServerLimits(connections=256)),
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="error",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=1,
    )
    print_line(f"live report: {url_of(listener)}/ (this machine only; Ctrl-C ends it)")
    with suppress(KeyboardInterrupt):
        asyncio.run(uvicorn.Server(config).serve(sockets=[listener]))
