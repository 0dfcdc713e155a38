"""One client cannot affect the others."""

from __future__ import annotations

import json
import os
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import httpx2 as httpx
import pytest

from megatron.config.generation import ServerConfig
from megatron.inference.server import front
from megatron.inference.server.settings import FrontSettings, ServerLimits
from tests.inference.server.fake_engine import FakeEngine
from tests.inference.server.live import Live, make_settings, running

SERVER = ServerConfig(max_body_bytes=20_000, max_queued_requests=4, request_timeout=600.0)
LIMITS = ServerLimits(read_seconds=600.0)
IMPATIENT = ServerLimits(read_seconds=1.0)
LONG = {"prompt": "x", "max_tokens": 200}


def _strict_settings(
    folder: Path, engine: FakeEngine, limits: ServerLimits = LIMITS
) -> FrontSettings:
    return make_settings(folder, engine, limits=limits, server=SERVER)


@pytest.fixture
def slow(tokenizer_folder: Path) -> Iterator[Live]:
    """Return a server on which an answer of 200 tokens takes 10 seconds."""
    engine = FakeEngine(seconds=0.05)
    with running(engine, _strict_settings(tokenizer_folder, engine)) as live:
        yield live


@pytest.fixture(scope="module")
def strict(tokenizer_folder: Path) -> Iterator[Live]:
    engine = FakeEngine()
    with running(engine, _strict_settings(tokenizer_folder, engine)) as live:
        yield live


@pytest.fixture
def impatient(tokenizer_folder: Path) -> Iterator[Live]:
    """Return a server that waits a second for a request."""
    engine = FakeEngine()
    with running(engine, _strict_settings(tokenizer_folder, engine, IMPATIENT)) as live:
        yield live


def _until(holds: Callable[[], bool], seconds: float = 60.0) -> bool:
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def _open(live: Live, data: bytes) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", live.port), timeout=60)
    connection.sendall(data)
    return connection


def _request(body: dict[str, object], path: str = "/v1/completions") -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


SHORT = {"prompts": ["x"], "tokens_to_generate": 1}


def _good(live: Live) -> None:
    assert live.put(SHORT).json()["text"] == ["xx"]


@pytest.mark.parametrize("path", ["/api", "/v1/completions"])
def test_a_large_body_is_413(strict: Live, path: str) -> None:
    answer = strict.post(path, {"prompts": ["x" * 30_000], "prompt": "x" * 30_000})
    assert answer.status_code == 413
    assert "20,000 bytes" in answer.text
    _good(strict)


def test_a_huge_body_is_413_before_it_is_sent(strict: Live) -> None:
    head = "POST /api HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with _open(strict, f"{head}Content-Length: 9999999999\r\n\r\n".encode()) as connection:
        assert connection.recv(1000).startswith(b"HTTP/1.1 413")


def test_a_chunked_body_has_the_same_limit(strict: Live) -> None:
    pieces = (b"x" * 5000 for _ in range(10))
    headers = {"Content-Type": "application/json"}
    answer = strict.client.post("/api", content=pieces, headers=headers)
    assert answer.status_code == 413


@pytest.mark.parametrize("path", ["/v1/completions", "/nowhere"])
def test_large_bodies_of_one_address_are_read_slowly(tokenizer_folder: Path, path: str) -> None:
    engine, limits = FakeEngine(), ServerLimits(large_body_speed=2 << 20)
    with running(engine, make_settings(tokenizer_folder, engine, limits=limits)) as live:
        _good(live)
        started = time.monotonic()
        with ThreadPoolExecutor(4) as clients:
            body = {"prompt": "x" * 1_000_000}
            large = [clients.submit(live.post, path, body) for _ in range(8)]
            answered = 0
            while not all(each.done() for each in large):
                _good(live)
                answered += 1
        seconds = time.monotonic() - started
        if path == "/v1/completions":
            assert {each.result().status_code for each in large} == {422}
            # The first second and the first 64 KiB are free.
            assert seconds > 2.0
            assert answered >= 5  # others do not wait for the large ones
        _good(live)


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b"", 400, "not JSON"),
        (b"[]", 400, "not a JSON object"),
        (b"[" * 5000, 400, "not JSON"),
        (b'{"prompts": [NaN]}', 400, "not JSON"),
        (b'{"prompts": ["\\ud800"]}', 400, "not JSON"),
        (b'{"prompts": ["\xff"]}', 400, "not JSON"),
    ],
)
def test_what_is_no_json_object_is_400(
    strict: Live, body: bytes, status: int, message: str
) -> None:
    answer = strict.client.put("/api", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == status
    assert message in answer.json()


def test_another_sites_form_is_refused(strict: Live) -> None:
    # What a browser sends cross-site without a preflight request: never JSON.
    answer = strict.client.post(
        "/api", content=b'{"prompts": ["x"]}', headers={"Content-Type": "text/plain"}
    )
    assert answer.status_code == 415


_HALF = _request({"prompt": "x"})[:-3]
_STARTS = (b"", b"POST /api HTTP/1.1\r\nHost: loc", _HALF)


def test_slow_headers_and_bodies_are_ended(impatient: Live) -> None:
    for connection in [_open(impatient, start) for start in _STARTS * 10]:
        answer = connection.recv(4096)
        assert answer.startswith(b"HTTP/1.1 408"), answer
        connection.close()


def test_nobody_waits_for_slow_headers_and_bodies(strict: Live) -> None:
    slow = [_open(strict, start) for start in _STARTS * 10]
    _good(strict)  # before any of them is ended
    for connection in slow:
        connection.close()


def test_a_byte_now_and_then_does_not_keep_a_connection(impatient: Live) -> None:
    with _open(impatient, b"POST ") as connection:
        started, is_ended = time.monotonic(), False
        while not is_ended and time.monotonic() - started < 60:
            try:
                connection.sendall(b"/")
            except OSError:
                is_ended = True
            time.sleep(0.1)
        assert is_ended


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_place(slow: Live, stream: bool) -> None:
    connection = _open(slow, _request({**LONG, "stream": stream}))
    assert _until(lambda: slow.engine.has_work)
    connection.close()
    assert _until(lambda: not slow.engine.has_work)
    assert slow.engine.stats.new_tokens < 200  # of the whole answer
    _good(slow)


def test_a_client_that_does_not_read_frees_its_place(tokenizer_folder: Path) -> None:
    engine = FakeEngine(max_length=1_000_000)
    limits = replace(LIMITS, write_seconds=0.3)
    server = replace(SERVER, max_tokens_to_oom=1_000_000)
    settings = make_settings(tokenizer_folder, engine, limits=limits, server=server)
    with running(engine, settings) as live:
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect(("127.0.0.1", live.port))
            body = {"prompt": "x", "max_tokens": 90_000, "logprobs": 20, "stream": True}
            connection.sendall(_request(body))
            assert _until(lambda: engine.has_work)
            assert _until(lambda: not engine.has_work)
        _good(live)


def test_more_than_can_wait_is_429(slow: Live) -> None:
    connections = [_open(slow, _request(LONG)) for _ in range(4)]
    assert _until(lambda: len(slow.engine.seen) == 4)
    answer = slow.post("/v1/completions", LONG)
    assert answer.status_code == 429
    assert answer.headers["retry-after"] == "1"
    for connection in connections:
        connection.close()
    assert _until(lambda: not slow.engine.has_work)
    # The front end counts a request until it learns that it has ended, shortly after the engine.
    assert _until(lambda: slow.put(SHORT).status_code == 200)
    _good(slow)


def test_an_answer_that_takes_too_long_is_504(tokenizer_folder: Path) -> None:
    engine = FakeEngine(seconds=0.05)
    server = replace(SERVER, request_timeout=2.0)
    settings = make_settings(tokenizer_folder, engine, limits=LIMITS, server=server)
    with running(engine, settings) as live:
        assert live.post("/v1/completions", LONG).status_code == 504
        streamed = live.post("/v1/completions", {**LONG, "stream": True})
        assert streamed.status_code == 200
        assert "--request-timeout" in streamed.text
        assert streamed.text.endswith("data: [DONE]\n\n")
        assert _until(lambda: not engine.has_work)
        assert _until(lambda: live.put(SHORT).status_code == 200)


def test_a_failing_step_fails_its_requests_and_no_more(tokenizer_folder: Path) -> None:
    engine = FakeEngine()
    engine.fails = (7,)
    with running(engine, make_settings(tokenizer_folder, engine)) as live:
        answer = live.post("/v1/completions", {"prompt": [7], "max_tokens": 2})
        assert answer.status_code == 500
        assert "Traceback" not in answer.text
        streamed = live.post("/v1/completions", {"prompt": [7], "max_tokens": 2, "stream": True})
        assert '"error"' in streamed.text
        _good(live)


def test_many_at_a_time_wait_their_turn(tokenizer_folder: Path) -> None:
    engine = FakeEngine(places=4, seconds=0.002)
    with running(engine, make_settings(tokenizer_folder, engine)) as live:
        statuses: list[int] = []

        def ask() -> None:
            with httpx.Client(base_url=live.url, timeout=30) as client:
                body = {"prompts": ["x"], "tokens_to_generate": 5}
                statuses.append(client.put("/api", json=body).status_code)

        threads = [threading.Thread(target=ask) for _ in range(40)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert statuses == [200] * 40


def test_the_figures_count(tokenizer_folder: Path) -> None:
    engine = FakeEngine()
    with running(engine, make_settings(tokenizer_folder, engine)) as live:
        _good(live)
        live.post("/v1/completions", {"prompt": "x", "max_tokens": 2})
        live.put({})
        live.client.get("/nowhere/at/all")
        text = live.client.get("/metrics").text
    for line in (
        'megatron_http_requests_total{path="/api",status="200"} 1.0',
        'megatron_http_requests_total{path="/api",status="400"} 1.0',
        'megatron_http_requests_total{path="other",status="404"} 1.0',
        "megatron_new_tokens_total 3.0",
        "megatron_first_token_seconds_count 1.0",
        "megatron_engine_up 1.0",
    ):
        assert line in text


def test_without_an_engine_requests_are_503() -> None:
    from megatron.inference.server.endpoint import ApiError
    from megatron.inference.server.service import EngineClient

    class Gone:
        def close(self) -> None:
            pass

    client = EngineClient(None, Gone(), 4)  # type: ignore[arg-type]
    client.alive = False
    with pytest.raises(ApiError) as caught:
        client.start([])
    assert caught.value.status == 503


def test_every_connection_has_a_file_descriptor(tokenizer_folder: Path) -> None:
    before, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    engine = FakeEngine()
    settings = make_settings(tokenizer_folder, engine)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 64, hard))
    try:
        with running(engine, settings):
            raised, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before, hard))
    wanted = settings.limits.connections + front._SPARE_FILES
    assert raised == (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard))
