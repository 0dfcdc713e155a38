"""Reading vocabulary files, and the entries that are appended to them.

Messages about a missing or damaged file name the file and the flag that gave it.
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
        DataError: The file cannot be read.
    """
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise DataError(f"{flag} {path}: {error.strerror}; give a readable file") from error


def decode(flag: str, path: str | os.PathLike[str], data: bytes) -> str:
    """Return `data`, read from `path`, as text.

    Raises:
        DataError: The data is not UTF-8.
    """
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{flag} {path}: not a UTF-8 text file (byte {error.start} is not UTF-8)"
        ) from error


def parse_json(flag: str, path: str | os.PathLike[str], data: bytes) -> Any:
    """Parse the JSON in `data`, read from `path`.

    Raises:
        DataError: The data is not JSON.
    """
    import orjson

    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise DataError(f"{flag} {path}: not a JSON file ({error})") from error


def digest(*parts: bytes | str) -> str:
    """Return a short digest of `parts`, which depends on the boundaries between them."""
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
    """Return the `count` sentinel entries that `--vocab-extra-ids` adds."""
    return [f"<extra_id_{i}>" for i in range(count)]


def find_sentinels(vocab: Mapping[str, int]) -> list[int]:
    """Return the ids of `<extra_id_0>`, `<extra_id_1>` ..., until `vocab` lacks one.

    Some models (mT5's) have U+2581, which stands for a space, before each sentinel.
    """
    ids: list[int] = []
    while True:
        entry = f"<extra_id_{len(ids)}>"
        index = vocab.get(entry, vocab.get(f"\u2581{entry}"))
        if index is None:
            return ids
        ids.append(index)
