"""Ports at which processes meet."""

from __future__ import annotations

import random
import socket


def free_port() -> int:
    """Return a port that nobody listens on now, below the system's ephemeral range.

    The system could give an ephemeral port to another test's connection before the caller listens.
    """
    while True:
        port = random.SystemRandom().randrange(10_000, 32_000)  # parallel tests may share a seed
        with socket.socket() as probe:
            try:
                probe.bind(("localhost", port))
            except OSError:
                continue
        return port
