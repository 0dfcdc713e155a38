"""Who gets access, and where the server listens."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import Message

from megatron.config.generation import ServerConfig
from megatron.errors import ConfigError
from megatron.inference.server.middleware import Guard
from megatron.inference.server.run import find_token, open_listener, url_of
from tests.inference.server.fake_engine import FakeEngine
from tests.inference.server.live import Live, make_settings, running
from tests.inference.server.smuggling import smuggle
from tests.inference.server.strangers import try_to_enter

TOKEN = "0123456789abcdef0123"


@pytest.fixture(scope="module")
def closed(tokenizer_folder: Path) -> Iterator[Live]:
    engine = FakeEngine()
    with running(engine, make_settings(tokenizer_folder, engine, token=TOKEN)) as live:
        yield live


@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/openapi.json", "/api", "/nowhere"])
def test_nothing_is_revealed_without_the_token(closed: Live, path: str) -> None:
    for header in ("", "Bearer", "Bearer wrong", f"Basic {TOKEN}", f"Bearer {TOKEN}x"):
        answer = closed.client.get(path, headers={"Authorization": header})
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"] == "Bearer"


def test_a_host_header_does_not_stand_for_the_path(closed: Live) -> None:
    # A URL joined from both would have the path of an open page.
    for host in ("x/health?", "x/health#", "x/?"):
        answer = closed.client.get("/v1/models", headers={"Host": host})
        assert answer.status_code == 401


def test_the_token_opens(closed: Live) -> None:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    body = {"prompts": ["x"], "tokens_to_generate": 1}
    assert closed.client.put("/api", json=body, headers=headers).status_code == 200
    assert closed.client.put("/api", json=body).status_code == 401
    assert len(closed.engine.seen) == 1


@pytest.mark.parametrize("path", ["/health", "/", "/page.js"])
def test_health_and_the_page_are_open(closed: Live, path: str) -> None:
    assert closed.client.get(path).status_code == 200


def test_no_spelling_of_a_path_is_let_in(closed: Live) -> None:
    seen = len(closed.engine.seen)
    entered = try_to_enter("127.0.0.1", closed.port, 1000)
    assert not entered.faults, "\n".join(entered.faults[:5])
    assert entered.statuses[401] > 300
    assert len(closed.engine.seen) == seen


@pytest.mark.parametrize("path", ["/hea%09lth", "/metrics%3f/health", "//health", "/health/"])
def test_only_exact_paths_are_open(closed: Live, path: str) -> None:
    # A bare path would lose its double slash on the way.
    assert closed.client.get(f"http://127.0.0.1:{closed.port}{path}").status_code == 401


@pytest.mark.parametrize("kind", ["websocket", "lifespan", "other"])
def test_only_http_is_served(kind: str) -> None:
    async def app(*_: object) -> None:
        pytest.fail("the request was passed on")

    for token in (None, TOKEN):
        guard = Guard(app, app, token)
        with pytest.raises(NotImplementedError):
            asyncio.run(guard({"type": kind, "path": "/health", "headers": []}, app, app))  # type: ignore[arg-type]


@pytest.mark.parametrize("root_path", ["/v1", "/health", "/health/.."])
def test_a_root_path_opens_nothing(root_path: str) -> None:
    # A server may set it; Starlette's routes then see only part of the path.
    async def secret(_: Request) -> Response:
        return Response("secret")

    async def opened(_: Request) -> Response:
        return Response("open")

    app = Router([Route("/models", secret), Route("/v1/models", secret)])
    guard = Guard(app, Router([Route("/health", opened)]), TOKEN)
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        return {"type": "http.request"}

    for path in ("/models", "/v1/models", "/health/models", "/health/../models", "/health"):
        scope = {"type": "http", "path": path, "root_path": root_path, "headers": []}
        asyncio.run(guard({**scope, "method": "GET"}, receive, send))
    bodies = {message.get("body") for message in sent}
    assert b"secret" not in bodies
    assert bodies <= {None, b"open", b"Not Found"}


def test_two_lengths_of_one_body_are_refused(closed: Live, live: Live) -> None:
    # A proxy that uses the other length would see a second request in the same bytes.
    head = "PUT /api HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Authorization: Bearer {TOKEN}\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n"
    data = head.encode() + b"\r\n0\r\n\r\nGET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    for server in (closed, live):
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
            connection.sendall(data)
            answer = b"".join(iter(lambda: connection.recv(4096), b""))  # noqa: B023
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert answer.count(b"HTTP/1.1") == 1


def test_no_spelling_of_two_lengths_is_taken(closed: Live, live: Live) -> None:
    for server in (closed, live):
        smuggled = smuggle("127.0.0.1", server.port, 500)
        assert not smuggled.faults, "\n".join(smuggled.faults[:5])
        assert smuggled.statuses[400] > 400


@pytest.mark.parametrize("host", ["localhost:5000", "127.0.0.1", "[::1]:5000", "LOCALHOST"])
def test_this_machines_names_are_answered(live: Live, host: str) -> None:
    assert live.client.get("/v1/models", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "[::2]"])
def test_a_name_of_another_site_is_not(live: Live, host: str) -> None:
    answer = live.client.get("/v1/models", headers={"Host": host})
    assert answer.status_code == 403
    assert answer.json()["error"]["type"] == "permission_error"


def test_the_default_is_this_machine_alone() -> None:
    server = ServerConfig(port=0)
    assert find_token(server) is None
    with open_listener(server) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"
        assert url_of(listener).startswith("http://127.0.0.1:")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1"])
def test_other_addresses_need_a_token(host: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give --auth-token-file"):
        find_token(ServerConfig(host=host))
    path = tmp_path / "token"
    path.write_text(f"{TOKEN}\n")
    assert find_token(ServerConfig(host=host, auth_token_file=str(path))) == TOKEN


@pytest.mark.parametrize("content", ["", "short", "two words are no token", "ü" * 20])
def test_a_token_that_is_none_is_refused(content: str, tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match="--auth-token-file"):
        find_token(ServerConfig(auth_token_file=str(path)))


def test_a_taken_port_and_a_foreign_address_are_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--port {port} is already in use"):
            open_listener(ServerConfig(port=port))
    with pytest.raises(ConfigError, match=r"--host 192\.0\.2\.1"):
        open_listener(ServerConfig(host="192.0.2.1", port=0))


def test_the_token_is_in_no_picture_of_the_settings(tokenizer_folder: Path) -> None:
    settings = make_settings(tokenizer_folder, FakeEngine(), token=TOKEN)
    assert TOKEN not in repr(settings)
