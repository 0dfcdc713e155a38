"""Rank 0's side of the start: the address taken, the front started, and both ended together."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator

from megatron.config.server import ServerConfig
from megatron.errors import ConfigError, UserError
from megatron.inference.request import Stats
from megatron.inference.server.framing import pack
from megatron.inference.server.guard import is_loopback, read_token
from megatron.inference.server.inbox import SocketInbox
from megatron.inference.server.settings import FrontSettings

_BACKLOG = 2048  # connections that wait to be accepted
_LEAVE = 15.0  # seconds that the front has for its last answers


def find_token(server: ServerConfig) -> str | None:
    """The token that clients must send; None where only this machine's reach us.

    Raises:
        ConfigError: others could reach us, and there is no token.
    """
    if server.auth_token_file is not None:
        return read_token(server.auth_token_file)
    if not is_loopback(server.host):
        raise ConfigError(
            f"--host {server.host} can be reached from other machines: give --auth-token-file FILE "
            "with a token that clients must send, or --host 127.0.0.1"
        )
    return None


def take_address(server: ServerConfig) -> socket.socket:
    """The socket that clients will connect to: bound, so that nobody else has it.

    Before a model is loaded, which may take minutes.

    Raises:
        ConfigError: it is taken, or not this machine's.
    """
    family = socket.AF_INET6 if ":" in server.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((server.host, server.port))
        # Two servers can bind one address under SO_REUSEADDR, but not both listen.
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"--host {server.host} --port {server.port} cannot be listened on "
            f"({error.strerror or error}): give another port, or 0 for any free one"
        ) from error
    return listener


def url_of(listener: socket.socket) -> str:
    """Where a browser finds us."""
    host, port = listener.getsockname()[:2]
    address = ipaddress.ip_address(host)
    if address.is_unspecified:
        host = socket.gethostname()
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Front:
    """The front process, from its start to its end."""

    def __init__(self, listener: socket.socket, settings: FrontSettings) -> None:
        ours, theirs = socket.socketpair()
        with listener, theirs:
            handed = (theirs.fileno(), listener.fileno())
            words = [str(number) for number in handed]
            self._process = subprocess.Popen(
                [sys.executable, "-m", "megatron.inference.server.front", *words],
                pass_fds=handed,
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for us; the front ends when we do
            )
        self.connection = ours
        with contextlib.suppress(BrokenPipeError):  # it has died: that shows when we read
            ours.sendall(pack(settings.to_json()))

    def end(self) -> int:
        """Wait until it has ended; its exit code."""
        try:
            return self._process.wait(_LEAVE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()


@contextlib.contextmanager
def front(
    listener: socket.socket, settings: FrontSettings, stats: Callable[[], Stats]
) -> Iterator[SocketInbox]:
    """The front, which runs inside the block; rank 0's inbox to it.

    Raises:
        UserError: the front ended by itself, with an error that it has shown.
    """
    process = Front(listener, settings)
    inbox = SocketInbox(process.connection, stats)
    try:
        yield inbox
    finally:
        inbox.close()
        code = process.end()
    if code:
        raise UserError(f"the web server ended with code {code}: its message is above")
