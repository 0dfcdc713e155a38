"""Reading a run's history from the files in its folder."""

from __future__ import annotations

import json
from pathlib import Path

from megatron.errors import DataError
from megatron.report.history import History

_PATTERNS = ("*.jsonl", "*/*.jsonl")


class MetricsFile:
    """A file of `--metrics-jsonl`, read as it grows.

    Args:
        path: The file.
        history: The history to which its records are added.
    """

    def __init__(self, path: Path, history: History) -> None:
        """Start at the beginning of the file."""
        self._path, self._history = path, history
        self._offset = 0

    def read(self) -> None:
        """Add all complete lines that were written since the last call."""
        with self._path.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break  # it is being written
                self._offset += len(line)
                try:
                    self._history.add(json.loads(line))
                except (
                    ValueError,
                    KeyError,
                    TypeError,
                    OverflowError,
                    RecursionError,
                    AttributeError,
                ):
                    self._history.damaged += 1

    @property
    def rest(self) -> int:
        """The number of bytes after the last complete line."""
        return self._path.stat().st_size - self._offset


def find_metrics(path: Path) -> Path:
    """Return the metrics file of a run, which is `path` itself or in the folder `path`.

    Raises:
        DataError: There is none.
    """
    if path.is_file():
        return path
    if not path.is_dir():
        raise DataError(f"{path}: no such file or folder")
    found = sorted(
        file for pattern in _PATTERNS for file in path.glob(pattern) if _is_metrics(file)
    )
    if not found:
        raise DataError(
            f"{path}: no metrics: train with --metrics-jsonl {path / 'metrics.jsonl'} to write them"
        )
    return found[0]


def _is_metrics(path: Path) -> bool:
    """Return whether the first line is a record of `--metrics-jsonl`."""
    try:
        with path.open("rb") as file:
            History("").add(json.loads(file.readline()))
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        OverflowError,
        RecursionError,
        AttributeError,
    ):
        return False
    return True


def read_run(path: Path) -> History:
    """Return the history of a run.

    Raises:
        DataError: The folder has no metrics, or they are empty.
    """
    metrics = find_metrics(path)
    history = History(path.resolve().name if path.is_dir() else path.resolve().parent.name)
    history.sources.append(str(metrics))
    file = MetricsFile(metrics, history)
    file.read()
    history.damaged += file.rest > 0
    if not history.curves:
        raise DataError(f"{metrics}: no record of an iteration: train for at least one iteration")
    return history
