"""Reading vocabulary files, and the entries that are appended to them.

A missing or damaged file is named in the message, with the flag it came from.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.errors import DataError


def read_bytes(flag: str, path: str | os.PathLike[str]) -> bytes:
    """Return the content of the file that `flag` names.

    Raises:
        DataError: It cannot be read.
    """
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise DataError(f"{flag} {path}: {error.strerror}; give a readable file") from error


def decode(flag: str, path: str | os.PathLike[str], data: bytes) -> str:
    """Return `data`, read from `path`, as text.

    Raises:
        DataError: It is not UTF-8.
    """
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{flag} {path}: not a text file (byte {error.start} is not UTF-8)"
        ) from error


def parse_json(flag: str, path: str | os.PathLike[str], data: bytes) -> Any:
    """Parse the JSON in `data`, read from `path`.

    Raises:
        DataError: It is not JSON.
    """
    import orjson

    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise DataError(f"{flag} {path}: not a JSON file ({error})") from error


def digest(*parts: bytes | str) -> str:
    """Return a short digest of `parts`; where one ends and the next starts matters."""
    state = hashlib.blake2b(digest_size=16)
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        state.update(len(data).to_bytes(8, "little"))
        state.update(data)
    return state.hexdigest()


def append_entries(vocab: dict[str, int], entries: list[str]) -> None:
    """Give each of `entries` that `vocab` lacks the next free id, in order."""
    for entry in entries:
        vocab.setdefault(entry, len(vocab))


def extra_ids(count: int) -> list[str]:
    """Return the sentinel entries of `--vocab-extra-ids`."""
    return [f"<extra_id_{i}>" for i in range(count)]


def find_sentinels(vocab: Mapping[str, int]) -> list[int]:
    """Return the ids of `<extra_id_0>`, `<extra_id_1>` ..., up to the first that `vocab` lacks.

    Some models (mT5's) have U+2581, which stands for a space, before each.
    """
    ids: list[int] = []
    while True:
        entry = f"<extra_id_{len(ids)}>"
        index = vocab.get(entry, vocab.get(f"\u2581{entry}"))
        if index is None:
            return ids
        ids.append(index)
