"""One sequence's answer as text: pieces that can be shown, each with the tokens that made it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Literal

from megatron.inference.request import Event, Finished, Prompt, Token, TopLogprobs
from megatron.inference.server.engine_client import Stream
from megatron.inference.server.errors import ApiError
from megatron.inference.text import Detokenizer, StopStrings
from megatron.tokenizer import Tokenizer


@dataclass(frozen=True)
class Spelled:
    """A token with its text.

    Attributes:
        text: of this token alone; U+FFFD where it holds a part of a character.
        offset: characters of the answer before it.
        logprob: None where unknown: not asked for, or the prompt's first token.
        top: text and log probability of the most likely tokens in its place.
    """

    id: int
    text: str
    offset: int
    logprob: float | None = None
    top: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class Piece:
    """What can be shown now: text, and the tokens that begin in it or in what is held no more."""

    text: str
    tokens: tuple[Spelled, ...]


class Speller:
    """Spells tokens one after another, in the context of those before."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._text = Detokenizer(tokenizer, prompt)
        self._last = tuple(prompt[-1:])
        self._characters = 0
        self._holding = False

    def add(
        self, token: int, logprob: float | None = None, top: TopLogprobs = ()
    ) -> tuple[str, Spelled]:
        """The text that can be shown now, and the token."""
        offset = self._characters
        shown = self._text.add(token)
        own = shown if shown and not self._holding else self._tokenizer.detokenize([token])
        others = tuple((self._beside(other), value) for other, value in top)
        self._holding = not shown
        self._characters += len(shown)
        self._last = (token,)
        return shown, Spelled(token, own, offset, logprob, others)

    def rest(self) -> str:
        """What is held back, at the end."""
        return self._text.rest()

    def _beside(self, token: int) -> str:
        """Text of a token that was not chosen."""
        before = self._tokenizer.detokenize(self._last)
        return self._tokenizer.detokenize([*self._last, token])[len(before) :]


def spell_prompt(
    tokenizer: Tokenizer, prompt: Sequence[int], scores: Prompt | None = None
) -> list[Spelled]:
    """The tokens of a prompt; the first follows nothing, so it has no log probability."""
    speller = Speller(tokenizer)
    logprobs = (None, *scores.logprobs) if scores else (None,) * len(prompt)
    tops = ((), *scores.top) if scores and scores.top else ((),) * len(prompt)
    return [
        speller.add(token, logprob, top)[1]
        for token, logprob, top in zip(prompt, logprobs, tops, strict=True)
    ]


class Answer:
    """What the engine answers to one sequence.

    Args:
        stream: of its events; whoever makes the answer closes it.
        stops: strings that end it and are no part of it.
        silent: stop tokens, which end it and are no part of its text.

    Attributes:
        prompt: the prompt's log probabilities, once they are there.
        new_tokens: so far, silent ones included.
        finished: the engine's last word; None where a stop string ended the answer before.
    """

    def __init__(
        self, tokenizer: Tokenizer, stream: Stream, stops: Sequence[str], silent: frozenset[int]
    ) -> None:
        self._stream = stream
        self._speller = Speller(tokenizer, stream.request.prompt)
        self._stops = StopStrings(stops)
        self._silent = silent
        self._waiting: list[Spelled] = []  # tokens whose text is held back
        self._shown = 0  # characters
        self._stopped = False  # by a stop string
        self.prompt: Prompt | None = None
        self.new_tokens = 0
        self.finished: Finished | None = None

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """The tokens it goes on from."""
        return self._stream.request.prompt

    @property
    def reason(self) -> Literal["stop", "length"]:
        """Why it ended."""
        ended_by_length = self.finished is not None and self.finished.reason == "length"
        return "length" if ended_by_length and not self._stopped else "stop"

    async def pieces(self) -> AsyncIterator[Piece]:
        """The answer, bit by bit. The prompt's log probabilities are there before the first.

        Raises:
            ApiError: 422 the engine cannot answer this, 500 it failed.
        """
        async for events in self._stream.batches():
            text = ""
            for event in events:
                text += self._take(event)
                if self._stopped:
                    break
            # At the end nothing is held back any more: tokens pass that hold only the beginning
            # of a character, or none.
            yield self._show(text, upto=self._shown + len(text) + (self.finished is not None))
            if self._stopped:
                self._stream.close()
                return

    def _take(self, event: Event) -> str:
        """The text that an event lets us show."""
        if isinstance(event, Prompt):
            self.prompt = event
            return ""
        if isinstance(event, Token):
            self.new_tokens += 1
            if event.token in self._silent:
                return ""
            text, spelled = self._speller.add(event.token, event.logprob, event.top)
            self._waiting.append(spelled)
            return self._until_stop(text)
        if event.reason == "refused":
            raise ApiError(422, event.message, always=False)
        if event.reason in ("error", "cancelled"):
            raise ApiError(500, f"the engine gave up: {event.message or event.reason}")
        self.finished = event
        text = self._until_stop(self._speller.rest())
        return text if self._stopped else text + self._stops.rest()

    def _until_stop(self, text: str) -> str:
        shown = self._stops.add(text)
        self._stopped = shown.stop is not None
        return shown.text

    def _show(self, text: str, upto: int) -> Piece:
        """A piece, with the tokens that begin before character `upto`."""
        self._shown += len(text)
        count = sum(token.offset < upto for token in self._waiting)
        tokens, self._waiting = self._waiting[:count], self._waiting[count:]
        return Piece(text, tuple(tokens))
