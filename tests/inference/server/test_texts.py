"""Hostile texts, templates and tokenizers: each is refused, and no other client has to wait."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.config.data import TokenizerConfig
from megatron.config.generation import ServerConfig
from megatron.errors import ConfigError, DataError
from megatron.inference.messages import pack
from megatron.inference.server import texts
from megatron.inference.server.endpoint import ApiError
from megatron.inference.server.settings import FrontSettings, ServerLimits
from megatron.inference.server.texts import Job, Result, Setup, Texts
from megatron.tokenizer import build_tokenizer
from megatron.tokenizer.chat_template import ChatTemplate
from tests.inference.server.fake_engine import FakeEngine
from tests.inference.server.live import Live, make_settings, running

LIMITS = ServerLimits(text_seconds=2.0, text_memory=1 << 29, long_texts_per_client=2)
GOOD = {"prompt": "Hello", "max_tokens": 1}
CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}

HOSTILE_TEMPLATES = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}"
    "{% for c in range(99999) %}{% endfor %}{% endfor %}{% endfor %}",
    "a large constant": '{{ ("a" * 3000000000) | length }}',
    "a large output": "{% for a in range(99999) %}{{ 'a' * 99999 }}{% endfor %}",
    "a large number": "{{ (9 ** (9 ** 9)) % 7 }}",
    "a large list": "{{ ([0] * 900000000) | length }}",
    "recursion": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "padding": "{{ '%999999999d' % 1 }}{{ 'a'.center(9999999999) }}",
}
# Matching `(a+)+$` takes time that doubles with each letter.
SLOW_PATTERN = "(a+)+$"
EVIL_TEXT = "a" * 40 + "b"


def _settings(folder: Path, engine: FakeEngine, **changes: Any) -> FrontSettings:
    return make_settings(folder, engine, **{"limits": LIMITS, **changes})


@contextmanager
def _health_answers(live: Live) -> Iterator[list[float]]:
    """Check the health endpoint during the block; yield the times of its answers."""
    over, times = threading.Event(), list[float]()

    def ask() -> None:
        while not over.is_set():
            assert live.client.get("/health").status_code == 200
            times.append(time.monotonic())
            time.sleep(0.01)

    with ThreadPoolExecutor(1) as thread:
        asking = thread.submit(ask)
        try:
            yield times
        finally:
            over.set()
        asking.result()
    assert times


@pytest.mark.parametrize("name", HOSTILE_TEMPLATES)
def test_a_template_stops_nothing(name: str, tokenizer_folder: Path) -> None:
    engine = FakeEngine()
    settings = _settings(tokenizer_folder, engine, chat_template=HOSTILE_TEMPLATES[name])
    with running(engine, settings) as live:
        with _health_answers(live) as times:
            answer = live.post("/v1/chat/completions", CHAT)
            end = time.monotonic()
            assert live.post("/v1/completions", GOOD).status_code == 200
        if "it takes too long" in answer.text:  # for two seconds, in which nobody waits
            assert len([each for each in times if each < end]) >= 5
        assert answer.status_code in (400, 422), answer.text
        if answer.status_code == 400:
            assert "the model's chat template refuses the messages: " in answer.text
        assert live.post("/v1/chat/completions", CHAT).status_code == answer.status_code


@pytest.mark.parametrize("name", HOSTILE_TEMPLATES)
def test_no_constant_is_computed_when_a_template_is_read(name: str) -> None:
    ChatTemplate("imports", {})
    started = time.thread_time()
    ChatTemplate(HOSTILE_TEMPLATES[name], {})
    assert time.thread_time() - started < 0.5


@pytest.mark.parametrize(
    "source", ["{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "{% if x %}" * 300]
)
def test_a_template_that_python_cannot_compile_is_refused_at_start(source: str) -> None:
    with pytest.raises(ConfigError, match="--chat-template"):
        ChatTemplate(source, {})


def _replace(pattern: str, content: str, kind: str = "String") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


HOSTILE_DECODERS = {
    "a slow pattern": _replace(SLOW_PATTERN, "", "Regex"),
    "a slow pattern in a sequence": {
        "type": "Sequence",
        "decoders": [{"type": "Fuse"}, {"type": "Sequence", "decoders": [_replace("a", "")]}]
        + [_replace("a*", "b", "Regex")],
    },
    "doubling": {"type": "Sequence", "decoders": [_replace("a", "aa")] * 40},
    "a large replacement": _replace("a", "a" * 1_000_000),
    "a large search": {"type": "Sequence", "decoders": [_replace("a" * 500_000 + "b", "")]},
    "many parts": {"type": "Sequence", "decoders": [{"type": "Fuse"}] * 100_000},
}


@pytest.mark.parametrize("name", HOSTILE_DECODERS)
def test_a_decoder_without_a_bound_is_refused(
    name: str, tmp_path: Path, tokenizer_folder: Path
) -> None:
    settings = _with_parts(tmp_path, tokenizer_folder, decoder=HOSTILE_DECODERS[name])
    with pytest.raises((ConfigError, DataError), match="--tokenizer-model"):
        Texts(settings, build_tokenizer(settings.tokenizer), 256)


def _random_decoder(chance: random.Random, depth: int = 0) -> dict[str, Any]:
    if depth < 3 and chance.random() < 0.5:
        parts = [_random_decoder(chance, depth + 1) for _ in range(chance.choice((0, 1, 3, 20)))]
        return {"type": "Sequence", "decoders": parts}
    sizes, letters = (0, 1, 2, 50, 5000), ("a", "b", "ab", " ")
    pattern, content = (chance.choice(letters) * chance.choice(sizes) for _ in range(2))
    strip = {"type": "Strip", "content": "a", "start": 10**9, "stop": chance.choice((0, 10**9))}
    ctc = {"type": "CTC", "pad_token": "a", "word_delimiter_token": "b", "cleanup": True}
    others: list[dict[str, Any]] = [
        *({"type": "Fuse"}, {"type": "ByteFallback"}, strip, ctc),
        {"type": "WordPiece", "prefix": pattern, "cleanup": True},
        {"type": "BPEDecoder", "suffix": pattern},
        {"type": "Metaspace", "replacement": "a", "prepend_scheme": "always", "split": True},
    ]
    return chance.choice([*others, *[_replace(pattern or "a", content)] * 10])


@pytest.mark.parametrize("seed", range(10))
def test_decoders_that_are_served_are_fast(
    seed: int, tmp_path: Path, tokenizer_folder: Path
) -> None:
    chance, served = random.Random(seed), 0
    for number in range(100):
        decoder = _random_decoder(chance)
        settings = _with_parts(tmp_path, tokenizer_folder, decoder=decoder)
        tokenizer = build_tokenizer(settings.tokenizer)
        try:
            Texts(settings, tokenizer, 256)
        except ConfigError:
            continue
        served += 1
        longest = tokenizer.vocab[max(tokenizer.vocab, key=len)]
        few = [tokenizer.vocab["a"], tokenizer.vocab["b"], longest]
        ids, text = chance.choices(few, k=13), ""  # as many as decoding a new token uses
        started = time.thread_time()
        with contextlib.suppress(DataError):  # some components panic
            text = tokenizer.detokenize(ids)
        # A panic prints a backtrace, which alone takes a tenth of a second in some environments.
        assert time.thread_time() - started < 1, f"number {number}: {decoder}"
        assert len(text.encode()) <= 13 << 16
    assert 10 < served < 100


def test_a_very_long_entry_is_refused(tmp_path: Path, tokenizer_folder: Path) -> None:
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [{"id": 400, "content": "a" * 200_000, "special": True, **special}]
    settings = _with_parts(tmp_path, tokenizer_folder, added_tokens=added)
    with pytest.raises(ConfigError, match="--tokenizer-model"):
        Texts(settings, build_tokenizer(settings.tokenizer), 256)


def test_the_decoders_of_real_tokenizers_are_served(tmp_path: Path, tokenizer_folder: Path) -> None:
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    others = [{"type": "ByteFallback"}, {"type": "Fuse"}, strip]
    llama = {"type": "Sequence", "decoders": [_replace("\u2581", " "), *others]}
    changes: tuple[dict[str, Any], ...] = ({"decoder": llama}, {"decoder": None}, {})
    for parts in changes:
        settings = _with_parts(tmp_path, tokenizer_folder, **parts)
        Texts(settings, build_tokenizer(settings.tokenizer), 256)


def _with_parts(folder: Path, tokenizer_folder: Path, **parts: Any) -> FrontSettings:
    """Return settings of a server whose tokenizer.json has these components."""
    value = json.loads((tokenizer_folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps({**value, **parts}))
    return _settings(folder, FakeEngine())


def write_slow_tokenizer(folder: Path, tokenizer_folder: Path, pattern: str = SLOW_PATTERN) -> Path:
    """Write a tokenizer that fails on `EVIL_TEXT` after a while, holding the GIL meanwhile."""
    value = json.loads((tokenizer_folder / "tokenizer.json").read_text())
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
    both = [{**split, "invert": False}, {**byte_level, "trim_offsets": True}]
    value["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": both}
    (folder / "tokenizer.json").write_text(json.dumps(value))
    return folder


def test_a_tokenizers_panic_is_a_refusal(
    tmp_path: Path, tokenizer_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_slow_tokenizer(tmp_path, tokenizer_folder)
    engine = FakeEngine()
    with running(engine, _settings(folder, engine, chat_template=None)) as live:
        with _health_answers(live):
            for body in (
                {**GOOD, "prompt": EVIL_TEXT},
                {**GOOD, "prompt": [GOOD["prompt"], EVIL_TEXT]},
            ):
                answer = live.post("/v1/completions", body)
                assert answer.status_code == 400
                assert "the tokenizer refuses the text: " in answer.text
                assert str(folder) not in answer.text
        assert live.put({"prompts": [EVIL_TEXT], "tokens_to_generate": 1}).status_code == 400
        assert live.post("/v1/completions", GOOD).status_code == 200
    assert f"PanicException in {folder}" in caplog.text
    assert EVIL_TEXT not in caplog.text


def test_a_tokenizer_that_takes_too_long_is_ended(tmp_path: Path, tokenizer_folder: Path) -> None:
    folder = write_slow_tokenizer(tmp_path, tokenizer_folder)
    engine = FakeEngine(max_length=10_000)
    settings = _settings(folder, engine, limits=ServerLimits(text_seconds=0.05))
    with running(engine, settings) as live:
        with _health_answers(live):
            answer = live.post("/v1/completions", {**GOOD, "prompt": EVIL_TEXT * 100})
        assert answer.status_code == 400
        assert "it takes too long" in answer.text


def test_a_process_is_timed_while_it_works_and_not_while_it_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    timers: list[float] = []
    times: list[tuple[str, float]] = []

    def during(what: str, value: Any) -> Any:
        times.append((what, timers[-1]))
        return value

    setup = pack(Setup, Setup(LIMITS, 0))
    job = pack(Job, Job(("a text",)))
    messages = iter([setup, job, job, b""])
    alarm = SimpleNamespace(ITIMER_REAL=0, setitimer=lambda _, seconds: timers.append(seconds))
    monkeypatch.setattr(texts, "signal", alarm)
    monkeypatch.setattr(texts, "sys", SimpleNamespace(stdin=SimpleNamespace(fileno=lambda: 0)))
    reads = SimpleNamespace(read=lambda *_: during("read", next(messages)))
    monkeypatch.setattr(texts, "os", reads)
    monkeypatch.setattr(texts, "_write_result", lambda result: None)
    monkeypatch.setattr(
        texts, "_prepare", lambda _: during("prepare", lambda job: during("work", Result()))
    )
    assert texts.main() == 0
    start, limit = texts._START_SECONDS, LIMITS.text_seconds
    work = [("read", 0), ("work", limit)]
    assert times == [("read", start), ("prepare", start), *work, *work, ("read", 0)]


def test_a_panic_is_an_error_of_the_tokenizer(tmp_path: Path, tokenizer_folder: Path) -> None:
    folder = write_slow_tokenizer(tmp_path, tokenizer_folder)
    config = TokenizerConfig(
        tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(folder / "tokenizer.json")
    )
    tokenizer = build_tokenizer(config)
    with pytest.raises(DataError, match="retry-limit"):
        tokenizer.tokenize(EVIL_TEXT)
    with pytest.raises(DataError, match="retry-limit"):
        tokenizer.tokenize_sentences([EVIL_TEXT])


def test_what_cannot_fit_is_refused_by_its_bytes(live: Live) -> None:
    text = "x" * 1_000_000
    answer = live.post("/v1/completions", {**GOOD, "prompt": text})
    assert answer.status_code == 422
    assert "bytes does not fit in the model's 256 tokens" in answer.text
    answer = live.put({"prompts": ["x", text], "tokens_to_generate": 1})
    assert answer.status_code == 422
    assert answer.json() == "Length of prompt + tokens_to_generate longer than allowed"
    chat = {"messages": [{"role": "user", "content": text}]}
    assert live.post("/v1/chat/completions", chat).status_code == 422


def test_long_texts_are_bounded_per_client(tokenizer_folder: Path) -> None:
    engine = FakeEngine(max_length=200_000)
    server = ServerConfig(max_tokens_to_oom=10_000_000)
    body = {**GOOD, "prompt": "x yz " * 100_000}
    with running(engine, _settings(tokenizer_folder, engine, server=server)) as live:

        def ask(_: int) -> int:
            return live.post("/v1/completions", body).status_code

        with _health_answers(live), ThreadPoolExecutor(12) as clients:
            asked = clients.map(ask, range(12))
            assert live.post("/v1/completions", GOOD).status_code == 200
        statuses = list(asked)
        assert 429 in statuses
        assert set(statuses) <= {400, 422, 429}
        assert live.post("/v1/completions", GOOD).status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": [1] * 400_000},
        {"prompt": [[1]] * 200_000},
        {"prompt": [[1] * 400_000]},
        {"prompt": [None] * 100_000},
        {"messages": [{}] * 200_000},
        {"messages": [{"role": "", "content": ""}] * 20_000},
        {"messages": [{"role": "", "content": [{}] * 200_000}]},
    ],
)
def test_many_mistakes_cost_no_more_than_one(live: Live, body: dict[str, Any]) -> None:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    data = json.dumps(body, separators=(",", ":")).encode()
    live.client.get("/health")
    started = time.process_time()
    answer = live.client.post(path, content=data, headers={"Content-Type": "application/json"})
    assert answer.status_code in (400, 422)
    assert len(answer.content) < 1000
    assert time.process_time() - started < 0.5


def test_a_job_is_long_from_4096_characters_in_all_texts_and_messages() -> None:
    assert Job(("a" * 4000, "b" * 96)).is_long
    assert not Job(("a" * 4000, "b" * 95)).is_long
    messages = ({"role": "user", "content": "c" * 90}, {"role": "x"})
    assert Job(("a" * 4001,), messages=messages).is_long
    assert not Job(("a" * 4000,), messages=messages).is_long


def test_long_texts_that_wait_are_counted_by_client_and_together() -> None:
    limits = ServerLimits(long_texts=3, long_texts_per_client=2)

    async def results() -> list[int]:
        process = texts.TextProcess(Setup(limits, 0))
        ends = asyncio.Event()

        async def wait(job: Job) -> Result:
            await ends.wait()
            return Result()

        async def ask(client: str, length: int) -> int:
            texts.client_address.set(client)
            try:
                await process.run(Job(("a" * length,)))
            except ApiError as error:
                return error.status
            return 200

        process._run_next = wait  # type: ignore[method-assign]
        for _ in range(2):  # no slot stays taken
            ends.clear()
            clients = ["a", "a", "a", "b", "b", "c"]
            asked = [asyncio.create_task(ask(client, 10_000)) for client in clients]
            asked += [asyncio.create_task(ask("a", 10))]
            await asyncio.sleep(0)
            ends.set()
            found = await asyncio.gather(*asked)
            assert not process._long_jobs
        return found

    assert asyncio.run(results()) == [200, 200, 429, 200, 429, 429, 200]


def test_a_process_limits_itself_and_the_text_of_a_conversation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[Any] = []
    memory = SimpleNamespace(
        RLIMIT_AS=9, getpagesize=lambda: 4096, setrlimit=lambda *limit: told.append(limit)
    )
    pages = SimpleNamespace(read_text=lambda encoding: "7 3 2 1")
    handlers = SimpleNamespace(SIGINT=2, SIG_IGN=1, signal=lambda *handler: told.append(handler))
    monkeypatch.setattr(texts, "resource", memory)
    monkeypatch.setattr(texts, "Path", lambda path: pages)
    monkeypatch.setattr(texts, "signal", handlers)
    monkeypatch.setattr(texts, "os", SimpleNamespace(nice=told.append))
    template = "{{ messages[0]['content'] }}"
    run_job = texts._prepare(Setup(LIMITS, 3, template=template, special={}, max_bytes=5))
    most = 7 * 4096 + LIMITS.text_memory
    assert told == [3, (2, 1), (9, (most, most))]
    for text, shown in (("abcd", "abcd"), ("abcde", "abcde"), ("abcdefgh", "abcdef")):
        job = Job(messages=({"role": "user", "content": text},))
        assert run_job(job) == Result(text=shown)


def test_as_many_bytes_are_taken_as_tokens_may_have(tokenizer_folder: Path) -> None:
    settings = _settings(tokenizer_folder, FakeEngine())
    tokenizer = build_tokenizer(settings.tokenizer)
    longest = max(len(entry.encode()) for entry in tokenizer.vocab)
    assert Texts(settings, tokenizer, 256)._max_bytes == 256 * (longest + 1)
