"""Files with one JSON object per line, which a program reads line by line or appends to."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from megatron.config.arguments import MAX_LINE_MB
from megatron.data.text_input import load_line
from megatron.durable import replace_file, storage_errors
from megatron.errors import DataError, StorageError

Setting = str | int | float


class JsonLine(NamedTuple):
    """A line of a JSON lines file.

    Attributes:
        number: The number of the line in the file, starting at 1.
        start: The byte offset at which the line begins.
        fields: The JSON object in the line.
    """

    number: int
    start: int
    fields: dict[str, Any]


def json_object(data: bytes) -> dict[str, Any]:
    """Return the JSON object in `data`, or an empty dictionary if `data` is not a JSON object."""
    try:
        fields = load_line(data)
    except ValueError:
        return {}
    return fields if isinstance(fields, dict) else {}


def read_objects(path: Path, flag: str, end: int | None = None) -> Iterator[JsonLine]:
    """Yield the lines of a file, using bounded memory.

    Args:
        path: The file.
        flag: The flag that names the file, for error messages.
        end: The byte at which to stop: lines that begin there or later are not read. `None` means
            the end of the file.

    Raises:
        DataError: The file cannot be read, or a line is too long, not a JSON object or an empty
            one.
    """
    limit = MAX_LINE_MB << 20
    number = start = 0
    try:
        with path.open("rb") as file:
            while (end is None or start < end) and (line := file.readline(limit + 1)):
                number += 1
                if len(line) > limit:
                    raise DataError(
                        f"{flag} {path}: line {number} is longer than {MAX_LINE_MB} MiB: fix or "
                        "remove the line"
                    )
                fields = json_object(line)
                if not fields:
                    raise DataError(
                        f"{flag} {path}: line {number} is not a JSON object: fix or remove the line"
                    )
                yield JsonLine(number, start, fields)
                start += len(line)
    except OSError as error:
        raise DataError(
            f"{flag} {path} cannot be read ({error.strerror or error}): give a readable file"
        ) from error


def save_or_check_settings(
    path: Path, settings: Mapping[str, Setting], num_lines: int, origin: str
) -> None:
    """Save the settings next to a new file, or compare them with those of an existing file.

    The settings are stored in `FILE.settings.json`, as a JSON object from flag to value. Nothing is
    saved if the path is not a regular file, such as /dev/null. If the file has lines but its
    settings are missing, print a warning.

    Args:
        path: The file.
        settings: The settings with which further lines will be produced.
        num_lines: The number of lines in the file.
        origin: How the lines were produced, as a plural noun and a verb: "samples were drawn".

    Raises:
        StorageError: The lines were produced with different settings, and the message lists the
            flags and both values; or the settings cannot be read or written.
    """
    if not path.is_file():  # nothing can be saved next to /dev/null
        return
    settings_path = path.with_name(f"{path.name}.settings.json")
    with storage_errors(settings_path):
        if not num_lines:
            replace_file(settings_path, json.dumps(settings, indent=2).encode() + b"\n")
            return
        if not settings_path.exists():
            print(
                f"WARNING: {settings_path} is missing: cannot check whether the existing {origin} "
                "with the same settings",
                flush=True,
            )
            return
        saved = json_object(settings_path.read_bytes())
    if not saved:
        raise StorageError(
            f"{settings_path} does not contain the settings of {origin.partition(' ')[0]}: remove "
            "it, or name another file"
        )
    differing = [
        f"{name} was {saved.get(name, 'not used')}, now {settings.get(name, 'not used')}"
        for name in {**settings, **saved}
        if settings.get(name) != saved.get(name)
    ]
    if differing:
        raise StorageError(
            f"{path}: its {num_lines} {origin} with different settings:\n  "
            + "\n  ".join(differing)
            + "\nuse the earlier values, name another file, or remove this one (to continue "
            f"anyway, remove only {settings_path.name})"
        )
