"""The address on which a server listens. This module does not import torch."""

from __future__ import annotations

import errno
import ipaddress
import socket

from megatron.config.generation import ServerConfig
from megatron.errors import ConfigError

_BACKLOG = 2048  # number of connections that may wait to be accepted


def open_listener(server: ServerConfig) -> socket.socket:
    """Return the socket that clients will connect to, bound and listening.

    Args:
        server: Flags of the server.

    Raises:
        ConfigError: The address is in use, does not belong to this machine, or is not allowed.
    """
    family = socket.AF_INET6 if ":" in server.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((server.host, server.port))
        # With SO_REUSEADDR two servers can bind the same address, but only one can listen.
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        address = f"--host {server.host} --port {server.port}"
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"{address} is already in use: give another port, or 0 for any free one"
            ) from error
        raise ConfigError(
            f"cannot listen on {address} ({error.strerror or error}): give another --host or --port"
        ) from error
    return listener


def url_of(listener: socket.socket) -> str:
    """Return the URL at which a browser finds the server."""
    host, port = listener.getsockname()[:2]
    if ipaddress.ip_address(host).is_unspecified:
        host = socket.gethostname()
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
