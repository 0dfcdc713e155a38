"""Conversations as ids: what is trained, what is refused, what is kept in the cache."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.config.data import TokenizerConfig
from megatron.data.cache import IndexCache
from megatron.data.conversations import (
    ConversationEncoder,
    ConversationOptions,
    TokenizedExamples,
    load_examples,
)
from tests.inference.server.live import write_tokenizer

CHATML = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|endoftext|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
USER = {"role": "user", "content": "Hello"}
ANSWER = {"role": "assistant", "content": "Hi there."}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(found)
    return found


def _encoder(folder: Path, template: str | None = CHATML, **changes: Any) -> ConversationEncoder:
    tokenizer = TokenizerConfig(
        tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(folder / "tokenizer.json")
    )
    return ConversationEncoder(
        ConversationOptions(tokenizer, template, **{"max_length": 256, **changes})
    )


def _load(
    path: Path, encoder: ConversationEncoder, records: list[Any], **options: Any
) -> TokenizedExamples:
    lines = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in records]
    file = path / "chats.jsonl"
    file.write_bytes(b"".join(line + b"\n" for line in lines))
    return load_examples(str(file), encoder, IndexCache((path / "cache",)), **options)


def _trained(encoder: ConversationEncoder, examples: TokenizedExamples) -> list[str]:
    found = [examples[index] for index in range(len(examples))]
    return [encoder.tokenizer.detokenize(ids[on].tolist()) for ids, on in found]


@pytest.mark.parametrize(
    ("record", "trained"),
    [
        ({"messages": [USER, ANSWER]}, ["Hi there.<|endoftext|>"]),
        (
            {"conversations": [{"from": "human", "value": "A"}, {"from": "gpt", "value": "B"}]},
            ["B<|endoftext|>"],
        ),
        ({"prompt": [USER], "completion": [ANSWER]}, ["Hi there.<|endoftext|>"]),
        ({"prompt": "Hello", "completion": " there."}, [" there.<|endoftext|>"]),
        ({"text": "Hello there."}, ["Hello there.<|endoftext|>"]),
    ],
)
def test_every_format_gives_what_is_trained(
    record: dict[str, Any], trained: list[str], folder: Path, tmp_path: Path
) -> None:
    encoder = _encoder(folder)
    assert _trained(encoder, _load(tmp_path, encoder, [record])) == trained


def test_ids_come_from_the_cache_until_something_changes(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = [{"messages": [USER, ANSWER]}]
    first = _load(tmp_path, _encoder(folder), records)
    path = str(tmp_path / "chats.jsonl")
    cache = IndexCache((tmp_path / "cache",))
    with monkeypatch.context() as patch:
        patch.setattr("megatron.data.conversations._build", pytest.fail)
        again = load_examples(path, _encoder(folder), cache)
    assert np.array_equal(again.tokens, first.tokens)
    assert np.array_equal(again.trained, first.trained)
    assert again.summary() == first.summary()
    for changed in (
        _encoder(folder, "{{ bos_token }}" + CHATML),
        _encoder(folder, train_on_inputs=True),
    ):
        other = load_examples(path, changed, cache)
        assert not np.array_equal(other.tokens, first.tokens) or other.trained.all()
    longer = _load(tmp_path, _encoder(folder), [*records, *records])
    assert len(longer) == 2
