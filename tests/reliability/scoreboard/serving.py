"""Rows 31 to 33 and 40: the server with bad requests, clients, strangers and hostile texts."""

from __future__ import annotations

import json
import random
import socket
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron.config.generation import ServerConfig
from megatron.inference.server.settings import ServerLimits
from tests.inference.server.fake_engine import FakeEngine
from tests.inference.server.fuzz import GOOD, fuzz
from tests.inference.server.live import Live, make_settings, running, write_tokenizer
from tests.inference.server.processes import TOOL, server_process, write_checkpoint
from tests.inference.server.smuggling import smuggle
from tests.inference.server.strangers import try_to_enter
from tests.inference.server.test_texts import HOSTILE_TEMPLATES, write_slow_tokenizer
from tests.reliability.scoreboard.commands import run_tool
from tests.reliability.scoreboard.score import Trials, expect

_FUZZED = 100  # requests per trial
_SMUGGLED = 20  # of these, requests with two lengths
_GOOD = 100  # requests whose time is measured
_CROWD = 50  # clients that send slowly
_SLOW = b"POST /api HTTP/1.1\r\nHost: localhost\r\nContent-Ty"
_LARGE = 2 << 20  # bytes of a body
_STRANGERS = 100  # requests per seed without the token
_HOSTILE = 50  # requests per seed with a template
_TEMPLATE_PARTS = (
    "{% for message in messages %}{{ message.content }}{% endfor %}",
    *HOSTILE_TEMPLATES.values(),
    "{{ messages * 99999 }}",
    "{% for m in messages %}{% for n in messages %}{{ m.content + n.content }}{% endfor %}"
    "{% endfor %}",
    "{{ raise_exception('no') }}",
)
_HOSTILE_TEXTS = (
    "a",
    "word ",
    " ",
    "\n",
    "\x00",
    "\u0301",
    "\U0001f469\u200d",
    "<|user|>",
    "{{ 1 }}",
    "a" * 40 + "b",
    "aaaa ",
)
# Matching takes time that doubles with each letter, or eventually fails with a panic.
_HOSTILE_PATTERNS = ("(a+)+$", "(a|a)*$", "(a*)*c", "([a-z]+)*[0-9]", "(a|aa)+$", "(.*a){12}$")


def fuzzed_requests(folder: Path, count: int) -> Trials:
    """Try row 31: a hundred requests at a time, to two ranks that keep running.

    Requests with two lengths follow.
    """
    write_tokenizer(folder)
    trials = Trials.with_seeds(count)
    args = ["torchrun", "--standalone", "--nproc-per-node", "2", TOOL]
    args += ["--load", write_checkpoint(folder, folder), "--tensor-model-parallel-size", "2"]
    with server_process(args, folder) as (_, url):
        port = int(url.rpartition(":")[2])
        for seed in range(count):
            with trials.trial(f"seed {seed}"):
                outcome = fuzz("127.0.0.1", port, _FUZZED, seed=seed)
                expect(not outcome.faults, "; ".join(outcome.faults[:3]))
                smuggled = smuggle("127.0.0.1", port, _SMUGGLED, seed=seed)
                expect(not smuggled.faults, "; ".join(smuggled.faults[:3]))
                trials.note("with two lengths, refused", smuggled.statuses.total())
                trials.note("requests", outcome.statuses.total())
                trials.note("answered 200", outcome.statuses[200])
                trials.note("valid ones in between", outcome.good)
    return trials


def crowded_server(folder: Path, count: int) -> Trials:
    """Try row 32: slow clients, large bodies and clients that leave do not disturb the others."""
    write_tokenizer(folder)
    trials = Trials()
    limits, server = ServerLimits(read_seconds=2.0), ServerConfig(max_queued_requests=256)
    engine = FakeEngine(places=64, seconds=0.001)
    with running(engine, make_settings(folder, engine, limits=limits, server=server)) as live:
        _times_of_good(live)  # warm-up
        baseline = max(0.05, _p99(_times_of_good(live)))
        for i in range(count):
            with trials.trial(f"crowd {i}"):
                crowd = [_connect(live, _SLOW) for _ in range(_CROWD)]
                with ThreadPoolExecutor(4) as pool:
                    large = [pool.submit(_send_large, live) for _ in range(4)]
                    times = _times_of_good(live)
                    answers = [future.result() for future in large]
                expect(set(answers) == {413}, f"large bodies: {answers}")
                expect(_p99(times) <= 2 * baseline, f"{_p99(times):.3f} s, {baseline:.3f} before")
                responses = [connection.recv(100)[9:12] for connection in crowd]
                expect(set(responses) == {b"408"}, f"slow clients: {set(responses)}")
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
    header = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    )
    connection = _connect(live, f"{header}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    connection.recv(100)
    connection.close()
    deadline = time.monotonic() + 1.0
    while live.engine.has_work:
        expect(time.monotonic() < deadline, "a place is not free after 1 s")
        time.sleep(0.005)


def guarded_server(folder: Path, count: int) -> Trials:
    """Try row 33: by default only this machine can connect; others need the token."""
    write_tokenizer(folder)
    checks = (_listens_here_alone, _refuses_other_addresses, _asks_for_the_token)
    spellings = max(0, count - len(checks))
    seeds = range(-(-spellings // _STRANGERS))
    trials = Trials.with_seeds(len(seeds))
    for check in checks[:count]:
        with trials.trial(check.__name__.strip("_")):
            check(folder)
    engine = FakeEngine()
    with running(engine, make_settings(folder, engine, token="0123456789abcdef0123")) as live:
        for seed in seeds:
            entered = try_to_enter("127.0.0.1", live.port, _STRANGERS, seed=seed)
            trials.tried += _STRANGERS
            trials.passed += _STRANGERS - len(entered.faults)
            trials.failures += entered.faults
            trials.note("refused with 401", entered.statuses[401])
        expect(not engine.seen, "the engine was asked without the token")
    return trials


def hostile_texts(folder: Path, count: int) -> Trials:
    """Try row 40: texts, conversations and templates that take too much do not stop others."""
    write_tokenizer(folder)
    seeds, engine = range(-(-count // _HOSTILE)), FakeEngine()
    trials = Trials.with_seeds(len(seeds))
    limits = ServerLimits(text_seconds=1.0, text_memory=1 << 29)
    for seed in seeds:
        rng = random.Random(seed)
        template = "".join(rng.choice(_TEMPLATE_PARTS) for _ in range(rng.randint(1, 3)))
        tokenizer_folder = folder / f"tokenizer{seed}"
        tokenizer_folder.mkdir()
        if rng.random() < 0.5:
            write_slow_tokenizer(tokenizer_folder, folder, rng.choice(_HOSTILE_PATTERNS))
            trials.note("tokenizers with a hostile pattern")
        else:
            write_tokenizer(tokenizer_folder)
        settings = make_settings(tokenizer_folder, engine, limits=limits, chat_template=template)
        with running(engine, settings) as live, ThreadPoolExecutor(4) as clients:
            bodies = [_hostile_body(rng) for _ in range(_HOSTILE)]
            statuses = clients.map(lambda body: _send_hostile(live, body), bodies)
            for i, status in enumerate(statuses):
                with trials.trial(f"seed {seed}, number {i}"):
                    expect(0 < status < 500, f"status {status} to {str(bodies[i])[:200]}")
                    start = time.monotonic()
                    expect(live.client.get("/health").status_code == 200, "no health")
                    expect(time.monotonic() - start < 5.0, "the health took 5 s")
                    trials.note(f"status {status}")
    return trials


def _hostile_body(rng: random.Random) -> dict[str, Any]:
    text = rng.choice(_HOSTILE_TEXTS) * rng.choice((1, 100, 10_000, 100_000))
    text = text[:900_000]
    match rng.randrange(5):
        case 0:
            return {"prompt": text}
        case 1:
            return {"prompt": [text[:4000]] * rng.choice((1, 100, 200))}
        case 2:
            return {"prompt": rng.choice(([1] * 300_000, [[1]] * 100_000, [None] * 100_000))}
        case 3:
            return {"messages": [{"role": "user", "content": text}]}
    return {"messages": [{"role": "user", "content": "x"}] * rng.choice((1, 100, 10_000))}


def _send_hostile(live: Live, body: dict[str, Any]) -> int:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    return live.post(path, {**body, "max_tokens": 1}, timeout=120).status_code


def _listens_here_alone(folder: Path) -> None:
    args = [sys.executable, TOOL, "--load", write_checkpoint(folder, folder)]
    with server_process(args, folder) as (_, url):
        port = int(url.rpartition(":")[2])
        expect(url == f"http://127.0.0.1:{port}", f"listens on {url}")
        addresses = {entry[4][0] for entry in socket.getaddrinfo(socket.gethostname(), None)}
        for address in addresses - {"127.0.0.1", "127.0.1.1", "::1"}:
            with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
                expect(probe.connect_ex((address, port)) != 0, f"is reached at {address}")


def _refuses_other_addresses(folder: Path) -> None:
    checkpoint = write_checkpoint(folder / "other", folder)
    for host in ("0.0.0.0", "::", "192.0.2.1"):
        result = run_tool(folder / "output", _tool(), "--load", checkpoint, "--host", host)
        expect(result.code == 9, f"{host}: code {result.code}")
        expect("give --auth-token-file" in result.output, result.output[-300:])


def _tool() -> Callable[..., int]:
    from megatron.inference.server.run import main

    return main


def _asks_for_the_token(folder: Path) -> None:
    engine, token = FakeEngine(), "0123456789abcdef0123"
    settings = replace(make_settings(folder, engine), token=token)
    paths = ("/api", "/v1/completions", "/v1/chat/completions", "/v1/models", "/metrics", "/x")
    with running(engine, settings) as live:
        for path in paths:
            for header in ("", f"Bearer {token[:-1]}", f"Bearer {token}0", f"Basic {token}"):
                response = live.client.post(path, json=GOOD, headers={"Authorization": header})
                expect(
                    response.status_code == 401, f"{path} with {header!r}: {response.status_code}"
                )
        expect(not engine.seen, "the engine was asked without the token")
        headers = {"Authorization": f"Bearer {token}"}
        expect(live.put(GOOD, headers=headers).status_code == 200, "the token does not open")
