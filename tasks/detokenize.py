"""Undo what a corpus's own tokenization did to its text, with Megatron-LM's rules."""

from __future__ import annotations

import re
from collections.abc import Callable

Detokenizer = Callable[[str], str]

# Pairs of (what stands in the corpus, what it was), applied in order.
_WIKITEXT: tuple[tuple[str, str], ...] = (
    *((f" @{sign}@ ", sign) for sign in "-,."),
    *((f" {sign} ", f"{sign} ") for sign in ":;.!?,"),
)
# What stands between a pair of signs, to lose the spaces at its ends.
_PAIRS = (("(", ")"), ("[", "]"), ("{", "}"), ('"', '"'), ("'", "'"))
_WIKITEXT_LAST: tuple[tuple[str, str], ...] = (
    *(("= " * count + "=", "=" * (count + 1)) for count in (3, 2, 1)),
    (" ° ", "°"),
    (" \n", "\n"),
    ("\n ", "\n"),
    (" N ", " 1 "),
    (" 's", "'s"),
)
_PTB: tuple[tuple[str, str], ...] = (
    (" '", "'"),
    (" \n", "\n"),
    ("\n ", "\n"),
    (" n't", "n't"),
    (" N ", "1 "),
    ("$ 1", "$1"),
    ("# 1", "#1"),
)


def wikitext(text: str) -> str:
    """WikiText: `@-@` and its kin, spaces around punctuation, brackets and quotes."""
    text = _replace(text.replace("s '", "s'"), _WIKITEXT)
    for opening, closing in _PAIRS:
        inside = rf"{re.escape(opening)}\s*([^{re.escape(closing)}]*?)\s*{re.escape(closing)}"
        text = re.sub(inside, rf"{opening}\1{closing}", text)
    return _replace(text, _WIKITEXT_LAST)


def ptb(text: str) -> str:
    """Penn Treebank: split contractions, `N` for numbers."""
    return _replace(text, _PTB)


def identity(text: str) -> str:
    """The text as it is."""
    return text


DETOKENIZERS: dict[str, Detokenizer] = {"wikitext": wikitext, "ptb": ptb, "none": identity}
# Megatron-LM goes by the path of the data, and fails where none of these is in it.
_IN_PATH = {"ptb": "ptb", "wiki": "wikitext", "lambada": "none"}


def detokenizer_for(path: str, asked: str | None) -> str:
    """Name of the detokenizer: the one asked for, else by the path."""
    if asked is not None:
        return asked
    return next((name for part, name in _IN_PATH.items() if part in path), "none")


def _replace(text: str, pairs: tuple[tuple[str, str], ...]) -> str:
    for old, new in pairs:
        text = text.replace(old, new)
    return text
