#!/usr/bin/env python3
"""Send requests from many clients to a text generation server and report how long they waited.

python tools/benchmark_server.py localhost:5000 --clients 200 --requests 400
python tools/benchmark_server.py localhost:5000 --clients 1 --requests 100 --tokens 1 --hostile 4
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

if __package__ in (None, ""):
    # When this file is run as a script, the package next to its folder may not be installed.
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.command import tool_main
from megatron.config.arguments import ToolParser, minimum_problems
from megatron.errors import ConfigError, UserError

_HOSTILE_CLIENT = """
import http.client, json
data = json.dumps({{"prompt": "word " * 200_000, "max_tokens": 1}})
while True:
    connection = http.client.HTTPConnection("{host}", {port})
    connection.request("POST", "/v1/completions", data, {{"Content-Type": "application/json"}})
    connection.getresponse().read()
    connection.close()
"""
_WORDS = "the of import self return for in class def if not value name data list is and to".split()


def run(options: argparse.Namespace) -> int:
    """Measure once, print the results, and return 1 if a request failed.

    Raises:
        UserError: The address is not HOST:PORT, or a number is too small.
    """
    minimums = {"clients": 1, "requests": 1, "tokens": 1, "prompt_words": 1, "hostile": 0}
    if problems := minimum_problems(options, **minimums):
        raise ConfigError(problems)
    host, _, port = options.server.rpartition(":")
    if not host or not port.isdigit():
        raise UserError(f"{options.server}: give HOST:PORT, for example localhost:5000")
    load = Load(host, int(port), options.tokens, options.prompt_words, random.Random(options.seed))
    with hostile_clients(host, int(port), options.hostile):
        seconds = asyncio.run(load.run(options.clients, options.requests))
    print(report(load.answers, load.failures, seconds, options.clients))
    return 1 if load.failures else 0


@contextmanager
def hostile_clients(host: str, port: int, count: int) -> Iterator[None]:
    """Send prompts of almost 1 MB, which the server rejects, until the block ends.

    Args:
        host: Name or address of the server.
        port: Port of the server.
        count: Number of clients, each in its own process to avoid slowing the measured clients.
    """
    code = _HOSTILE_CLIENT.format(host=host, port=port)
    command, silent = [sys.executable, "-c", code], subprocess.DEVNULL
    clients = [subprocess.Popen(command, stderr=silent) for _ in range(count)]
    try:
        if clients:
            time.sleep(1.0)
        yield
    finally:
        for client in clients:
            client.kill()
            client.wait()


@dataclass(frozen=True)
class Answer:
    """The latency of one request and the length of its answer.

    Attributes:
        first: Seconds from sending the request to the first text.
        whole: Seconds from sending the request to the end of the answer.
        tokens: Number of tokens in the answer.
    """

    first: float
    whole: float
    tokens: int


@dataclass
class Load:
    """A load generator whose clients send their next request when the previous one is answered.

    Attributes:
        host: Name or address of the server.
        port: Port of the server.
        tokens: Maximum number of new tokens in an answer.
        prompt_words: Average number of words in a prompt.
        random: Source of the prompts.
        answers: The answers so far.
        failures: Number of failed requests by reason.
    """

    host: str
    port: int
    tokens: int
    prompt_words: int
    random: random.Random
    answers: list[Answer] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)

    async def run(self, clients: int, requests: int) -> float:
        """Send the requests and return the seconds from the first request to the last answer."""
        prompts = iter([self._prompt() for _ in range(requests)])
        start = time.perf_counter()
        await asyncio.gather(*(self._client(prompts) for _ in range(min(clients, requests))))
        return time.perf_counter() - start

    def _prompt(self) -> str:
        # Prompts differ in length and beginning, like those of different people.
        count = self.random.randint(1, 2 * self.prompt_words - 1)
        return " ".join(self.random.choices(_WORDS, k=count))

    async def _client(self, prompts: Iterator[str]) -> None:
        for prompt in prompts:
            try:
                self.answers.append(await self._ask(prompt))
            except (OSError, ValueError, asyncio.IncompleteReadError) as error:
                self.failures[str(error) or type(error).__name__] += 1

    async def _ask(self, prompt: str) -> Answer:
        body = {"prompt": prompt, "max_tokens": self.tokens, "stream": True}
        options = {"stream_options": {"include_usage": True}}
        data = json.dumps({**body, **options}).encode()
        start = time.perf_counter()
        reader, writer = await asyncio.open_connection(self.host, self.port)
        try:
            head = f"POST /v1/completions HTTP/1.1\r\nHost: {self.host}:{self.port}\r\n"
            head += "Content-Type: application/json\r\nConnection: close\r\n"
            writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
            status = (await reader.readuntil(b"\r\n\r\n")).split(b" ", 2)[1].decode()
            if status != "200":
                raise ValueError(f"status {status}")
            return await _read(reader, start)
        finally:
            writer.close()


async def _read(reader: asyncio.StreamReader, start: float) -> Answer:
    first, tokens = 0.0, 0
    async for line in reader:
        if not line.startswith(b"data: {"):
            if line.startswith(b"data: [DONE]"):
                whole = time.perf_counter() - start
                return Answer(first or whole, whole, tokens)
            continue
        value = json.loads(line.removeprefix(b"data: "))
        if "error" in value:
            raise ValueError(value["error"]["message"])
        if value["choices"] and not first:
            first = time.perf_counter() - start
        if value.get("usage"):
            tokens = value["usage"]["completion_tokens"]
    raise ValueError("an answer is incomplete")


def report(answers: Sequence[Answer], failures: Counter[str], seconds: float, clients: int) -> str:
    """Return the results as text."""
    lines = [f"{len(answers) + failures.total()} requests, {clients} at a time, {seconds:.1f} s"]
    if answers:
        tokens = sum(answer.tokens for answer in answers)
        lines += [
            f"answers        {len(answers) / seconds:9.1f} /s",
            f"new tokens     {tokens / seconds:9.1f} /s",
            _line("first text", [answer.first for answer in answers]),
            _line("whole answer", [answer.whole for answer in answers]),
        ]
    lines.append(f"failures       {failures.total():9d}")
    lines += [f"  {count} x {reason}" for reason, count in failures.most_common()]
    return "\n".join(lines)


def _line(name: str, seconds: Sequence[float]) -> str:
    ranked = sorted(seconds)
    median, p99 = (ranked[math.ceil(share * len(ranked)) - 1] for share in (0.5, 0.99))
    return f"{name.ljust(14)} {median:9.3f} s p50 {p99:9.3f} s p99 {ranked[-1]:9.3f} s longest"


def _parser() -> ToolParser:
    parser = ToolParser(
        "benchmark_server.py",
        "Send many requests to a text generation server and report how long clients waited.",
        shows_defaults=True,
    )
    parser.add_argument("server", metavar="HOST:PORT", help="for example localhost:5000")
    parser.add_argument("--clients", type=int, default=200, help="number of concurrent requests")
    parser.add_argument("--requests", type=int, default=400, help="total number of requests")
    parser.add_argument("--tokens", type=int, default=32, help="maximum new tokens per answer")
    parser.add_argument(
        "--prompt-words", type=int, default=16, help="average number of words in a prompt"
    )
    parser.add_argument(
        "--hostile",
        type=int,
        default=0,
        help="number of additional clients that send prompts of 1 MB, which are refused",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the prompts")
    return parser


main = tool_main(_parser, run)

if __name__ == "__main__":
    sys.exit(main())
