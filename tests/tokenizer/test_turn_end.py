"""The token that ends the assistant's turn, for templates of several kinds."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from megatron.config.data import TokenizerConfig
from megatron.tokenizer import Tokenizer, build_tokenizer, turn_end
from megatron.tokenizer.turn_end import find_turn_end
from tests.inference.server.live import write_tokenizer

_CHATML = (
    "{% for m in messages %}<|assistant|>{{ m.content }}<|system|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


def _tokenizer(folder: Path) -> Tokenizer:
    write_tokenizer(folder)
    return build_tokenizer(
        TokenizerConfig(
            tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(folder / "tokenizer.json")
        )
    )


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
    monkeypatch.setattr(turn_end, "_CPU_SECONDS", 1 if template == _LOOP else 60)
    monkeypatch.setattr(turn_end, "_TIMEOUT", 250.0)
    tokenizer = _tokenizer(tmp_path)
    start = time.monotonic()
    found = find_turn_end(template, {"eos_token": "<|endoftext|>"}, tokenizer)
    assert (None if found is None else tokenizer.detokenize([found])) == end
    assert time.monotonic() - start < 200


def test_no_process_remains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = _tokenizer(tmp_path)
    file = tmp_path / "process"
    monkeypatch.setattr(
        tokenizer, "tokenize_with_special", lambda _: [file.write_text(f"{os.getpid()}")]
    )
    assert find_turn_end(_CHATML, {}, tokenizer) is not None
    with pytest.raises(ProcessLookupError):  # not even a zombie
        os.kill(int(file.read_text()), 0)


def test_a_process_that_dies_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A template that exhausts the memory may end it."""
    monkeypatch.setattr(turn_end, "_TIMEOUT", 250.0)
    tokenizer = _tokenizer(tmp_path)
    monkeypatch.setattr(tokenizer, "tokenize_with_special", lambda _: os._exit(1))
    start = time.monotonic()
    assert find_turn_end(_CHATML, {}, tokenizer) is None
    assert time.monotonic() - start < 200
