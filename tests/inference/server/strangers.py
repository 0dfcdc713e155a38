"""Send thousands of requests that lack the token and whose paths are spelled to pass as open.

    python -m tests.inference.server.strangers localhost:5000 --requests 5000

Each asks for a closed path in raw HTTP bytes: encoded, doubled, absolute, after an open
path, with Host headers that contain paths, by any method and version. The server must
require a token, which is unknown here.
"""

from __future__ import annotations

import argparse
import random
import socket
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

CLOSED = ("/api", "/v1/completions", "/v1/chat/completions", "/v1/models", "/v1/models/test")
CLOSED += ("/metrics", "/openapi.json", "/nowhere")
OPEN = ("/health", "/", "/index.html", "/page.css", "/page.js", "/favicon.svg")
_HOSTS = ("localhost", "x/health?", "x/health#", "x/?", "x/health", "/health", "", "[::1]", "a b")
_HOSTS += ("x/page.js?", "localhost/health;", "x@y/health?", "\\health", "x:80/health?", "x\t/?")
_METHODS = ("GET", "POST", "PUT", "HEAD", "OPTIONS", "DELETE", "PATCH", "TRACE", "CONNECT", "get")
_INSERTS = (
    "%09",
    "%00",
    "%2f",
    "%2F",
    "%5c",
    "%0a",
    "%0d%0a",
    "%20",
    "\t",
    ";",
    "//",
    "/./",
    "%2e",
)
_INSERTS += (
    "/../",
    "%252f",
    "%c0%af",
    "%ef%bc%8f",
    "?",
    "#",
    "\\",
    "%",
    "%zz",
    "\xa0",
    "%3f",
    "%23",
)
_HEADERS = ("Authorization: Bearer", "Authorization: Bearer x", "Authorization: Basic Og==")
_HEADERS += ("X-Forwarded-Prefix: /health", "X-Original-URL: /health", "X-Rewrite-URL: /health")
_HEADERS += ("X-Forwarded-Host: x/health?", "X-Forwarded-For: 127.0.0.1", "Forwarded: host=x/?")
_HEADERS += ("X-HTTP-Method-Override: GET", "Host: localhost", "Upgrade: websocket")
_HEADERS += ("Transfer-Encoding: chunked", "Content-Length: 2", "Upgrade: h2c", "Root-Path: /v1")


def make_target(chance: random.Random) -> str:
    """Return a request target that leads to a closed route, or would if something misread it."""
    closed, opened = chance.choice(CLOSED), chance.choice(OPEN)
    match chance.randrange(8):
        case 0:
            target = closed
        case 1:
            target = chance.choice(("http://", "https://", "//", "ws://")) + "localhost" + closed
        case 2:
            target = f"{opened}/..{closed}"
        case 3:
            target = f"{closed}{chance.choice(('?', '#', ';', '/..', '//', '%3f'))}{opened}"
        case 4:
            target = f"http://x{opened}?{closed}"
        case 5:
            target = closed.upper() if chance.random() < 0.5 else closed + "/"
        case 6:
            target = chance.choice(("*", "/v1", "/v1/", "health", "", "localhost:80", "/health/x"))
        case _:
            target = "".join(
                f"%{ord(each):02x}" if chance.random() < 0.3 else each for each in closed
            )
    for _ in range(chance.choice((0, 0, 1, 1, 2))):
        place = chance.randrange(len(target) + 1)
        target = target[:place] + chance.choice(_INSERTS) + target[place:]
    return target


def make_request(chance: random.Random) -> bytes:
    """Return the bytes of one request."""
    version = chance.choice(("1.1", "1.1", "1.1", "1.0", "0.9", "2.0"))
    body = b'{"prompts": ["x"], "tokens_to_generate": 1, "prompt": "x", "messages": []}'
    lines = [f"{chance.choice(_METHODS)} {make_target(chance)} HTTP/{version}"]
    lines += [f"Host: {chance.choice(_HOSTS)}", "Content-Type: application/json"]
    lines += chance.sample(_HEADERS, chance.choice((0, 0, 1, 2)))
    lines += [f"Content-Length: {len(body)}", "Connection: close"]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


@dataclass
class Entered:
    """The results.

    Attributes:
        statuses: how often each occurred; 0: the connection was closed without an answer.
        faults: requests that were accepted, with the answer.
    """

    statuses: Counter[int] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)


def try_to_enter(host: str, port: int, requests: int, *, seed: int = 0) -> Entered:
    """Send this many requests. Only open files may be answered with 200, and only unchanged."""
    entered, known = Entered(), {b""}
    for path in OPEN:
        known.add(_content(_send(host, port, f"GET {path} HTTP/1.0\r\nHost: x\r\n\r\n".encode())))
    for number in range(requests):
        data = make_request(random.Random(seed * 1_000_003 + number))
        answer = _send(host, port, data)
        words = answer.split(b" ", 2)
        status = int(words[1]) if len(words) == 3 else 0
        entered.statuses[status] += 1
        is_open = status == 200 and _content(answer) in known
        if status not in (0, 400, 401) and not is_open:
            entered.faults.append(f"number {number}: {answer[:300]!r} to {data[:300]!r}")
    return entered


def _content(answer: bytes) -> bytes:
    return answer.partition(b"\r\n\r\n")[2]


def _send(host: str, port: int, data: bytes) -> bytes:
    answer = b""
    try:
        with socket.create_connection((host, port), timeout=120) as connection:
            connection.sendall(data)
            while part := connection.recv(1 << 16):
                answer += part
    except ConnectionError:  # closed while we were still sending
        pass
    return answer


def main(argv: Sequence[str] | None = None) -> int:
    """Test a running server, and return 1 if it accepted a request."""
    parser = argparse.ArgumentParser(description="Ask a server for what needs a token.")
    parser.add_argument("server", metavar="HOST:PORT")
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    host, _, port = options.server.rpartition(":")
    entered = try_to_enter(host, int(port), options.requests, seed=options.seed)
    print(f"{options.requests} requests: {dict(sorted(entered.statuses.items()))}")
    print("\n".join(entered.faults[:20]) or "nothing was let in")
    return 1 if entered.faults else 0


if __name__ == "__main__":
    sys.exit(main())
