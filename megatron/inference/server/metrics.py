"""Figures for Prometheus. See docs/generation.md for what each means."""

from __future__ import annotations

import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from megatron.inference.server.engine_client import EngineClient

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Metrics:
    """Everything that is counted, in a registry of its own."""

    def __init__(self, engine: EngineClient) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineFigures(engine))
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
        """All figures in Prometheus' text format."""
        return generate_latest(self._registry)


class _EngineFigures(Collector):
    """What the engine and its queue hold, when asked."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        """One figure after another."""
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
    """Counts and times the requests to an application.

    Args:
        paths: those that get a label of their own; any other is "other", as anybody can invent one.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, paths: frozenset[str]) -> None:
        self._app = app
        self._metrics = metrics
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
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
