"""A reader of the layouts that `megatron plan --jsonl` wrote."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.config.arguments import split
from megatron.errors import ConfigError, DataError
from tools.layouts.models import BenchmarkLayout, BenchmarkModel

_SCRIPT = "pretrain_gpt.py"
_FIELDS = {
    **dict.fromkeys(("layout", "script", "flags", "layout_flags"), str),
    "gpus": int,
    "seconds": float,
}


def read_plans(paths: Sequence[Path]) -> BenchmarkModel:
    """Return the run that the files describe, with its layouts in the order of the files.

    Raises:
        ConfigError: The files list different runs, or runs of a different script.
        DataError: A file cannot be read or has a line that the planner did not write.
    """
    flags: str | None = None
    layouts: list[BenchmarkLayout] = []
    for path in paths:
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"--plan {path}: cannot be read: {error}") from None
        for number, line in enumerate(lines, 1):
            where = f"--plan {path}: line {number}"
            record = _read_record(line, where)
            if record["script"] != _SCRIPT:
                raise ConfigError(f"{where} is for {record['script']}: only {_SCRIPT} is measured")
            flags = flags or record["flags"]
            if _settings(record["flags"]) != _settings(flags):
                raise ConfigError(
                    f"{where} is a different run from the first line ({record['flags']}): plan "
                    "all layouts with the same model, batch and flags"
                )
            layouts.append(
                BenchmarkLayout(
                    record["gpus"],
                    record["layout"],
                    record["layout_flags"],
                    predicted_milliseconds=1000.0 * record["seconds"],
                )
            )
    if flags is None:
        raise DataError(f"--plan {' '.join(map(str, paths))}: no layouts")
    return BenchmarkModel(flags, tuple(layouts))


def _read_record(line: str, where: str) -> dict[str, Any]:
    """Return the JSON object of a line.

    Raises:
        DataError: The line is not an object with the planner's fields.
    """
    try:
        record = json.loads(line)
    except ValueError:
        record = None
    if not isinstance(record, dict) or any(
        not isinstance(record.get(name), kind) for name, kind in _FIELDS.items()
    ):
        raise DataError(f"{where}: not a layout: write the file with megatron plan --jsonl")
    return record


def _settings(flags: str) -> set[tuple[str, tuple[str, ...]]]:
    """Return the flags as a set, for a comparison that ignores the order."""
    return {(flag.name, tuple(flag.values)) for flag in split(shlex.split(flags))}
