"""Who is let in, and where the server listens."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.config.generation import ServerConfig
from megatron.errors import ConfigError
from megatron.inference.server.run import find_token, take_address, url_of
from tests.inference.server.fake_engine import FakeEngine
from tests.inference.server.live import Live, make_settings, running

TOKEN = "0123456789abcdef0123"


@pytest.fixture(scope="module")
def closed(tokenizer_folder: Path) -> Iterator[Live]:
    engine = FakeEngine()
    with running(engine, make_settings(tokenizer_folder, engine, token=TOKEN)) as live:
        yield live


@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/openapi.json", "/api", "/nowhere"])
def test_nothing_is_told_without_the_token(closed: Live, path: str) -> None:
    for header in ("", "Bearer", "Bearer wrong", f"Basic {TOKEN}", f"Bearer {TOKEN}x"):
        answer = closed.client.get(path, headers={"Authorization": header})
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"] == "Bearer"


def test_a_host_header_does_not_stand_for_the_path(closed: Live) -> None:
    # A URL that is joined from both would have the path of an open page.
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


@pytest.mark.parametrize("host", ["localhost:5000", "127.0.0.1", "[::1]:5000", "LOCALHOST"])
def test_this_machines_names_are_answered(live: Live, host: str) -> None:
    assert live.client.get("/v1/models", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "[::2]"])
def test_a_name_of_another_site_is_not(live: Live, host: str) -> None:
    assert live.client.get("/v1/models", headers={"Host": host}).status_code == 403


def test_the_default_is_this_machine_alone() -> None:
    server = ServerConfig(port=0)
    assert find_token(server) is None
    with take_address(server) as listener:
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
            take_address(ServerConfig(port=port))
    with pytest.raises(ConfigError, match=r"--host 192\.0\.2\.1"):
        take_address(ServerConfig(host="192.0.2.1", port=0))


def test_the_token_is_in_no_picture_of_the_settings(tokenizer_folder: Path) -> None:
    settings = make_settings(tokenizer_folder, FakeEngine(), token=TOKEN)
    assert TOKEN not in repr(settings)
