"""Splitting text into sentences with NLTK's Punkt, without a download."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from megatron.errors import ConfigError

# Punkt takes text in slices of this many characters; its memory grows with the slice.
_SLICE = 1_000_000


class SentenceSplitter:
    """Cuts text at the ends of sentences.

    Args:
        punkt: an NLTK Punkt tokenizer.
        keep_newlines: keep the white space after each sentence with it.
    """

    def __init__(self, punkt: Any, *, keep_newlines: bool) -> None:
        self._punkt = punkt
        self._keep_newlines = keep_newlines

    def split(self, text: str) -> list[str]:
        """Sentences of `text` in order."""
        sentences: list[str] = []
        for start in range(0, len(text), _SLICE):
            sentences += self._split_slice(text[start : start + _SLICE])
        return sentences

    def _split_slice(self, text: str) -> Iterator[str]:
        spans = list(self._punkt.span_tokenize(text))
        if not self._keep_newlines:
            return (text[start:end] for start, end in spans)
        # With its white space, a sentence reaches to the start of the next.
        starts = [start for start, _ in spans]
        ends = [*starts[1:], len(text)]
        return (text[start:end] for start, end in zip(starts, ends, strict=True))


def installed_punkt(language: str) -> Any | None:
    """NLTK's trained Punkt of `language`, or None where its data is not installed."""
    import nltk
    from nltk.tokenize.punkt import PunktTokenizer

    try:
        nltk.data.find(f"tokenizers/punkt_tab/{language}/")
    except LookupError:
        return None
    return PunktTokenizer(language)


def train_punkt(texts: Iterable[str], characters: int = 10_000_000) -> Any:
    """Punkt trained on the first `characters` of `texts`: it learns abbreviations and how
    sentences start from the text itself.

    Raises:
        ConfigError: there is no text to learn from.
    """
    from nltk.tokenize.punkt import PunktSentenceTokenizer, PunktTrainer

    trainer = PunktTrainer()
    seen = 0
    for text in texts:
        if seen >= characters:
            break
        trainer.train(text[: characters - seen], finalize=False)
        seen += len(text)
    if not seen:
        raise ConfigError("--split-sentences: the input holds no text to learn sentences from")
    trainer.finalize_training()
    return PunktSentenceTokenizer(trainer.get_params())
