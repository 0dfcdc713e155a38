"""From token ids that come one by one to text that can be shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.tokenizer import Tokenizer

_INCOMPLETE = "\ufffd"  # what a tokenizer writes for bytes that are no character (yet)
# Some tokenizers drop a space where a text begins: so many ids of the prompt go along.
_CONTEXT = 5
# A character has at most 4 bytes. More ids than this that end in none never will: they are garbage.
_MAX_HELD = 8


class Detokenizer:
    """Text of a growing sequence of ids, in pieces that never split a character.

    Args:
        prompt: the ids before the first one added; their text is not returned.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._ids = list(prompt[-_CONTEXT:])
        self._context = 0  # ids from here are decoded, to see what a new one adds
        self._said = len(self._ids)  # ids before this one have had their text returned

    def add(self, token: int) -> str:
        """The text that `token` completes; "" while a character is incomplete."""
        self._ids.append(token)
        text = self._pending()
        held = len(self._ids) - self._said
        if text.endswith(_INCOMPLETE) and held < _MAX_HELD:
            return ""
        self._context, self._said = self._said, len(self._ids)
        return text

    def rest(self) -> str:
        """What is held back, at the end: an incomplete character as U+FFFD."""
        text = self._pending()
        self._said = len(self._ids)
        return text

    def _pending(self) -> str:
        said = self._tokenizer.detokenize(self._ids[self._context : self._said])
        return self._tokenizer.detokenize(self._ids[self._context :])[len(said) :]


@dataclass(frozen=True)
class Shown:
    """What may be shown now.

    Attributes:
        text: text that no stop string can still claim.
        stop: the stop string that was met; nothing more is to come.
    """

    text: str
    stop: str | None = None


class StopStrings:
    """Holds text back while it may be the beginning of a stop string, and ends at the first.

    Args:
        stops: none of them empty.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def add(self, text: str) -> Shown:
        """What of the held and the new text may be shown."""
        self._held += text
        met = [(self._held.find(stop), stop) for stop in self._stops if stop in self._held]
        if met:
            start, stop = min(met)
            return Shown(self._held[:start], stop)
        free = len(self._held) - self._possible_start()
        shown, self._held = self._held[:free], self._held[free:]
        return Shown(shown)

    def rest(self) -> str:
        """What is held back, when no more text comes."""
        held, self._held = self._held, ""
        return held

    def _possible_start(self) -> int:
        """Characters at the end that may begin a stop string."""
        return max((_overlap(self._held, stop) for stop in self._stops), default=0)


def _overlap(text: str, stop: str) -> int:
    """The longest end of `text` that `stop` begins with, shorter than `stop`."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
