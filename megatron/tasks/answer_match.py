"""Whether a passage holds the answer of a question, as Karpukhin et al. (2020, DPR) decide it.

Texts are decomposed to Unicode's NFD. By words, an answer counts if its words follow each other
somewhere in the passage, upper and lower case alike. A word is a run of letters, digits and marks,
or any other single sign. By patterns, an answer is a regular expression to be found in the passage.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from collections.abc import Callable, Sequence

_OF_WORDS, _BETWEEN = "LNM", "ZC"  # first letters of Unicode's general categories


@functools.lru_cache(maxsize=1 << 16)
def _kind(sign: str) -> str:
    return unicodedata.category(sign)[0]


def words_of(text: str) -> list[str]:
    """Return the words of a text in lower case."""
    words: list[str] = []
    run: list[str] = []
    for sign in unicodedata.normalize("NFD", text):
        kind = _kind(sign)
        if kind in _OF_WORDS:
            run.append(sign)
            continue
        if run:
            words.append("".join(run).lower())
            run = []
        if kind not in _BETWEEN:
            words.append(sign.lower())
    if run:
        words.append("".join(run).lower())
    return words


def holds_words(text: str, answers: Sequence[str]) -> bool:
    """Return whether the words of one of the answers follow each other in a text."""
    words = words_of(text)
    for answer in map(words_of, answers):
        size = len(answer)
        if any(words[at : at + size] == answer for at in range(len(words) - size + 1)):
            return True
    return False


def holds_pattern(text: str, answers: Sequence[str]) -> bool:
    """Return whether one of the regular expressions is found in a text. Broken ones are not."""
    text = unicodedata.normalize("NFD", text)
    for answer in answers:
        try:
            pattern = re.compile(
                unicodedata.normalize("NFD", answer), re.IGNORECASE | re.UNICODE | re.MULTILINE
            )
        except re.error:
            continue
        if pattern.search(text):
            return True
    return False


MATCHES: dict[str, Callable[[str, Sequence[str]], bool]] = {
    "string": holds_words,
    "regex": holds_pattern,
}
"""The function for each value of --faiss-match."""
