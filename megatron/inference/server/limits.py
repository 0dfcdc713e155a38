"""How much the server takes on, and how long it waits. All of it protects one process."""

from __future__ import annotations

from dataclasses import dataclass

MAX_PROMPTS = 128  # Megatron's own limit for one request
MAX_STOPS = 16  # stop strings of a request
MAX_STOP_LENGTH = 256  # characters


@dataclass(frozen=True)
class Limits:
    """What one client, and all of them, may ask for.

    Attributes:
        body_bytes: of one request; more is refused with 413.
        queued: sequences that run or wait; a request that would exceed it is refused with 429.
        tokens: prompts times (longest prompt + tokens to generate) of one request; 422.
        read_seconds: for the headers, and for the body, of a request to arrive; 408.
        write_seconds: for a client to take what it is sent; then it counts as gone.
        generate_seconds: for a request from its body to its last token; 504.
        connections: open at once; more are closed at once.
    """

    body_bytes: int = 1 << 20
    queued: int = 1024
    tokens: int = 12000
    read_seconds: float = 10.0
    write_seconds: float = 30.0
    generate_seconds: float = 600.0
    connections: int = 4096
