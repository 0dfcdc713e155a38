"""Rows 31 to 33: the text generation server with bad requests, bad clients and strangers."""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from megatron.config.generation import ServerConfig
from megatron.inference.server.settings import ServerLimits
from tests.inference.server.fake_engine import FakeEngine
from tests.inference.server.fuzz import GOOD, fuzz
from tests.inference.server.live import Live, make_settings, running, write_tokenizer
from tests.inference.server.processes import TOOL, server_process, write_checkpoint
from tests.reliability.scoreboard.commands import run_words
from tests.reliability.scoreboard.score import Trials, expect

_FUZZED = 100  # requests of a trial
_GOOD = 100  # requests whose time is measured
_CROWD = 50  # clients that send slowly
_SLOW = b"POST /api HTTP/1.1\r\nHost: localhost\r\nContent-Ty"
_LARGE = 2 << 20  # bytes of a body


def fuzzed_requests(folder: Path, count: int) -> Trials:
    """Try row 31: a hundred requests at a time, to two ranks that keep running."""
    write_tokenizer(folder)
    trials = Trials()
    words = ["torchrun", "--standalone", "--nproc-per-node", "2", TOOL]
    words += ["--load", write_checkpoint(folder, folder), "--tensor-model-parallel-size", "2"]
    with server_process(words, folder) as (_, url):
        port = int(url.rpartition(":")[2])
        for seed in range(count):
            with trials.trial(f"seed {seed}"):
                outcome = fuzz("127.0.0.1", port, _FUZZED, seed=seed)
                expect(not outcome.faults, "; ".join(outcome.faults[:3]))
                trials.note("requests", outcome.statuses.total())
                trials.note("answered 200", outcome.statuses[200])
                trials.note("good ones in between", outcome.good)
    return trials


def crowded_server(folder: Path, count: int) -> Trials:
    """Try row 32: slow clients, large bodies and clients that leave do not disturb the others."""
    write_tokenizer(folder)
    trials = Trials()
    limits, server = ServerLimits(read_seconds=2.0), ServerConfig(max_queued_requests=256)
    engine = FakeEngine(places=64, seconds=0.001)
    with running(engine, make_settings(folder, engine, limits=limits, server=server)) as live:
        _times_of_good(live)  # warm
        baseline = max(0.05, _p99(_times_of_good(live)))
        for number in range(count):
            with trials.trial(f"crowd {number}"):
                crowd = [_connect(live, _SLOW) for _ in range(_CROWD)]
                with ThreadPoolExecutor(4) as others:
                    large = [others.submit(_send_large, live) for _ in range(4)]
                    times = _times_of_good(live)
                    answers = [each.result() for each in large]
                expect(set(answers) == {413}, f"large bodies: {answers}")
                expect(_p99(times) <= 2 * baseline, f"{_p99(times):.3f} s, {baseline:.3f} before")
                ends = [connection.recv(100)[9:12] for connection in crowd]
                expect(set(ends) == {b"408"}, f"slow clients: {set(ends)}")
                _leave(live)
        with trials.trial("200 at a time"):
            with ThreadPoolExecutor(200) as clients:
                statuses = list(clients.map(lambda _: _ask(live), range(400)))
            expect(set(statuses) <= {200, 429}, f"statuses {set(statuses)}")
            trials.note("of 400 requests of 200 clients answered", statuses.count(200))
    return trials


def _connect(live: Live, data: bytes) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", live.port), timeout=30)
    connection.sendall(data)
    return connection


def _ask(live: Live) -> int:
    return live.put(GOOD).status_code


def _times_of_good(live: Live) -> list[float]:
    times = []
    for _ in range(_GOOD):
        start = time.perf_counter()
        expect(_ask(live) == 200, "a good request fails")
        times.append(time.perf_counter() - start)
    return times


def _p99(times: list[float]) -> float:
    return sorted(times)[int(0.99 * len(times)) - 1]


def _send_large(live: Live) -> int:
    return live.put({"prompts": ["x" * _LARGE]}).status_code


def _leave(live: Live) -> None:
    """Check that a client that leaves during a long answer frees its slot within a second."""
    body = json.dumps({"prompt": "x", "max_tokens": 250, "stream": True}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    connection = _connect(live, f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    connection.recv(100)
    connection.close()
    end = time.monotonic() + 1.0
    while live.engine.has_work:
        expect(time.monotonic() < end, "a place is not free after 1 s")
        time.sleep(0.005)


def guarded_server(folder: Path, count: int) -> Trials:
    """Try row 33: by default only this machine connects; others need the token."""
    write_tokenizer(folder)
    trials = Trials()
    checks = (_listens_here_alone, _refuses_other_addresses, _asks_for_the_token)
    for check in checks[:count]:
        with trials.trial(check.__name__.strip("_")):
            check(folder)
    return trials


def _listens_here_alone(folder: Path) -> None:
    words = [sys.executable, TOOL, "--load", write_checkpoint(folder, folder)]
    with server_process(words, folder) as (_, url):
        port = int(url.rpartition(":")[2])
        expect(url == f"http://127.0.0.1:{port}", f"listens on {url}")
        own = {entry[4][0] for entry in socket.getaddrinfo(socket.gethostname(), None)}
        for address in own - {"127.0.0.1", "127.0.1.1", "::1"}:
            with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
                expect(probe.connect_ex((address, port)) != 0, f"is reached at {address}")


def _refuses_other_addresses(folder: Path) -> None:
    checkpoint = write_checkpoint(folder / "other", folder)
    for host in ("0.0.0.0", "::", "192.0.2.1"):
        ended = run_words(folder / "output", _tool(), "--load", checkpoint, "--host", host)
        expect(ended.code == 9, f"{host}: code {ended.code}")
        expect("give --auth-token-file" in ended.output, ended.output[-300:])


def _tool() -> Callable[..., int]:
    from megatron.inference.server.run import main

    return main


def _asks_for_the_token(folder: Path) -> None:
    engine, token = FakeEngine(), "0123456789abcdef0123"
    settings = replace(make_settings(folder, engine), token=token)
    paths = ("/api", "/v1/completions", "/v1/chat/completions", "/v1/models", "/metrics", "/x")
    with running(engine, settings) as live:
        for path in paths:
            for given in ("", f"Bearer {token[:-1]}", f"Bearer {token}0", f"Basic {token}"):
                answer = live.client.post(path, json=GOOD, headers={"Authorization": given})
                expect(answer.status_code == 401, f"{path} with {given!r}: {answer.status_code}")
        expect(not engine.seen, "the engine was asked without the token")
        headers = {"Authorization": f"Bearer {token}"}
        expect(live.put(GOOD, headers=headers).status_code == 200, "the token does not open")
