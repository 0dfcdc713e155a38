"""Readers of task files, and detokenizers for tokenized corpora."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from megatron.config.tasks import TaskConfig
from megatron.data.text_input import find_inputs, load_line, read_blocks
from megatron.errors import DataError


def find_missing(flag: str, paths: Iterable[str] | None) -> Iterator[str]:
    """Yield an error message for each path that does not exist."""
    for path in paths or ():
        if not Path(path).exists():
            yield f"{flag} {path}: no such file: give the path of an existing file"


def find_mistakes(options: TaskConfig) -> Iterator[str]:
    """Yield a message for each error in the flags that all tasks share."""
    yield from find_missing("--valid-data", options.valid_data)
    seen: set[Path] = set()
    for path in options.valid_data or ():
        resolved = Path(path).resolve()
        if resolved in seen:  # its samples would count twice
            yield f"--valid-data {path}: this file is given twice: give it once"
        seen.add(resolved)
    if options.overwrite and options.results is None:
        yield "--overwrite without --results: there is no file to replace: drop --overwrite"


def read_text(path: str, flag: str) -> str:
    """Return the text of a UTF-8 file.

    Args:
        path: The file.
        flag: The flag that names the file, for error messages.

    Raises:
        DataError: The file cannot be read, or is not UTF-8.
    """
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(f"{flag} {path}: {error.strerror}: give a text file") from error
    except UnicodeDecodeError as error:
        raise DataError(
            f"{flag} {path}: cannot be read as UTF-8 text: {error}: convert the file"
        ) from error


def read_documents(paths: Sequence[str]) -> Iterator[str]:
    """Yield the texts of a corpus: JSON lines (also compressed), Parquet, or whole .txt files.

    Raises:
        DataError: A file cannot be read, or a line is not a JSON object with a "text". The message
            names the line.
    """
    try:
        lines = dict.fromkeys(find_inputs(paths), 0)
        for block in read_blocks(lines, ["text"]):
            for line in block.read().splitlines():
                lines[block.path] += 1
                if line.strip():
                    yield _text_of(line, f"{block.path}, line {lines[block.path]}")
    except DataError as error:  # the message names the flag of preprocess_data.py
        raise DataError(str(error).replace("--input", "--valid-data")) from error


def _text_of(line: bytes, where: str) -> str:
    try:
        document = load_line(line)
    except ValueError as error:
        raise DataError(f"{where}: not JSON: {error}: give one object per line") from None
    text = document.get("text") if isinstance(document, dict) else None
    if not isinstance(text, str):
        raise DataError(f'{where}: no text under "text": write each line as {{"text": "..."}}')
    return text


Detokenizer = Callable[[str], str]

# Pairs of (text in the corpus, original text), applied in order.
_WIKITEXT: tuple[tuple[str, str], ...] = (
    *((f" @{sign}@ ", sign) for sign in "-,."),
    *((f" {sign} ", f"{sign} ") for sign in ":;.!?,"),
)
# Pairs of characters. Spaces just inside a pair are removed.
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
    """Undo WikiText's tokenization: marks such as `@-@`, and spaces around punctuation."""
    text = _replace(text.replace("s '", "s'"), _WIKITEXT)
    for opening, closing in _PAIRS:
        inside = rf"{re.escape(opening)}\s*([^{re.escape(closing)}]*?)\s*{re.escape(closing)}"
        text = re.sub(inside, rf"{opening}\1{closing}", text)
    return _replace(text, _WIKITEXT_LAST)


def ptb(text: str) -> str:
    """Join the contractions that Penn Treebank splits, and replace its `N` with a number."""
    return _replace(text, _PTB)


def identity(text: str) -> str:
    """Return the text unchanged."""
    return text


DETOKENIZERS: dict[str, Detokenizer] = {"wikitext": wikitext, "ptb": ptb, "none": identity}
# Megatron-LM also chooses by the path of the data, but fails if the path contains none of these.
_DETOKENIZERS_BY_PATH = {"ptb": "ptb", "wiki": "wikitext", "lambada": "none"}


def detokenizer_for(path: str, requested: str | None) -> str:
    """Return the name of the requested detokenizer, or of the one that the path suggests."""
    if requested is not None:
        return requested
    return next((name for part, name in _DETOKENIZERS_BY_PATH.items() if part in path), "none")


def _replace(text: str, pairs: tuple[tuple[str, str], ...]) -> str:
    for old, new in pairs:
        text = text.replace(old, new)
    return text
