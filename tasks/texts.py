"""The texts of a task: reading files, and undoing the tokenization of a corpus."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from megatron.data.text_input import find_inputs, load_line, read_blocks
from megatron.errors import DataError


def find_missing(flag: str, paths: Iterable[str] | None) -> Iterator[str]:
    """Yield a line for each path that does not exist."""
    for path in paths or ():
        if not Path(path).exists():
            yield f"{flag} {path}: no such file: give the path of one"


def find_repeated(flag: str, paths: Iterable[str] | None) -> Iterator[str]:
    """Yield a line for each path given twice: its samples would count twice."""
    seen: set[Path] = set()
    for path in paths or ():
        place = Path(path).resolve()
        if place in seen:
            yield f"{flag} {path}: is given twice: give it once"
        seen.add(place)


def read_text(path: str) -> str:
    """Return the text of a UTF-8 file.

    Raises:
        DataError: The file cannot be read, or is not UTF-8.
    """
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}: give a text file") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: cannot be read as UTF-8 text: {error}") from error


def read_documents(paths: Sequence[str], key: str = "text") -> Iterator[str]:
    """Yield the texts of a corpus: of JSON lines (also .gz and .zst) or parquet; a whole .txt file.

    Raises:
        DataError: A line is not as expected. The message names it.
    """
    try:
        lines = dict.fromkeys(find_inputs(paths), 0)
        for block in read_blocks(lines, [key]):
            for line in block.read().splitlines():
                lines[block.path] += 1
                if line.strip():
                    yield _text_of(line, key, f"{block.path}, line {lines[block.path]}")
    except DataError as error:  # said of preprocessing's flag
        raise DataError(str(error).replace("--input", "--valid-data")) from error


def _text_of(line: bytes, key: str, where: str) -> str:
    try:
        document = load_line(line)
    except ValueError as error:
        raise DataError(f"{where}: not JSON: {error}: give one object a line") from None
    text = document.get(key) if isinstance(document, dict) else None
    if not isinstance(text, str):
        raise DataError(f'{where}: no text under "{key}": each line should be {{"{key}": "..."}}')
    return text


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
    """Undo WikiText's `@-@` and the like, and spaces around punctuation, brackets and quotes."""
    text = _replace(text.replace("s '", "s'"), _WIKITEXT)
    for opening, closing in _PAIRS:
        inside = rf"{re.escape(opening)}\s*([^{re.escape(closing)}]*?)\s*{re.escape(closing)}"
        text = re.sub(inside, rf"{opening}\1{closing}", text)
    return _replace(text, _WIKITEXT_LAST)


def ptb(text: str) -> str:
    """Undo Penn Treebank's split contractions, and `N` for numbers."""
    return _replace(text, _PTB)


def identity(text: str) -> str:
    """Return the text as it is."""
    return text


DETOKENIZERS: dict[str, Detokenizer] = {"wikitext": wikitext, "ptb": ptb, "none": identity}
# Megatron-LM goes by the path of the data, and fails where none of these is in it.
_IN_PATH = {"ptb": "ptb", "wiki": "wikitext", "lambada": "none"}


def detokenizer_for(path: str, asked: str | None) -> str:
    """Return the name of the detokenizer that is asked for, or that the path suggests."""
    if asked is not None:
        return asked
    return next((name for part, name in _IN_PATH.items() if part in path), "none")


def _replace(text: str, pairs: tuple[tuple[str, str], ...]) -> str:
    for old, new in pairs:
        text = text.replace(old, new)
    return text
