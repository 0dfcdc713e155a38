"""Reading a run's history from the files in its folder."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from operator import attrgetter
from pathlib import Path
from typing import Protocol

from megatron.errors import DataError
from megatron.report.history import MALFORMED, Event, History, split_held_out
from megatron.report.timeline import find_timelines

_EVENT_FILES = "events.out.tfevents.*"


class RunRecords(Protocol):
    """Files with the records of a run.

    Attributes:
        history: The history of the run.
        folder: The folder of the run, which may also contain traces.
    """

    history: History
    folder: Path

    def read(self) -> bool:
        """Add the records written since the last call to the history.

        Returns:
            Whether there was anything new.
        """


class MetricsFile:
    """A `--metrics-jsonl` file, read as it grows.

    Attributes:
        history: The history of the run.
        folder: The folder of the file.
    """

    def __init__(self, name: str, path: Path) -> None:
        """Start at the beginning of the file.

        Args:
            name: The name of the run.
            path: The file.
        """
        self._path, self._offset, self.folder = path, 0, path.parent
        self.history = History(name, sources=[str(path)])

    def read(self) -> bool:
        """Add the lines that were written since the last call.

        A last line without a newline is still being written. It is not added until it is complete;
        until then, `history.incomplete` is set. If the file has become shorter, a new `history`
        begins.

        Returns:
            Whether there was a complete new line.
        """
        with self._path.open("rb") as file:
            if os.fstat(file.fileno()).st_size < self._offset:  # another run has replaced the file
                self._offset = 0
                self.history = self.history.empty_copy()
            file.seek(self._offset)
            complete, newline, rest = file.read().rpartition(b"\n")
        self._offset += len(complete + newline)
        self.history.incomplete = bool(rest)
        for line in complete.split(b"\n") if newline else ():
            try:
                self.history.add(json.loads(line))
            except MALFORMED:
                self.history.damaged += 1
        return bool(newline)


class EventFiles:
    """A folder of TensorBoard event files, including those of Megatron-LM.

    Attributes:
        history: The history of the run.
        folder: The folder of the files.
    """

    def __init__(self, name: str, folder: Path) -> None:
        """Open the files.

        Args:
            name: The name of the run.
            folder: The folder that directly contains the files.
        """
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        self.folder = folder
        sizes = {"scalars": 0, "tensors": 0}  # keep all of them
        self._events = EventAccumulator(str(folder), size_guidance=sizes)
        self._counts: dict[str, int] = {}
        self.history = History(name, sources=[str(folder)])

    def read(self) -> bool:
        """Read the event files to their end, or up to their first damaged record.

        Returns:
            Whether there are new scalars or texts. If so, `history` has been replaced.
        """
        events = self._events.Reload()
        tags = events.Tags()
        counts = {tag: len(events.Scalars(tag)) for tag in tags["scalars"]}
        counts |= {tag: len(events.Tensors(tag)) for tag in tags["tensors"]}
        if counts == self._counts:
            return False
        self._counts = counts
        self.history = history = self.history.empty_copy()
        times: dict[int, float] = {}
        for tag in tags["scalars"]:
            if tag.endswith(" vs samples"):
                continue
            points = events.Scalars(tag)
            for point in points:
                history.add_point(tag, point.step, point.value)
                times[point.step] = max(point.wall_time, times.get(point.step, point.wall_time))
            if split_held_out(tag)[1]:
                history.events += [
                    Event("evaluation", point.step, point.wall_time, f"{tag} {point.value:.4f}")
                    for point in points
                ]
        for step in sorted(times):
            history.add_point("time", step, times[step])
        for tag in tags["tensors"]:
            if tag.endswith("/text_summary"):
                self._add_texts(tag.removesuffix("/text_summary"), events.Tensors(tag))
        history.events.sort(key=attrgetter("time"))
        return True

    def _add_texts(self, tag: str, texts: list) -> None:
        """Add the texts of a tag: settings, facts or events of this package, or Megatron-LM's."""
        from tensorboard.util.tensor_util import make_ndarray

        for entry in texts:
            text = make_ndarray(entry.tensor_proto).flatten()[0].decode("utf-8", "replace")
            if tag == "events":
                kind, _, remainder = text.partition(": ")
                self.history.events.append(Event(kind, entry.step, entry.wall_time, remainder))
            elif tag == "settings":
                kind = "resumed" if entry.step else "start"
                self.history.events.append(Event(kind, entry.step, entry.wall_time))
                settings, _, facts = text.partition("\n\n")
                rows = _rows(settings)
                marked = {name.strip("*"): name != name.strip("*") for name in rows}
                self.history.settings = {name.strip("*"): rows[name] for name in rows}
                self.history.changed = frozenset(name for name in marked if marked[name])
                self.history.facts = _rows(facts)
            else:
                self.history.settings[tag] = text


def _rows(table: str) -> dict[str, str]:
    """Return the rows of a two-column Markdown table, without its header."""
    rows = [re.split(r"(?<!\\)\|", line) for line in table.splitlines()[2:]]
    return {row[1].strip(): row[2].strip().replace("\\|", "|") for row in rows if len(row) == 4}


def find_sources(path: Path) -> list[RunRecords]:
    """Return the records of a run, or of every run in a folder of runs. There may be none.

    TensorBoard's files are used only if there are no metrics files.

    Args:
        path: A metrics file, the folder of a run, or a folder with folders of runs.

    Raises:
        DataError: There is no such file or folder.
    """
    if path.is_file():
        return [MetricsFile(path.resolve().parent.name, path)]
    if not path.is_dir():
        raise DataError(f"{path}: no such file or folder")
    name = path.resolve().name
    for events in (False, True):  # event files are read only if there are no metrics files
        sources = _find_in(path, name, events=events) or [
            source
            for folder in sorted(path.iterdir())
            if folder.is_dir()
            for source in _find_in(folder, folder.name, events=events)
        ]
        if len(sources) == 1:
            sources[0].history.name = name
        if sources:
            return sources
    return []


def _find_in(folder: Path, name: str, *, events: bool) -> list[RunRecords]:
    """Return the records of the event files or metrics files in a folder, not in its subfolders."""
    if events:
        return [EventFiles(name, folder)] if any(folder.glob(_EVENT_FILES)) else []
    paths = []
    for path in sorted(folder.glob("*.jsonl")):
        with suppress(OSError, *MALFORMED):  # other JSON lines do not begin with a metrics record
            with path.open("rb") as file:
                History("").add(json.loads(file.readline()))
            paths.append(path)
    if len(paths) == 1:
        return [MetricsFile(name, paths[0])]
    return [MetricsFile(f"{name}/{path.name}", path) for path in paths]


def open_runs(
    paths: Sequence[Path], *, may_be_empty: bool = False, opened: Sequence[RunRecords] = ()
) -> list[RunRecords]:
    """Return the records of all runs, read at least once.

    Args:
        paths: The paths to pass to `find_sources`.
        may_be_empty: Whether to accept folders without runs, and runs without iterations.
        opened: The result of an earlier call. Runs in it that are found again come first and are
            not read again.

    Raises:
        DataError: A path does not exist. Unless `may_be_empty`, also: a folder has no metrics, or a
            run has no iterations yet.
    """
    positions = {tuple(source.history.sources): index for index, source in enumerate(opened)}
    sources: list[RunRecords] = []
    for path in paths:
        path_sources = find_sources(path)
        if not (path_sources or may_be_empty):
            raise DataError(
                f"{path}: no metrics: train with --metrics-jsonl {path / 'metrics.jsonl'} or "
                f"--tensorboard-dir {path} to write them"
            )
        sources += path_sources
    sources.sort(key=lambda source: positions.get(tuple(source.history.sources), len(positions)))
    for index, source in enumerate(sources):
        position = positions.get(tuple(source.history.sources))
        if position is not None:
            # A single run is named by its folder.
            opened[position].history.name = source.history.name
            sources[index] = opened[position]
            continue
        source.read()
        source.history.timelines, source.history.notes = find_timelines(source.folder)
        if not (source.history.curves or may_be_empty):
            files, damaged = ", ".join(source.history.sources), source.history.damaged
            if damaged:
                raise DataError(
                    f"{files}: {damaged} damaged lines and no record of an iteration: give a file "
                    "that --metrics-jsonl wrote"
                )
            raise DataError(
                f"{files}: no record of an iteration yet: try again after the first one"
            )
    return sources
