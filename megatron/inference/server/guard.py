"""Who may use the server: a token, or nobody from other machines and other web sites."""

from __future__ import annotations

import hmac
from pathlib import Path

from starlette.requests import HTTPConnection
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from megatron.errors import ConfigError

_MIN_TOKEN = 16  # characters
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
# Open to all: whether the server is up, and the page, which holds no secret and asks for the token.
OPEN_PATHS = frozenset({"/health", "/", "/index.html", "/page.css", "/page.js", "/favicon.svg"})


def is_loopback(host: str) -> bool:
    """The address is reached from this machine alone."""
    return host in _LOOPBACK


def read_token(path: str) -> str:
    """The token in the file of `--auth-token-file`.

    Raises:
        ConfigError: no such file, or no token that is hard to guess.
    """
    try:
        token = Path(path).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--auth-token-file {path} cannot be read: {error}") from error
    if len(token) < _MIN_TOKEN or not token.isprintable() or " " in token:
        raise ConfigError(
            f"--auth-token-file {path}: give one word of at least {_MIN_TOKEN} ASCII characters, "
            "for example from: openssl rand -hex 32"
        )
    return token


class Guard:
    """Asks for `Authorization: Bearer TOKEN`; without a token, for a Host that is this machine.

    A page of another site can make its own host name point here (DNS rebinding), but then sends
    that name.
    """

    def __init__(self, app: ASGIApp, token: str | None) -> None:
        self._app = app
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        refusal = self._refusal(HTTPConnection(scope))
        if refusal is not None:
            await refusal(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _refusal(self, connection: HTTPConnection) -> JSONResponse | None:
        if self._token is None:
            host = connection.headers.get("host", "")
            if _name_of(host) in _LOOPBACK:
                return None
            return _error(403, f"the Host header is {host!r}: this server answers localhost only")
        if connection.url.path in OPEN_PATHS or self._is_authorized(connection, self._token):
            return None
        return _error(
            401,
            "send the header Authorization: Bearer TOKEN, with the token of the server's "
            "--auth-token-file",
            {"WWW-Authenticate": "Bearer"},
        )

    def _is_authorized(self, connection: HTTPConnection, token: str) -> bool:
        scheme, _, given = connection.headers.get("authorization", "").partition(" ")
        # In constant time, so that the answer's delay does not tell how much is right.
        same = hmac.compare_digest(given.strip().encode(), token.encode())
        return same and scheme.lower() == "bearer"


def _name_of(host: str) -> str:
    """`localhost` of `localhost:5000`, `::1` of `[::1]:5000`."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].lower()


def _error(status: int, message: str, headers: dict[str, str] | None = None) -> JSONResponse:
    kind = "authentication_error" if status == 401 else "permission_error"
    error = {"message": message, "type": kind, "param": None, "code": None}
    return JSONResponse({"error": error}, status, headers)
