"""Progress of a task, and its results as a table, as Megatron-LM's log line and as JSON."""

from __future__ import annotations

import errno
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from megatron.checkpoint.find import RELEASE, iteration_of
from megatron.command import print_line
from megatron.config.tasks import TaskConfig
from megatron.durable import expect_no_file, replace_file, storage_errors, writing_to
from megatron.errors import ConfigError

MetricValue = int | float
Metrics = dict[str, MetricValue]


def format_number(value: MetricValue) -> str:
    """Format an integer with thousands separators, or a float with six significant digits."""
    return f"{value:,}" if isinstance(value, int) else f"{value:.6g}"


def format_table(titles: Sequence[str], rows: Sequence[Sequence[str | MetricValue]]) -> str:
    """Format a table, with text aligned to the left and numbers to the right."""
    cells = [[v if isinstance(v, str) else format_number(v) for v in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(titles, *cells, strict=True)]
    is_text = [all(isinstance(row[i], str) for row in rows) for i in range(len(titles))]

    def line(values: Sequence[str]) -> str:
        aligned = (
            value.ljust(width) if left else value.rjust(width)
            for value, width, left in zip(values, widths, is_text, strict=True)
        )
        return "  ".join(aligned).rstrip()

    rule = "  ".join("-" * width for width in widths)
    return "\n".join([line(titles), rule, *map(line, cells)])


def metrics_table(task: str, metrics: Mapping[str, MetricValue]) -> str:
    """Format the metrics of a task as a table with one row for each."""
    return format_table((task, ""), [(key, format_number(value)) for key, value in metrics.items()])


def by_json_key(metrics: Mapping[str, MetricValue]) -> Metrics:
    """Return metrics by their names in results files, which have no spaces."""
    return {key.replace(" ", "_"): value for key, value in metrics.items()}


def megatron_line(
    task: str, headline: Mapping[str, str], metrics: Mapping[str, MetricValue]
) -> str:
    """Format metrics as the line that Megatron-LM's tasks print, for programs that parse it.

    Args:
        task: The task's name.
        headline: Megatron-LM's name for each metric to include, by the metric's name here.
        metrics: The metrics by name.
    """
    parts = [
        f"{name}: {metrics[key]}" if name == "token ratio" else f"{name}: {metrics[key]:.4E}"
        for key, name in headline.items()
    ]
    return f" validation results on {task} | " + " | ".join(parts) + " |"


def results_path(requested: str | None, folder: str, task: str, iteration: int) -> Path:
    """Return the path that --results names, or the default path in the folder of checkpoints.

    The default is outside the folders of single iterations, which are deleted as newer ones are
    saved.
    """
    if requested is not None:
        return Path(requested)
    root = Path(folder)
    if iteration_of(root.absolute().name) or root.absolute().name == RELEASE:
        root = root.absolute().parent
    return root / "evaluation" / f"{task.lower()}-iter_{iteration:07d}.json"


def check_results(options: TaskConfig, data: Sequence[str], resumed: Path | None = None) -> None:
    """Check that --results can be written, before any other work, and create its folder.

    Args:
        options: The flags --results and --overwrite.
        data: The files that the task reads.
        resumed: The --save folder of a run that continues from its own checkpoints. Such a run may
            replace the results that it wrote itself.

    Raises:
        ConfigError: --results is one of the files that the task reads, or it already exists and
            --overwrite is not given.
        StorageError: --results cannot be written.
    """
    if options.results is None:
        return
    path = Path(options.results)
    if any(path.exists() and path.samefile(file) for file in data):
        raise ConfigError(
            f"--results {path}: this file is also read as data: give another name for the results"
        )
    with writing_to("--results", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=path.parent):  # writing the results also creates a file here
            pass
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    # A results file names the --save folder of the run that wrote it.
    if resumed is None or read_results(path).get("save") != str(resumed.resolve()):
        expect_no_file("--results", [path], overwrite=options.overwrite)


def read_results(path: Path) -> dict[str, Any]:
    """Return the content of a results file, or an empty dict if it is missing or damaged."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def report_results(path: Path, content: Mapping[str, Any]) -> None:
    """Write results and print the path of the file.

    Raises:
        StorageError: The folder cannot be written to.
    """
    note = ", replacing earlier ones" if path.exists() else ""
    write_results(path, content)
    print_line(f"results written to {path}{note}")


def write_results(path: Path, content: Mapping[str, Any]) -> None:
    """Write results durably as JSON. An older file is replaced; NaN and infinity become null.

    Raises:
        StorageError: The folder cannot be written to.
    """
    text = json.dumps(_finite(content), indent=2, allow_nan=False) + "\n"
    with storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, text.encode())


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


class TaskProgress:
    """A progress bar if stderr is a terminal, otherwise an occasional line.

    Args:
        enabled: Whether this process shows progress.
        log_interval: The number of batches between lines.
    """

    def __init__(self, *, enabled: bool, log_interval: int) -> None:
        """Store the settings. The bar is created when progress is first shown."""
        self._enabled = enabled
        self._log_interval = log_interval
        self._bar: Any = None

    def __call__(self, batches: int, total: int) -> None:
        """Show that `batches` of `total` batches are done."""
        if not self._enabled:
            return
        if sys.stderr.isatty():
            self._draw(batches, total)
        elif batches % self._log_interval == 0 or batches == total:
            print_line(f"> batch {batches:,} of {total:,}")

    def _draw(self, batches: int, total: int) -> None:
        from tqdm import tqdm

        if self._bar is None:
            self._bar = tqdm(total=total, unit="batch", dynamic_ncols=True, desc="evaluating")
        self._bar.update(batches - self._bar.n)
        if batches == total:
            self._bar.close()
            self._bar = None
