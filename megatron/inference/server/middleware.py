"""What every request passes: access control, and figures for Prometheus."""

from __future__ import annotations

import hmac
import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from megatron.inference.server.endpoint import ApiError, error_body, json_response
from megatron.inference.server.service import EngineClient
from megatron.inference.server.settings import LOOPBACK

# Open to all: whether the server runs, and the page, which holds no secret and asks for the token.
OPEN_PATHS = frozenset({"/health", "/", "/index.html", "/page.css", "/page.js", "/favicon.svg"})
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Guard:
    """Access control: `Authorization: Bearer TOKEN`, or without a token a local Host header.

    A page of another site can make its own host name point here (DNS rebinding), but then it sends
    that name.
    """

    def __init__(self, app: ASGIApp, token: str | None) -> None:
        """Protect an application.

        Args:
            app: The application.
            token: What clients must send. `None` lets in clients of this machine only.
        """
        self._app = app
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] == "http":
            connection = HTTPConnection(scope)
            refusal = self._refusal(connection)
            if refusal is not None:
                headers = {"WWW-Authenticate": "Bearer"} if refusal.status == 401 else {}
                response = json_response(error_body(refusal), refusal.status, headers)
                await response(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _refusal(self, connection: HTTPConnection) -> ApiError | None:
        if self._token is None:
            host = connection.headers.get("host", "")
            # `localhost` of `localhost:5000`, `::1` of `[::1]:5000`.
            is_ipv6 = host.startswith("[")
            name = host[1:].partition("]")[0] if is_ipv6 else host.partition(":")[0].lower()
            if name in LOOPBACK:
                return None
            return ApiError(403, f"the Host header is {host!r}: this server answers localhost only")
        scheme, _, given = connection.headers.get("authorization", "").partition(" ")
        # In constant time, so that the delay of an answer does not tell how much is right.
        is_right = hmac.compare_digest(given.strip().encode(), self._token.encode())
        if connection.url.path in OPEN_PATHS or (is_right and scheme.lower() == "bearer"):
            return None
        return ApiError(
            401,
            "send the header Authorization: Bearer TOKEN, with the token of the server's "
            "--auth-token-file",
        )


class Metrics(Collector):
    """Everything that is counted, in a registry of its own. docs/generation.md explains it."""

    def __init__(self, engine: EngineClient) -> None:
        """Start at zero.

        Args:
            engine: Has figures of its own.
        """
        self._engine = engine
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self.requests = Counter(
            "megatron_http_requests",
            "Requests answered.",
            ("path", "status"),
            registry=self._registry,
        )
        self.seconds = Histogram(
            "megatron_http_request_seconds",
            "From a request's headers to the end of its answer.",
            ("path",),
            buckets=_SECONDS,
            registry=self._registry,
        )
        self.first_token_seconds = Histogram(
            "megatron_first_token_seconds",
            "From a request to its first text.",
            buckets=_SECONDS,
            registry=self._registry,
        )

    def text(self) -> bytes:
        """Return all figures in Prometheus' text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yield the figures of the engine and its queue at this moment."""
        stats = self._engine.stats
        gauges = {
            "megatron_sequences": ("Sequences that run or wait.", self._engine.active),
            "megatron_sequences_running": ("Sequences in the batch.", stats.running),
            "megatron_sequences_waiting": ("Sequences that wait for a place.", stats.waiting),
            "megatron_cache_blocks": ("Blocks of the key-value cache.", stats.blocks),
            "megatron_cache_blocks_used": ("Of these by running sequences.", stats.blocks_used),
            "megatron_engine_up": ("Whether the engine runs.", int(self._engine.alive)),
        }
        counters = {
            "megatron_prompt_tokens": ("Tokens of prompts.", stats.prompt_tokens),
            "megatron_cached_tokens": ("Of these found in the cache.", stats.cached_tokens),
            "megatron_new_tokens": ("Tokens generated.", stats.new_tokens),
            "megatron_preemptions": (
                "Sequences computed again for want of cache.",
                stats.preempted,
            ),
        }
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(name, text, value=value)
        for name, (text, value) in counters.items():
            yield CounterMetricFamily(name, text, value=value)


class Measured:
    """Counts and times the requests to an application."""

    def __init__(self, app: ASGIApp, metrics: Metrics, paths: frozenset[str]) -> None:
        """Wrap an application.

        Args:
            app: The application.
            metrics: Where to count.
            paths: Paths with a label of their own. Others are "other", because anybody can invent
                one.
        """
        self._app = app
        self._metrics = metrics
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and count it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"] if scope["path"] in self._paths else "other"
        start, status = time.perf_counter(), "gone"

        async def watch(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = str(message["status"])
            await send(message)

        try:
            await self._app(scope, receive, watch)
        finally:
            self._metrics.requests.labels(path, status).inc()
            self._metrics.seconds.labels(path).observe(time.perf_counter() - start)
