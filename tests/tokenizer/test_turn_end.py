"""The token that ends the assistant's turn, for templates of several kinds."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from megatron.config.data import TokenizerConfig
from megatron.tokenizer import build_tokenizer, turn_end
from megatron.tokenizer.turn_end import find_turn_end
from tests.inference.server.live import write_tokenizer

_CHATML = (
    "{% for m in messages %}<|assistant|>{{ m.content }}<|system|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "end"),
    [
        (_CHATML, "<|system|>"),
        (_CHATML.replace("<|system|>", "{{ eos_token }}"), "<|endoftext|>"),
        (_CHATML.replace("<|system|>", " The end."), None),
        (_CHATML.replace("<|system|>", ""), None),
        ("{{ raise_exception('no') }}", None),
        (_LOOP, None),
    ],
)
def test_the_token_after_the_answer(
    template: str, end: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turn_end, "_SECONDS", 1.0 if template == _LOOP else 30.0)
    write_tokenizer(tmp_path)
    tokenizer = build_tokenizer(
        TokenizerConfig(
            tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(tmp_path / "tokenizer.json")
        )
    )
    start = time.monotonic()
    found = find_turn_end(template, {"eos_token": "<|endoftext|>"}, tokenizer)
    assert (None if found is None else tokenizer.detokenize([found])) == end
    assert time.monotonic() - start < 25
