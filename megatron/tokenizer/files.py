"""Vocabulary files, their digest, and the T5 sentinels in them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from megatron.errors import DataError


class VocabularyFile(NamedTuple):
    """A file from which a tokenizer is built. Messages name it by its flag and path.

    Attributes:
        flag: The flag that names the file.
        path: The path of the file.
        data: The content of the file.
    """

    flag: str
    path: str
    data: bytes

    def __str__(self) -> str:
        """Return the flag and the path."""
        return f"{self.flag} {self.path}"

    @staticmethod
    def read(flag: str, path: str | None) -> VocabularyFile:
        """Read the file that a flag names.

        Raises:
            DataError: The file cannot be read.
        """
        assert path is not None, "a checked configuration names the files of its tokenizer"
        try:
            return VocabularyFile(flag, path, Path(path).read_bytes())
        except OSError as error:
            raise DataError(f"{flag} {path}: {error.strerror}; give a readable file") from error

    def text(self) -> str:
        """Return the content as text.

        Raises:
            DataError: The content is not UTF-8.
        """
        try:
            return self.data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise DataError(
                f"{self}: not a UTF-8 text file (byte {error.start} is not UTF-8)"
            ) from error

    def entries(self) -> dict[str, int]:
        """Parse a file with one entry per line.

        Returns:
            The line number of each entry, counted from 0.

        Raises:
            DataError: The content is not UTF-8, or an entry appears twice.
        """
        vocab: dict[str, int] = {}
        for number, line in enumerate(self.text().removesuffix("\n").split("\n")):
            entry = line.strip()
            if entry in vocab:
                raise DataError(
                    f"{self}:{number + 1}: entry {entry!r} is already on line {vocab[entry] + 1}; "
                    "remove one of the two"
                )
            vocab[entry] = number
        return vocab

    def json(self) -> Any:
        """Parse the content as JSON.

        Raises:
            DataError: The content is not JSON.
        """
        import orjson

        try:
            return orjson.loads(self.data)
        except orjson.JSONDecodeError as error:
            raise DataError(f"{self}: not a JSON file ({error})") from error


def digest(*parts: bytes | str) -> str:
    """Return a 32-digit hexadecimal digest of `parts` and of the boundaries between them."""
    state = hashlib.blake2b(digest_size=16)
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        state.update(len(data).to_bytes(8, "little"))
        state.update(data)
    return state.hexdigest()


def extra_ids(count: int) -> list[str]:
    """Return the `count` sentinel entries that `--vocab-extra-ids` appends."""
    return [f"<extra_id_{i}>" for i in range(count)]


def find_sentinels(vocab: Mapping[str, int]) -> list[int]:
    """Return the ids of `<extra_id_0>`, `<extra_id_1>` and so on, up to the first missing one.

    Some models, such as mT5's, put U+2581 (which stands for a space) before each sentinel.
    """
    ids: list[int] = []
    while True:
        entry = f"<extra_id_{len(ids)}>"
        index = vocab.get(entry, vocab.get(f"\u2581{entry}"))
        if index is None:
            return ids
        ids.append(index)
