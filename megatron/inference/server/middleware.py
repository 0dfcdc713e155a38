"""Middleware that every request passes through: access control, and metrics for Prometheus."""

from __future__ import annotations

import hmac
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from megatron.inference.server.endpoint import ApiError, error_response
from megatron.inference.server.service import EngineClient
from megatron.inference.server.settings import LOOPBACK

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


@dataclass(frozen=True)
class Guard:
    """Access control by a token or, if there is no token, by the Host header.

    With a token, clients must send `Authorization: Bearer TOKEN`. A request without it is passed to
    an application that has only the open routes. It cannot reach any other route, no matter how its
    path is spelled, because the guard itself never reads the path.

    Without a token, the Host header must name this machine. Another site's page can make its own
    host name point to this machine (DNS rebinding), but the Host header then contains that name.

    Attributes:
        app: The application with all routes.
        open_app: The application with the routes that need no token.
        token: Token that clients must send. `None` admits only clients on this machine.
    """

    app: ASGIApp
    open_app: ASGIApp
    token: str | None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or reject it.

        Raises:
            NotImplementedError: The scope is not an HTTP request.
        """
        if scope["type"] != "http":
            raise NotImplementedError(f"{scope['type']} is not served")
        headers = Headers(scope=scope)
        await self._select_app(headers)(scope, receive, send)

    def _select_app(self, headers: Headers) -> ASGIApp:
        """Return the application that answers a request with these headers."""
        if "content-length" in headers and "transfer-encoding" in headers:
            # A proxy that trusts the other header would find different requests in the same bytes
            # (request smuggling).
            message = "Content-Length and Transfer-Encoding exclude each other: send one of them"
            response = error_response(ApiError(400, message))
            response.headers["Connection"] = "close"
            return response
        if self.token is not None:
            scheme, _, token = headers.get("authorization", "").partition(" ")
            # Compare in constant time, so that the delay does not reveal how much of a guess is
            # right.
            is_valid = hmac.compare_digest(token.strip().encode(), self.token.encode())
            return self.app if is_valid and scheme.lower() == "bearer" else self.open_app
        host = headers.get("host", "")
        # `localhost` from `localhost:5000`, `::1` from `[::1]:5000`.
        is_ipv6 = host.startswith("[")
        hostname = host[1:].partition("]")[0] if is_ipv6 else host.partition(":")[0].lower()
        if hostname in LOOPBACK:
            return self.app
        message = f"Host header {host!r} is not allowed: send requests to localhost"
        return error_response(ApiError(403, message))


class Metrics(Collector):
    """The server's metrics, in their own registry. docs/generation.md lists them."""

    def __init__(self, engine: EngineClient) -> None:
        """Create and register the metrics.

        Args:
            engine: Client of the engine, which has its own statistics.
        """
        self._engine = engine
        self._registry = registry = CollectorRegistry()
        registry.register(self)
        self.requests = Counter(
            "megatron_http_requests", "Requests answered.", ("path", "status"), registry=registry
        )
        histogram = partial(Histogram, buckets=_SECONDS, registry=registry)
        self.request_seconds = histogram(
            "megatron_http_request_seconds",
            "Time from a request's headers to the end of its answer.",
            ("path",),
        )
        self.first_token_seconds = histogram(
            "megatron_first_token_seconds", "Time from a request to its first text."
        )

    def text(self) -> bytes:
        """Return all metrics in Prometheus's text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yield the current metrics of the engine and its queue."""
        engine, stats = self._engine, self._engine.stats
        gauge, counter = GaugeMetricFamily, CounterMetricFamily
        yield gauge("megatron_sequences", "Sequences running or waiting.", engine.active)
        yield gauge("megatron_sequences_running", "Sequences in the batch.", stats.running)
        yield gauge(
            "megatron_sequences_waiting",
            "Sequences waiting for a slot in the batch.",
            stats.waiting,
        )
        yield gauge("megatron_cache_blocks", "Blocks of the key-value cache.", stats.blocks)
        yield gauge("megatron_cache_blocks_used", "Blocks of the cache in use.", stats.blocks_used)
        yield gauge("megatron_engine_up", "Whether the engine runs.", int(engine.alive))
        yield counter("megatron_prompt_tokens", "Prompt tokens.", stats.prompt_tokens)
        yield counter(
            "megatron_cached_tokens", "Prompt tokens found in the cache.", stats.cached_tokens
        )
        yield counter("megatron_new_tokens", "Tokens generated.", stats.new_tokens)
        yield counter("megatron_drafted_tokens", "Drafts checked.", stats.drafted_tokens)
        yield counter("megatron_accepted_tokens", "Drafts accepted.", stats.accepted_tokens)
        yield counter(
            "megatron_preemptions",
            "Sequences preempted (they gave up their cache blocks).",
            stats.preempted,
        )


@dataclass(frozen=True)
class MetricsMiddleware:
    """A wrapper that counts and times an application's requests.

    Attributes:
        app: The application to measure.
        metrics: Metrics that count and time the requests.
        paths: Paths that have their own label. All others are labeled "other", because clients can
            request any path.
    """

    app: ASGIApp
    metrics: Metrics
    paths: frozenset[str]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and count it."""
        path = scope["path"] if scope["path"] in self.paths else "other"
        start, status = time.perf_counter(), "gone"

        async def watch(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = str(message["status"])
            await send(message)

        try:
            await self.app(scope, receive, watch)
        finally:
            self.metrics.requests.labels(path, status).inc()
            self.metrics.request_seconds.labels(path).observe(time.perf_counter() - start)
