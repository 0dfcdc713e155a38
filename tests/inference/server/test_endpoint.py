"""The speed at which large bodies are read, with a clock that stands still."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from megatron.inference.server import endpoint
from megatron.inference.server.endpoint import RateLimiter
from megatron.inference.server.settings import ServerLimits


def test_each_address_waits_for_the_bytes_that_it_has_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, waits = [10.0], [0.0]

    async def sleep(seconds: float) -> None:
        waits[-1] = seconds

    loop = SimpleNamespace(time=lambda: now[0])
    fake = SimpleNamespace(sleep=sleep, get_running_loop=lambda: loop)
    monkeypatch.setattr(endpoint, "asyncio", fake)
    limiter = RateLimiter(ServerLimits(large_body_speed=100, read_seconds=5.0, connections=2))

    def wait(address: str, size: int) -> float:
        waits.append(0.0)
        asyncio.run(limiter.wait(address, size))
        return waits[-1]

    assert wait("a", 100) == 0.0  # a second's worth is free
    assert wait("a", 50) == pytest.approx(0.5)
    assert wait("b", 150) == pytest.approx(0.5)  # another address has its own share
    assert wait("a", 100) == pytest.approx(1.5)
    now[0] = 11.0
    assert wait("a", 25) == pytest.approx(0.75)
    assert wait("a", 10_000) == 5.0  # not longer than a request may take
    assert wait("a", 1) == 5.0
    assert wait("c", 100) == 0.0
    assert set(limiter._used_until) == {"a", "c"}  # "b" has used nothing since then
    now[0] = 30.0
    assert wait("a", 101) == pytest.approx(0.01)
    assert wait("d", 1) == 0.0
    assert set(limiter._used_until) == {"a", "d"}
