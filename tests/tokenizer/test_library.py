"""Errors of tokenizer libraries, including Rust panics, as errors about the file."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest

from megatron.config.data import TokenizerConfig
from megatron.errors import DataError
from megatron.tokenizer import build_tokenizer
from megatron.tokenizer.library import Library
from tests.fuzz.harness import past_failures


class PanicException(BaseException):  # noqa: N818  # the name that Rust's bindings give it
    """A stand-in for the class that each Rust library defines for itself."""


class Pipeline:
    """A stand-in for a library's object, which raises what it is given."""

    def encode(self, error: BaseException) -> None:
        raise error


@pytest.mark.parametrize("error", [RuntimeError("bad"), PanicException("bad"), TypeError("bad")])
def test_whatever_a_library_raises_is_an_error_about_the_file(error: BaseException) -> None:
    with pytest.raises(DataError, match=r"--x y: the tokenizer failed; .* bad\)"):
        Library("--x y", "a pipeline", Pipeline).encode(error)
    with pytest.raises(DataError, match="--x y: not a pipeline, or damaged; give another file"):
        Library("--x y", "a pipeline", lambda: Pipeline().encode(error))


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3), MemoryError()])
def test_signals_and_shortages_pass(error: BaseException) -> None:
    with pytest.raises(type(error)):
        Library("--x y", "a pipeline", Pipeline).encode(error)


def test_a_library_can_be_copied() -> None:
    with pytest.raises(DataError):
        copy.copy(Library("--x y", "a pipeline", Pipeline)).encode(ValueError())


@pytest.mark.parametrize(
    ("kind", "name", "message"),
    [
        (
            "GPTSentencePieceTokenizer",
            "SentencePiece model",
            "tokenizer failed; .*not initialized",
        ),
        ("TikTokenizer", "tiktoken file", "not a rank file or Tekken json, or damaged"),
    ],
)
def test_a_file_that_a_library_cannot_use_is_refused_by_name(
    tmp_path: Path, kind: str, name: str, message: str
) -> None:
    path = tmp_path / "x.tiktoken"
    path.write_bytes(past_failures(name)[0])
    with pytest.raises(DataError, match=f"--tokenizer-model {path}: .*{message}"):
        build_tokenizer(TokenizerConfig(tokenizer_type=kind, tokenizer_model=str(path)))
