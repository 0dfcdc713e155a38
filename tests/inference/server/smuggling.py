"""Send thousands of requests with two body lengths, in which a proxy could see a second request.

    python -m tests.inference.server.smuggling localhost:5000 --requests 1000

Each has Content-Length and Transfer-Encoding, or two of either, in any order and spelling, and
bytes of a second request after or inside its body. The server must answer 400 or nothing, once,
and close.
"""

from __future__ import annotations

import argparse
import random
import socket
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

_TIMEOUT = 120.0  # seconds until the server has closed, on a busy machine
_SECOND = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
_PATHS = ("/api", "/v1/completions", "/v1/chat/completions", "/health", "/v1/models", "/")
_CODINGS = ("chunked", "Chunked", "chunked ", "\tchunked", "gzip, chunked", "chunked, chunked")
_CODINGS += ("identity", "", "x", "chunked;a=b", "chunked\x0b", '"chunked"', "\xa0chunked", "gzip")
_BREAKS = (": ", ":", ":\t", ":  ")


def make_request(chance: random.Random) -> bytes:
    """Return the bytes of one request, including those of a second one."""
    body = b'{"prompts": ["x"], "tokens_to_generate": 1}'
    chunk = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    content = chance.choice((chunk, b"0\r\n\r\n", body)) + _SECOND
    lengths = (0, 1, 5, len(body), len(content), len(content) - len(_SECOND), 10**9)

    def length() -> str:
        value = str(chance.choice(lengths))
        return chance.choice((value, value, value, f"{value}, {value}", f"0{value}"))

    def header(name: str, value: str) -> str:
        name = chance.choice((name, name.lower(), name.upper()))
        return f"{name}{chance.choice(_BREAKS)}{value}"

    pair = [
        header("Content-Length", length()),
        header("Transfer-Encoding", chance.choice(_CODINGS)),
    ]
    if chance.random() < 0.2:
        pair.append(header("Content-Length", length()))
    if chance.random() < 0.2:
        pair.append(header("Transfer-Encoding", chance.choice(_CODINGS)))
    lines = ["Host: localhost", "Content-Type: application/json", *pair]
    if chance.random() < 0.5:
        lines.append("Connection: keep-alive")
    chance.shuffle(lines)
    method = chance.choice(("POST", "POST", "PUT", "GET", "DELETE", "HEAD"))
    lines.insert(0, f"{method} {chance.choice(_PATHS)} HTTP/{chance.choice(('1.1', '1.1', '1.0'))}")
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + content


@dataclass
class Smuggled:
    """The results.

    Attributes:
        statuses: How often each status was returned. 0 stands for a connection that was closed
            without an answer.
        faults: Requests that were answered otherwise, or twice, or whose connection stayed open.
    """

    statuses: Counter[int] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)


def smuggle(host: str, port: int, requests: int, *, seed: int = 0) -> Smuggled:
    """Send this many requests, one after another."""
    smuggled = Smuggled()
    for number in range(requests):
        data = make_request(random.Random(seed * 1_000_003 + number))
        answer, is_closed = _send(host, port, data)
        words = answer.split(b" ", 2)
        status = int(words[1]) if len(words) == 3 else 0
        smuggled.statuses[status] += 1
        if status not in (0, 400) or answer.count(b"HTTP/1.") > 1 or not is_closed:
            closed = "closed" if is_closed else "left open"
            smuggled.faults.append(f"number {number}: {closed}, {answer[:300]!r} to {data[:300]!r}")
    return smuggled


def _send(host: str, port: int, data: bytes) -> tuple[bytes, bool]:
    """Return the answer, and whether the server closed the connection."""
    answer = b""
    try:
        with socket.create_connection((host, port), timeout=_TIMEOUT) as connection:
            connection.sendall(data)
            while part := connection.recv(1 << 16):
                answer += part
    except TimeoutError:
        return answer, False
    except OSError:  # reset, because it had not read everything
        pass
    return answer, True


def main(argv: Sequence[str] | None = None) -> int:
    """Test a running server, and return 1 if it accepted a request."""
    parser = argparse.ArgumentParser(description="Send a server requests with two lengths.")
    parser.add_argument("server", metavar="HOST:PORT")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    host, _, port = options.server.rpartition(":")
    smuggled = smuggle(host, int(port), options.requests, seed=options.seed)
    print(f"{options.requests} requests: {dict(sorted(smuggled.statuses.items()))}")
    print("\n".join(smuggled.faults[:20]) or "no request was taken")
    return 1 if smuggled.faults else 0


if __name__ == "__main__":
    sys.exit(main())
