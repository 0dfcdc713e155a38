"""The socket that a server listens on, and its URL."""

from __future__ import annotations

import errno
import os
import socket
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.config.generation import ServerConfig
from megatron.errors import ConfigError
from megatron.inference.server import address
from megatron.inference.server.address import open_listener, url_of


class _Socket:
    """A socket that records what it is told, and may fail."""

    def __init__(self, error: int | None = None) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self._error = error

    def __call__(self, *kind: Any) -> _Socket:
        self.calls.append(("socket", *kind))
        return self

    def setsockopt(self, *option: Any) -> None:
        self.calls.append(("setsockopt", *option))

    def bind(self, place: Any) -> None:
        self.calls.append(("bind", place))

    def listen(self, backlog: int) -> None:
        self.calls.append(("listen", backlog))
        if self._error is not None:
            raise OSError(self._error, os.strerror(self._error))

    def close(self) -> None:
        self.calls.append(("close",))


@pytest.mark.parametrize(
    ("host", "family"), [("127.0.0.1", socket.AF_INET), ("::1", socket.AF_INET6)]
)
def test_a_listener_is_bound_and_listens(
    host: str, family: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = _Socket()
    monkeypatch.setattr(address.socket, "socket", found)
    assert open_listener(ServerConfig(host=host, port=80)) is found
    assert found.calls == [
        ("socket", family, socket.SOCK_STREAM),
        ("setsockopt", socket.SOL_SOCKET, socket.SO_REUSEADDR, 1),
        ("bind", (host, 80)),
        ("listen", 2048),
    ]


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (errno.EADDRINUSE, "^--host ::1 --port 80 is already in use: give another port, or 0 for"),
        (errno.EACCES, "^cannot listen on --host ::1 --port 80 .Permission denied.: give another"),
    ],
)
def test_an_address_that_cannot_be_used_is_named(
    error: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = _Socket(error)
    monkeypatch.setattr(address.socket, "socket", found)
    with pytest.raises(ConfigError, match=message):
        open_listener(ServerConfig(host="::1", port=80))
    assert found.calls[-1] == ("close",)


@pytest.mark.parametrize(
    ("name", "url"),
    [
        (("127.0.0.1", 5000), "http://127.0.0.1:5000"),
        (("::1", 5000, 0, 0), "http://[::1]:5000"),
        (("0.0.0.0", 80), "http://here:80"),
        (("::", 80, 0, 0), "http://here:80"),
    ],
)
def test_the_url_of_a_listener(
    name: tuple[Any, ...], url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(address.socket, "gethostname", lambda: "here")
    listener: Any = SimpleNamespace(getsockname=lambda: name)
    assert url_of(listener) == url
