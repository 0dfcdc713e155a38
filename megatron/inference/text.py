"""Conversion of token ids that arrive one by one into text that can be shown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from megatron.tokenizer import Tokenizer

_INCOMPLETE = "\ufffd"  # a tokenizer's text for bytes that are not (yet) a character
# Some tokenizers drop a space at the beginning of a text, so decoding starts this many prompt ids
# earlier.
_CONTEXT = 5
# A character has at most 4 bytes. More ids than this without a complete character are garbage.
_MAX_PENDING = 8


class Detokenizer:
    """A converter of a growing sequence of ids to text, in pieces that never split a character."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        """Start after a prompt.

        Args:
            tokenizer: Tokenizer of the model.
            prompt: The ids before the first one that is added. Their text is not returned.
        """
        self._tokenizer = tokenizer
        self._ids = list(prompt[-_CONTEXT:])
        self._context = 0  # ids from here on are decoded, to find the text that a new one adds
        self._returned = len(self._ids)  # the text of ids before this one has been returned

    def add(self, token: int) -> str:
        """Return the text that a token completes, or "" while a character is incomplete.

        After 8 tokens without a complete character, their text is returned anyway.
        """
        self._ids.append(token)
        text = self._pending()
        num_pending = len(self._ids) - self._returned
        if text.endswith(_INCOMPLETE) and num_pending < _MAX_PENDING:
            return ""
        self._context, self._returned = self._returned, len(self._ids)
        return text

    def flush(self) -> str:
        """Return the remaining text at the end. An incomplete character becomes U+FFFD."""
        text = self._pending()
        self._returned = len(self._ids)
        return text

    def _pending(self) -> str:
        returned = self._tokenizer.detokenize(self._ids[self._context : self._returned])
        return self._tokenizer.detokenize(self._ids[self._context :])[len(returned) :]


class ReleasedText(NamedTuple):
    """Text that may be shown now.

    Attributes:
        text: Text that cannot belong to a stop string.
        stop: The stop string that ended the text, or `None` if the text continues.
    """

    text: str
    stop: str | None = None


class StopStrings:
    """A filter that ends a text at its first stop string, and holds back any possible start of one.

    Held-back text is released as soon as it can no longer belong to a stop string.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """Start with no text.

        Args:
            stops: The stop strings. None of them is empty.
        """
        self._stops = tuple(stops)
        self._buffer = ""

    def add(self, text: str) -> ReleasedText:
        """Add text, and return the part of all text so far that may be shown next."""
        self._buffer += text
        matches = [(self._buffer.find(stop), stop) for stop in self._stops if stop in self._buffer]
        if matches:
            start, stop = min(matches)
            return ReleasedText(self._buffer[:start], stop)
        # Hold back the longest suffix of the text that may be the beginning of a stop string.
        sizes = range(max(map(len, self._stops), default=1) - 1, 0, -1)
        ends = (n for n in sizes if any(self._buffer[-n:] == stop[:n] for stop in self._stops))
        released_size = len(self._buffer) - next(ends, 0)
        released, self._buffer = self._buffer[:released_size], self._buffer[released_size:]
        return ReleasedText(released)

    def flush(self) -> str:
        """Return the text that is held back. Call this when there is no more text."""
        text, self._buffer = self._buffer, ""
        return text
