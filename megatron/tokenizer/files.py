"""Reading vocabulary files: a missing or damaged one is named, with the flag it came from."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

from megatron.errors import DataError


def read_bytes(flag: str, path: str | os.PathLike[str]) -> bytes:
    """Content of the file that `flag` names.

    Raises:
        DataError: it cannot be read.
    """
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise DataError(f"{flag} {path}: {error.strerror}; give a readable file") from error


def decode(flag: str, path: str | os.PathLike[str], data: bytes) -> str:
    """`data`, read from `path`, as text.

    Raises:
        DataError: it is not UTF-8.
    """
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{flag} {path}: not a text file (byte {error.start} is not UTF-8)"
        ) from error


def parse_json(flag: str, path: str | os.PathLike[str], data: bytes) -> Any:
    """JSON in `data`, read from `path`.

    Raises:
        DataError: it is not JSON.
    """
    import orjson

    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise DataError(f"{flag} {path}: not a JSON file ({error})") from error


def digest(*parts: bytes | str) -> str:
    """Short digest of `parts`; where one ends and the next starts matters."""
    state = hashlib.blake2b(digest_size=16)
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        state.update(len(data).to_bytes(8, "little"))
        state.update(data)
    return state.hexdigest()
