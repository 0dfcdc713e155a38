"""Reading the files of a task; what is wrong with one is said with its line."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from megatron.data.text_input import find_inputs, load_line, read_blocks
from megatron.errors import DataError


def find_missing(flag: str, paths: Iterable[str] | None) -> Iterator[str]:
    """One line for each path that does not exist."""
    for path in paths or ():
        if not Path(path).exists():
            yield f"{flag} {path}: no such file: give the path of one"


def find_repeated(flag: str, paths: Iterable[str] | None) -> Iterator[str]:
    """One line for each path that names the same as one before: its samples would count twice."""
    seen: set[Path] = set()
    for path in paths or ():
        place = Path(path).resolve()
        if place in seen:
            yield f"{flag} {path}: is given twice: give it once"
        seen.add(place)


def read_text(path: str) -> str:
    """A whole UTF-8 file.

    Raises:
        DataError: it cannot be read, or is not UTF-8.
    """
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}: give a text file") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: cannot be read as UTF-8 text: {error}") from error


def read_documents(paths: Sequence[str], key: str = "text") -> Iterator[str]:
    """The texts of a corpus: JSON lines (.gz and .zst too), parquet; of a .txt file all of it.

    Raises:
        DataError: names the file, and the line that is not what it should be.
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
