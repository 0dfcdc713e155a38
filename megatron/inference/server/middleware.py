"""The layers that every request passes: access control, and metrics for Prometheus."""

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

# Open to all: the health check, and the page, which holds no secret and asks for the token.
OPEN_PATHS = frozenset({"/health", "/", "/index.html", "/page.css", "/page.js", "/favicon.svg"})
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Guard:
    """Access control: `Authorization: Bearer TOKEN`, or without a token a local Host header.

    Another site's page can make its own host name point here (DNS rebinding), but then the Host
    header has that name.
    """

    def __init__(self, app: ASGIApp, token: str | None) -> None:
        """Protect an application.

        Args:
            app: The application.
            token: Token that clients must send. `None` admits only clients on this machine.
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
            return ApiError(403, f"Host header {host!r} is not allowed: send requests to localhost")
        scheme, _, given = connection.headers.get("authorization", "").partition(" ")
        # Compare in constant time, so that the delay does not reveal how much of a guess is right.
        is_right = hmac.compare_digest(given.strip().encode(), self._token.encode())
        if connection.url.path in OPEN_PATHS or (is_right and scheme.lower() == "bearer"):
            return None
        return ApiError(
            401,
            "send the header Authorization: Bearer TOKEN, with the token of the server's "
            "--auth-token-file",
        )


class Metrics(Collector):
    """The server's metrics, in a registry of their own. docs/generation.md lists them."""

    def __init__(self, engine: EngineClient) -> None:
        """Start at zero.

        Args:
            engine: Client of the engine, which has statistics of its own.
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
            "Time from a request's headers to the end of its answer.",
            ("path",),
            buckets=_SECONDS,
            registry=self._registry,
        )
        self.first_token_seconds = Histogram(
            "megatron_first_token_seconds",
            "Time from a request to its first text.",
            buckets=_SECONDS,
            registry=self._registry,
        )

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yield the present metrics of the engine and its queue."""
        stats = self._engine.stats
        gauges = {
            "megatron_sequences": ("Sequences that run or wait.", self._engine.active),
            "megatron_sequences_running": ("Sequences in the batch.", stats.running),
            "megatron_sequences_waiting": ("Sequences that wait for a place.", stats.waiting),
            "megatron_cache_blocks": ("Blocks of the key-value cache.", stats.blocks),
            "megatron_cache_blocks_used": ("Blocks of the cache in use.", stats.blocks_used),
            "megatron_engine_up": ("Whether the engine runs.", int(self._engine.alive)),
        }
        counters = {
            "megatron_prompt_tokens": ("Tokens of prompts.", stats.prompt_tokens),
            "megatron_cached_tokens": ("Prompt tokens found in the cache.", stats.cached_tokens),
            "megatron_new_tokens": ("Tokens generated.", stats.new_tokens),
            "megatron_preemptions": ("Sequences that gave up their blocks.", stats.preempted),
        }
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(name, text, value=value)
        for name, (text, value) in counters.items():
            yield CounterMetricFamily(name, text, value=value)


class Measured:
    """A wrapper that counts and times an application's requests."""

    def __init__(self, app: ASGIApp, metrics: Metrics, paths: frozenset[str]) -> None:
        """Wrap an application.

        Args:
            app: The application.
            metrics: Metrics to record to.
            paths: Paths with a label of their own. All others count as "other", because clients can
                request any path.
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
