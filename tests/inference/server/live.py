"""A running server in this process: the real front end in a thread, over any engine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx2 as httpx

from megatron.config.data import TokenizerConfig
from megatron.inference.messages import pack
from megatron.inference.server import front
from megatron.inference.server.run import SocketInbox
from megatron.inference.server.settings import FrontSettings
from megatron.inference.worker import serve
from tests.inference.server.fake_engine import FakeEngine

TEXTS = (
    "def main():\n    return 0\n\n\nThe naïve café: l'été à Zürich, 東京 and Москва.\n",
    "Hello, world! One two three four five six seven eight nine ten.\n\nStop: here.\n",
)
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role == 'forbidden' %}{{ raise_exception('no such role') }}{% endif %}"
    "<|{{ message.role }}|>{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@dataclass(frozen=True)
class Live:
    """A running server.

    Attributes:
        url: its address.
        engine: the engine behind it.
        client: a client for it.
    """

    url: str
    engine: FakeEngine
    client: httpx.Client

    @property
    def port(self) -> int:
        """Return the port on 127.0.0.1."""
        return int(self.url.rpartition(":")[2])

    def put(self, body: Any, **more: Any) -> httpx.Response:
        """Send `PUT /api`."""
        return self.client.put("/api", json=body, **more)

    def post(self, path: str, body: Any, **more: Any) -> httpx.Response:
        """Send a `POST` to any path."""
        return self.client.post(path, json=body, **more)


def write_tokenizer(folder: Path) -> None:
    """Write a small byte-level tokenizer in GPT-2's two files, and Hugging Face's with a
    template."""
    from tokenizers import ByteLevelBPETokenizer

    bpe = ByteLevelBPETokenizer()
    special = ["<|endoftext|>", "<|user|>", "<|assistant|>", "<|system|>"]
    bpe.train_from_iterator(TEXTS * 3, vocab_size=400, special_tokens=special)
    bpe.save_model(str(folder))
    bpe.save(str(folder / "tokenizer.json"))
    settings = {
        "bos_token": "<|endoftext|>",
        "eos_token": {"content": "<|endoftext|>"},
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def make_settings(folder: Path, engine: FakeEngine, **changes: Any) -> FrontSettings:
    """Return the settings of a server with the test tokenizer."""
    tokenizer = TokenizerConfig(
        tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(folder / "tokenizer.json")
    )
    settings = FrontSettings(
        model="test",
        tokenizer=tokenizer,
        engine=engine.limits,
        chat_template=CHAT_TEMPLATE,
        created=1,
    )
    return replace(settings, **changes)


@contextlib.contextmanager
def running(engine: FakeEngine, settings: FrontSettings) -> Iterator[Live]:
    """Run the front end and the worker's loop in two threads; normally they are two processes."""
    ours, theirs = socket.socketpair()
    listener = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    ours.sendall(pack(FrontSettings, settings))
    inbox = SocketInbox(ours, lambda: engine.stats)
    threads = [
        threading.Thread(target=asyncio.run, args=(front.serve(theirs, listener),), daemon=True),
        threading.Thread(target=serve, args=(engine, inbox), daemon=True),
    ]
    for thread in threads:
        thread.start()
    try:
        with httpx.Client(base_url=url, timeout=120) as client:
            # Connections queue in the listener, so the first request is answered.
            assert client.get("/health").json() == {"status": "ok"}
            yield Live(url, engine, client)
    finally:
        inbox.close()
        for thread in threads:
            thread.join(timeout=60)
