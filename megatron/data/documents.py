"""JSON lines to documents: what a good line is, and what is wrong with a bad one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import orjson


class BadLine(NamedTuple):
    """A line that gives no document: its number (from 0) and byte offset inside its block."""

    line: int
    offset: int
    reason: str


@dataclass(frozen=True)
class Documents:
    """Documents of one block.

    Attributes:
        values: for each document, for each key, the text or the list of its sentences.
        places: line and byte offset of each document inside the block.
        lines: lines of the block, blank and bad ones included.
        bad: lines that gave no document.
    """

    values: list[list[str | list[str]]]
    places: list[tuple[int, int]]
    lines: int
    bad: list[BadLine]


def parse_lines(data: bytes, keys: Sequence[str]) -> Documents:
    """Documents of a block of lines; blank lines are passed over."""
    lines = data.split(b"\n")
    if not lines[-1]:
        lines.pop()
    values: list[list[str | list[str]]] = []
    places: list[tuple[int, int]] = []
    bad: list[BadLine] = []
    offset = 0
    for number, line in enumerate(lines):
        if line and not line.isspace():
            try:
                record = load_line(line)
                values.append([_value(record, key) for key in keys])
                places.append((number, offset))
            except ValueError as error:
                bad.append(BadLine(number, offset, str(error)))
        offset += len(line) + 1
    return Documents(values, places, len(lines), bad)


def load_line(line: bytes) -> Any:
    """The JSON of one line.

    Raises:
        ValueError: says in words what is wrong.
    """
    try:
        return orjson.loads(line)
    except orjson.JSONDecodeError:
        return _load_lenient(line)


def _load_lenient(line: bytes) -> Any:
    """As Python's json: also NaN and Infinity, which many corpora hold in fields beside the text.

    Raises:
        ValueError: says in words what is wrong.
    """
    try:
        record = json.loads(line.decode("utf-8"))
        # Half a surrogate pair is no text: it has no UTF-8 form.
        json.dumps(record, ensure_ascii=False).encode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"bad UTF-8 (byte {error.start} of the line)") from None
    except UnicodeEncodeError:
        raise ValueError("broken JSON (half a surrogate pair in a string)") from None
    except json.JSONDecodeError as error:
        what = error.msg.removesuffix(" at")  # of a string that does not end
        raise ValueError(f"broken JSON ({what} at character {error.pos})") from None
    except RecursionError:
        raise ValueError("broken JSON (nested too deeply)") from None
    return record


def _value(record: Any, key: str) -> str | list[str]:
    if not isinstance(record, dict):
        raise ValueError(f"expected a JSON object, found {_kind(record)}")
    if key not in record:
        raise ValueError(f"no key {key!r}")
    value = record[key]
    if isinstance(value, str):
        return value
    # A list of strings is a document whose sentences are split already.
    if isinstance(value, list) and all(isinstance(sentence, str) for sentence in value):
        return value
    raise ValueError(f"{key!r} is {_kind(value)}, expected a string")


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    names = {bool: "true or false", int: "a number", float: "a number", dict: "an object"}
    return names.get(type(value), "a list" if isinstance(value, list) else "a string")
