"""How each of OpenAI's two endpoints writes its answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from megatron.inference.server.answer import Piece, Spelled

Choice = dict[str, Any]


class Form(ABC):
    """What an endpoint's answers look like."""

    prefix: str  # of ids
    whole: str  # `object` of an answer
    part: str  # `object` of a streamed bit

    @abstractmethod
    def choice(self, piece: Piece, *, logprobs: bool) -> Choice:
        """A whole answer, without its index."""

    def first(self) -> Choice | None:
        """What a streamed answer begins with, where it does before any text."""
        return None

    @abstractmethod
    def delta(self, piece: Piece, *, logprobs: bool) -> Choice:
        """A bit of an answer."""


class CompletionForm(Form):
    """`text_completion`."""

    prefix, whole, part = "cmpl-", "text_completion", "text_completion"

    def choice(self, piece: Piece, *, logprobs: bool) -> Choice:
        """Text, and the tokens in four lists."""
        told = _in_lists(piece.tokens) if logprobs else None
        return {"text": piece.text, "logprobs": told}

    delta = choice


class ChatForm(Form):
    """`chat.completion`."""

    prefix, whole, part = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def choice(self, piece: Piece, *, logprobs: bool) -> Choice:
        """A message, and a list of tokens."""
        message = {"role": "assistant", "content": piece.text, "refusal": None}
        return {"message": message, "logprobs": _in_objects(piece.tokens) if logprobs else None}

    def first(self) -> Choice:
        """Who speaks."""
        return {"delta": {"role": "assistant", "content": ""}, "logprobs": None}

    def delta(self, piece: Piece, *, logprobs: bool) -> Choice:
        """More text of the message."""
        told = _in_objects(piece.tokens) if logprobs else None
        return {"delta": {"content": piece.text} if piece.text else {}, "logprobs": told}


def _in_lists(tokens: Sequence[Spelled]) -> dict[str, Any]:
    return {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": [dict(token.top) if token.top else None for token in tokens],
        "text_offset": [token.offset for token in tokens],
    }


def _in_objects(tokens: Sequence[Spelled]) -> dict[str, Any]:
    content = [
        {
            **_one(token.text, token.logprob),
            "top_logprobs": [_one(text, logprob) for text, logprob in token.top],
        }
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def _one(text: str, logprob: float | None) -> dict[str, Any]:
    # A part of a character has bytes that its text does not tell.
    known = None if "\ufffd" in text else list(text.encode())
    return {"token": text, "logprob": logprob, "bytes": known}
