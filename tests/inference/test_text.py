"""Decoding text from tokens that arrive one at a time."""

from __future__ import annotations

import random

import pytest

from megatron.config.data import TokenizerConfig
from megatron.inference.text import Detokenizer, StopStrings
from megatron.tokenizer import Tokenizer, build_tokenizer
from tests.inference.server.live import TEXTS, write_tokenizer

EMOJI = "naïve 東京 👩‍👩‍👧‍👦 Zürich é"  # the last character takes 25 bytes


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return build_tokenizer(
        TokenizerConfig(
            tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(folder / "tokenizer.json")
        )
    )


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    import sentencepiece as library

    prefix = tmp_path_factory.mktemp("sentencepiece") / "tokenizer"
    library.SentencePieceTrainer.train(
        sentence_iterator=iter([line for text in TEXTS for line in text.splitlines() if line]),
        model_prefix=str(prefix),
        vocab_size=312,
        byte_fallback=True,
        minloglevel=2,
    )
    return build_tokenizer(
        TokenizerConfig(tokenizer_type="Llama2Tokenizer", tokenizer_model=f"{prefix}.model")
    )


def _pieces(tokenizer: Tokenizer, ids: list[int], prompt: list[int] = []) -> list[str]:  # noqa: B006
    text = Detokenizer(tokenizer, prompt)
    return [*(text.add(token) for token in ids), text.flush()]


@pytest.mark.parametrize("text", [*TEXTS, EMOJI])
def test_pieces_are_the_text_and_split_no_character(tokenizer: Tokenizer, text: str) -> None:
    pieces = _pieces(tokenizer, tokenizer.tokenize(text))
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_spaces_at_the_joint_of_prompt_and_answer_stay(sentencepiece: Tokenizer) -> None:
    text = "Hello, world! One two three four naïve 東京"
    ids = sentencepiece.tokenize(text)
    for cut in range(1, len(ids)):
        whole = sentencepiece.detokenize(ids)
        told = sentencepiece.detokenize(ids[:cut]) + "".join(
            _pieces(sentencepiece, ids[cut:], ids[:cut])
        )
        if "\ufffd" not in sentencepiece.detokenize(ids[:cut]):  # no character is cut
            assert told == whole


@pytest.mark.parametrize("size", [0, 1, 5, 9])
def test_a_text_continues_after_the_last_five_tokens_of_its_prompt(size: int) -> None:
    """Many tokenizers drop a space at the beginning of a text."""
    decoded: list[list[int]] = []

    class Words:
        def detokenize(self, ids: list[int]) -> str:
            decoded.append(list(ids))
            return "".join(f" w{number}" for number in ids).removeprefix(" ")

    text = Detokenizer(Words(), range(size))  # type: ignore[arg-type]
    assert [text.add(100), text.add(101)] == [" w100" if size else "w100", " w101"]
    assert decoded[0] == [*range(size)][-5:]


def test_garbage_is_shown_before_it_grows_long(tokenizer: Tokenizer) -> None:
    broken = tokenizer.tokenize("東")[:1]
    assert tokenizer.detokenize(broken) == "\ufffd"
    pieces = _pieces(tokenizer, broken * 40)
    longest = max(len(piece) for piece in pieces)
    assert longest <= 8
    assert sum(len(piece) for piece in pieces) == 40


def test_any_tokens_give_pieces_without_fault(tokenizer: Tokenizer) -> None:
    generator = random.Random(0)
    for _ in range(50):
        ids = [generator.randrange(tokenizer.vocab_size) for _ in range(30)]
        assert "".join(_pieces(tokenizer, ids)).replace("\ufffd", "") in _without_broken(
            tokenizer, ids
        )


def _without_broken(tokenizer: Tokenizer, ids: list[int]) -> str:
    return tokenizer.detokenize(ids).replace("\ufffd", "")


@pytest.mark.parametrize(
    ("stops", "text", "shown", "met"),
    [
        ([], "abc", "abc", None),
        (["x"], "abc", "abc", None),
        (["c"], "abcd", "ab", "c"),
        (["cd", "bcx"], "abcde", "ab", "cd"),
        (["cd", "b"], "abcde", "a", "b"),
        (["aab"], "aaab", "a", "aab"),
        (["ende"], "end", "end", None),
        (["\n\n"], "a\nb\n\nc", "a\nb", "\n\n"),
    ],
)
def test_stop_strings_do_not_depend_on_how_text_comes(
    stops: list[str], text: str, shown: str, met: str | None
) -> None:
    for size in range(1, len(text) + 1):
        scanner = StopStrings(stops)
        told, found = "", None
        for start in range(0, len(text), size):
            step = scanner.add(text[start : start + size])
            told, found = told + step.text, step.stop
            if found:
                break
        told += "" if found else scanner.flush()
        assert (told, found) == (shown, met)
