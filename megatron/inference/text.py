"""From token ids that come one by one to text that can be shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.tokenizer import Tokenizer

_INCOMPLETE = "\ufffd"  # what a tokenizer writes for bytes that are not (yet) a character
# Some tokenizers drop a space at the beginning of a text, so this many ids of the prompt go along.
_CONTEXT = 5
# A character has at most 4 bytes. More ids than this without a complete one are garbage.
_MAX_HELD = 8


class Detokenizer:
    """Text of a growing sequence of ids, in pieces that never split a character."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        """Start after a prompt.

        Args:
            tokenizer: Of the model.
            prompt: The ids before the first one added. Their text is not returned.
        """
        self._tokenizer = tokenizer
        self._ids = list(prompt[-_CONTEXT:])
        self._context = 0  # ids from here are decoded, to see what a new one adds
        self._said = len(self._ids)  # ids before this one have had their text returned

    def add(self, token: int) -> str:
        """Return the text that a token completes, "" while a character is incomplete."""
        self._ids.append(token)
        text = self._pending()
        held = len(self._ids) - self._said
        if text.endswith(_INCOMPLETE) and held < _MAX_HELD:
            return ""
        self._context, self._said = self._said, len(self._ids)
        return text

    def rest(self) -> str:
        """Return what is held back, at the end: an incomplete character as U+FFFD."""
        text = self._pending()
        self._said = len(self._ids)
        return text

    def _pending(self) -> str:
        said = self._tokenizer.detokenize(self._ids[self._context : self._said])
        return self._tokenizer.detokenize(self._ids[self._context :])[len(said) :]


@dataclass(frozen=True)
class Shown:
    """Text that may be shown now.

    Attributes:
        text: Text that cannot belong to a stop string.
        stop: The stop string that was met, after which nothing more comes.
    """

    text: str
    stop: str | None = None


class StopStrings:
    """Holds text back while it may begin a stop string, and ends at the first stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        """Start with no text.

        Args:
            stops: The stop strings. None of them is empty.
        """
        self._stops = tuple(stops)
        self._held = ""

    def add(self, text: str) -> Shown:
        """Return which part of the held and the new text may be shown."""
        self._held += text
        met = [(self._held.find(stop), stop) for stop in self._stops if stop in self._held]
        if met:
            start, stop = min(met)
            return Shown(self._held[:start], stop)
        # Characters at the end that may begin a stop string.
        held = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        free = len(self._held) - held
        shown, self._held = self._held[:free], self._held[free:]
        return Shown(shown)

    def rest(self) -> str:
        """Return what is held back, when no more text comes."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that begins `stop` and is shorter than it."""
    sizes = range(min(len(text), len(stop) - 1), 0, -1)
    return next((size for size in sizes if text.endswith(stop[:size])), 0)
