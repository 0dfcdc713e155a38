"""Send thousands of malformed requests.

    python -m tests.inference.server.fuzz localhost:5000 --requests 5000

Each is a request with something changed: types, sizes, Unicode, invalid numbers, depth, the
bytes of HTTP itself. No answer may be a 5xx or take long, and good requests in between must
be answered as usual.
"""

from __future__ import annotations

import argparse
import json
import random
import socket
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

PATHS = ("/api", "/v1/completions", "/v1/chat/completions")
GOOD = {"prompts": ["Hello"], "tokens_to_generate": 2, "top_k": 1, "no_log": True}
_TIMEOUT = 60.0  # seconds for any answer, on a busy machine
_GOOD_EVERY = 50  # requests

_STRINGS = (
    "", "x", "Hello, world!", "a" * 5000, "\x00", "\n\n", "東京 👩‍👩‍👧‍👦", "\u202e\ufeff\u0301",
    "' OR 1=1 --", "{{ 7 * 7 }}{% for x in range(10**9) %}x{% endfor %}", "<|endoftext|>" * 3,
    "../../etc/passwd", "<script>alert(1)</script>",
    "\ud83d".encode("utf-16", "surrogatepass").decode("latin-1"),
)  # fmt: skip
_NUMBERS = (
    0, 1, -1, 2, 7, 64, 128, 1000, 1001, 2**31, -(2**31), 2**53, 2**63 - 1, 2**63, 2**64, 10**30,
    0.0, -0.0, 0.5, 1.0, 1.5, 1e-300, 1e300, -1e300, 5e-324,
)  # fmt: skip
_FIELDS: dict[str, tuple[str, ...]] = {
    "/api": (
        "prompts", "tokens_to_generate", "logprobs", "temperature", "top_k", "top_p", "top_p_decay",
        "top_p_bound", "add_BOS", "stop_on_double_eol", "stop_on_eol", "random_seed", "no_log",
        "prevent_newline_after_colon", "beam_width", "stop_token", "length_penalty", "max_len",
        "sentences",
    ),
    "/v1/completions": (
        "prompt", "model", "max_tokens", "n", "temperature", "top_p", "top_k", "logprobs", "echo",
        "repetition_penalty", "seed", "stop", "stream", "stream_options", "suffix", "best_of",
        "logit_bias", "frequency_penalty", "user",
    ),
    "/v1/chat/completions": (
        "messages", "model", "max_tokens", "max_completion_tokens", "n", "temperature", "top_p",
        "logprobs", "top_logprobs", "seed", "stop", "stream", "stream_options", "tools",
        "response_format", "user",
    ),
}  # fmt: skip


def _base(path: str) -> dict[str, Any]:
    if path == "/api":
        return dict(GOOD)
    if path == "/v1/completions":
        return {"prompt": "Hello", "max_tokens": 2}
    return {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}


def _value(chance: random.Random, depth: int = 0) -> Any:
    kind = chance.randrange(9 if depth < 3 else 6)
    if kind in (0, 1):
        return chance.choice(_NUMBERS)
    if kind in (2, 3):
        return chance.choice(_STRINGS)
    if kind in (4, 5):
        return chance.choice((True, False, None))
    if kind == 6:
        return {chance.choice(_STRINGS): _value(chance, depth + 1) for _ in range(2)}
    return [_value(chance, depth + 1) for _ in range(chance.choice((0, 1, 2, 5, 200)))][:130]


def _body(chance: random.Random, path: str) -> bytes:
    body = _base(path)
    if path == "/api" and chance.random() < 0.2:
        body["beam_width"] = 2  # other fields matter then
    for _ in range(chance.choice((0, 0, 1, 1, 1, 2, 5))):
        body[chance.choice(_FIELDS[path])] = _value(chance)
    if chance.random() < 0.1:
        body.pop(chance.choice(list(body)))
    if chance.random() < 0.1:
        body[chance.choice(_STRINGS)] = _value(chance)
    data = json.dumps(body, ensure_ascii=chance.random() < 0.5).encode("utf-8", "surrogatepass")
    match chance.randrange(20):
        case 0:
            return data[: chance.randrange(len(data))]
        case 1:
            place = chance.randrange(len(data))
            return data[:place] + bytes([chance.randrange(256)]) + data[place + 1 :]
        case 2:
            return chance.choice((b"[" * 20_000, b'{"a":' * 5000, b"NaN", b"", b"null", b'"x"'))
        case 3:
            return b'{"prompts": ["x"], "temperature": ' + chance.choice((b"NaN", b"1e999", b"-"))
        case 4:
            return data[:-1] + b', "x": "' + b"y" * chance.choice((100_000, 1_100_000)) + b'"}'
    return data


def make_request(chance: random.Random) -> bytes:
    """Return the bytes of one request."""
    path = chance.choice(PATHS)
    body = _body(chance, path)
    method = chance.choice(("POST",) * 40 + ("PUT", "GET", "DELETE", "OPTIONS", "HEAD"))
    if chance.random() < 0.03:
        path = chance.choice(
            ("/", "/metrics", "/%00", "/../etc/passwd", "/api/", "//", "/health?x")
        )
    kind = "application/json" if chance.random() < 0.95 else chance.choice(("text/plain", "", "é"))
    length = len(body) if chance.random() < 0.98 else chance.choice((0, 1, len(body) + 5))
    lines = [
        f"{method} {path} HTTP/1.1",
        "Host: localhost",
        f"Content-Type: {kind}",
        f"Content-Length: {length}",
        "Connection: close",
    ]
    if chance.random() < 0.02:
        lines.insert(2, chance.choice(("X: " + "y" * 100_000, "no colon", "Content-Length: 7")))
    return "\r\n".join(lines).encode("utf-8") + b"\r\n\r\n" + body


@dataclass
class Outcome:
    """The results.

    Attributes:
        statuses: how often each occurred; 0: the connection was closed without an answer.
        faults: requests that failed, and how.
        good: how many valid requests were answered in between.
    """

    statuses: Counter[int] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    good: int = 0


def fuzz(host: str, port: int, requests: int, *, seed: int = 0, clients: int = 4) -> Outcome:
    """Send this many requests, several at a time."""
    outcome, lock = Outcome(), threading.Lock()

    def work(client: int) -> None:
        for number in range(client, requests, clients):
            chance = random.Random(seed * 1_000_003 + number)
            data = make_request(chance)
            leaves = chance.random() < 0.03
            status, told = _send(host, port, data, leaves=leaves)
            fault = None
            if status >= 500 or b'"type":"server_error"' in told:
                fault = f"number {number}: {status}: {told[-300:]!r} to {data[:300]!r}"
            with lock:
                outcome.statuses[status] += 1
                if fault:
                    outcome.faults.append(fault)
            if number % _GOOD_EVERY == 0:
                _ask_good(host, port, outcome, lock)

    threads = [threading.Thread(target=work, args=(client,)) for client in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    _ask_good(host, port, outcome, lock)
    return outcome


def _ask_good(host: str, port: int, outcome: Outcome, lock: threading.Lock) -> None:
    body = json.dumps(GOOD).encode()
    head = "PUT /api HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    status, told = _send(host, port, head.encode() + body, leaves=False)
    with lock:
        if status == 200 and b'"text":["Hello' in told:
            outcome.good += 1
        else:
            outcome.faults.append(f"a good request: {status}: {told[-300:]!r}")


def _send(host: str, port: int, data: bytes, *, leaves: bool) -> tuple[int, bytes]:
    """Return status and answer; (0, b"") if the server closed, or the client left early."""
    answer = b""
    try:
        with socket.create_connection((host, port), timeout=_TIMEOUT) as connection:
            connection.sendall(data)
            if leaves:
                return 0, b""
            while part := connection.recv(1 << 16):
                answer += part
    except TimeoutError:
        return 599, b"no answer in time"
    except OSError:  # closed while we were still sending, which is allowed
        pass
    words = answer.split(b" ", 2)
    return (int(words[1]), answer) if len(words) == 3 else (0, b"")


def main(argv: Sequence[str] | None = None) -> int:
    """Fuzz a running server, and return 1 if something went wrong."""
    parser = argparse.ArgumentParser(description="Send a server what nobody would send.")
    parser.add_argument("server", metavar="HOST:PORT")
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--clients", type=int, default=4)
    options = parser.parse_args(argv)
    host, _, port = options.server.rpartition(":")
    outcome = fuzz(host, int(port), options.requests, seed=options.seed, clients=options.clients)
    counts = ", ".join(f"{status}: {count}" for status, count in sorted(outcome.statuses.items()))
    print(f"{outcome.statuses.total()} requests ({counts}); {outcome.good} valid ones in between")
    print("\n".join(outcome.faults[:20]) or "no fault")
    return 1 if outcome.faults else 0


if __name__ == "__main__":
    sys.exit(main())
