"""Ports for processes that meet."""

from __future__ import annotations

import random
import socket


def free_port() -> int:
    """A port at which nobody listens now, from below those that a system gives away itself.

    Of those any connection of another test may be given the same, before who asked here listens.
    """
    while True:
        port = random.SystemRandom().randrange(10_000, 32_000)  # tests of one seed run side by side
        with socket.socket() as probe:
            try:
                probe.bind(("localhost", port))
            except OSError:
                continue
        return port
