"""A local stand-in for the Perspective API, whose answers a test scripts."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

KEY = "a-key"


@dataclass(frozen=True)
class Answer:
    """The stand-in's answer to one request."""

    status: int = 200
    body: bytes | None = None  # None: the scores
    headers: tuple[tuple[str, str], ...] = ()


@dataclass
class StandIn:
    """The stand-in's address, what it was sent, and the first answers that it gives, in order."""

    url: str = ""
    answers: list[Answer] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def texts(self) -> list[str]:
        return [body["comment"]["text"] for body in self.bodies]


def error_body(message: str, **details: str) -> bytes:
    """Return an error in the format of Google's APIs."""
    error = {"code": 400, "message": message, "details": [details] if details else []}
    return json.dumps({"error": error}).encode()


def toxicity_of(text: str) -> float:
    """Return the number in a text such as `rude 0.9`, or 0.1 if there is none."""
    return float(text.rsplit(maxsplit=1)[-1]) if text.startswith("rude") else 0.1


def scores_body(body: dict[str, Any]) -> bytes:
    value = toxicity_of(body["comment"]["text"])
    score = {"summaryScore": {"value": value, "type": "PROBABILITY"}}
    scores = dict.fromkeys(body["requestedAttributes"], score)
    return json.dumps({"attributeScores": scores, "languages": ["en"]}).encode()


@contextmanager
def perspective() -> Iterator[StandIn]:
    """Run a stand-in."""
    found = StandIn()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with found.lock:
                found.times.append(time.monotonic())
                found.bodies.append(body)
                answer = found.answers.pop(0) if found.answers else Answer()
            if self.headers.get("X-Goog-Api-Key") != KEY:
                answer = Answer(400, error_body("API key not valid."))
            if answer.status == 0:  # the connection breaks
                self.close_connection = True
                return
            data = scores_body(body) if answer.body is None else answer.body
            self.send_response(answer.status)
            for name, value in (*answer.headers, ("Content-Length", str(len(data)))):
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found.url = f"http://127.0.0.1:{server.server_port}/v1alpha1/comments:analyze"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield found
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
