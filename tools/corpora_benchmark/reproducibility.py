"""Check that a corpus has the same bytes with any process count and executor, and after kills.

`tools/benchmark_corpora.py --prove` calls this; nothing here measures time.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple
from unittest import mock

from megatron.corpora.run import DATASET, PLAN_FILE
from megatron.durable import TEMPORARY

_BUILD = Path(__file__).resolve().parents[1] / "build_corpus.py"
_TRIES = 5  # attempts to stop a run at a moment that may last only milliseconds


class Moment(NamedTuple):
    """A moment of a run, recognized by the files that exist.

    Attributes:
        name: A description of what the run is doing.
        is_now: A function of the corpus folder that returns whether this is the moment.
    """

    name: str
    is_now: Callable[[Path], bool]


def prove(args: Sequence[str], folder: Path) -> Iterator[tuple[str, bool]]:
    """Yield each way to build a corpus, and whether it gives the same bytes as one process.

    Args:
        args: The command line of build_corpus.py without `--output`, `--workers` and `--executor`.
        folder: A folder for the outputs, of which at most two exist at a time.
    """
    reference = folder / "first"
    _build(args, reference, 1)
    expected = digest(reference)

    def same(output: Path) -> bool:
        actual = digest(output)
        shutil.rmtree(output)
        return actual == expected

    for workers in (2, 4):
        _build(args, folder / "output", workers)
        yield f"{workers} processes", same(folder / "output")
    _build_by_datatrove(args, folder / "output")
    yield "datatrove's own local executor, 2 processes", same(folder / "output")
    if importlib.util.find_spec("ray") is not None:
        _build(args, folder / "output", 2, "--executor", "ray")
        yield "datatrove's Ray executor, 2 workers", same(folder / "output")
    for moment in _moments():
        _build_killed(args, folder / "output", [moment])
        yield f"killed {moment.name}, then continued", same(folder / "output")
    _build_killed(args, folder / "output", _moments())
    yield "killed at all of these moments, one after the other", same(folder / "output")


def digest(corpus: Path) -> str:
    """Return a digest of all files that a pipeline leaves for the user."""
    files = [*corpus.glob("text/*"), *corpus.glob("dropped/*/*"), *corpus.glob(f"{DATASET}.*")]
    files += [corpus / name for name in ("report.json", "report.png", PLAN_FILE)]
    combined = hashlib.sha256()
    for file in sorted(files):
        file_digest = hashlib.sha256(file.read_bytes()).hexdigest()
        combined.update(f"{file.relative_to(corpus)} {file_digest}\n".encode())
    return combined.hexdigest()


def _command(args: Sequence[str], output: Path, workers: int, *extra_args: str) -> list[str]:
    start = [sys.executable, str(_BUILD), *args, "--output", str(output)]
    return [*start, "--workers", str(workers), *extra_args]


def _build(args: Sequence[str], output: Path, workers: int, *extra_args: str) -> None:
    command = _command(args, output, workers, *extra_args)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def _build_by_datatrove(args: Sequence[str], output: Path) -> None:
    """Build with datatrove's own executor instead of ours."""
    from datatrove.executor.local import LocalPipelineExecutor

    from megatron.corpora import local
    from megatron.tools import build_corpus

    quiet = contextlib.redirect_stdout(io.StringIO())
    with mock.patch.object(local, "LocalExecutor", LocalPipelineExecutor), quiet:
        command = _command(args, output, 2)[2:]
        build_corpus.run(build_corpus.build_parser().parse_args(command))


def _moments() -> list[Moment]:
    """Return moments at the beginning and in the middle of stages, and before the report."""
    stages = {"clean": "work/clean", "select": "text", "tokenize": "work/tokens"}
    moments = [
        moment
        for stage, subfolder in stages.items()
        for moment in (
            Moment(f"in the first file of {stage!r}", _writes(subfolder)),
            Moment(f"in the middle of {stage!r}", _is_half(subfolder)),
        )
    ]
    moments.insert(2, Moment("in 'groups'", _writes("work/groups")))
    moments.append(Moment("while the dataset is joined", _writes(".", DATASET)))
    return [
        *moments,
        Moment("before the report", lambda corpus: (corpus / f"{DATASET}.idx").exists()),
    ]


def _writes(subfolder: str, name: str = "") -> Callable[[Path], bool]:
    """Return a function that tests for a complete or unfinished file that begins with `name`."""
    return lambda corpus: any((corpus / subfolder).glob(f"{name or '*'}*"))


def _is_half(subfolder: str) -> Callable[[Path], bool]:
    """Return a function that tests whether at least half of the pieces in a folder are complete."""

    def is_half(corpus: Path) -> bool:
        pieces = len(json.loads((corpus / PLAN_FILE).read_bytes())["pieces"])
        files = [file for file in (corpus / subfolder).glob("*") if TEMPORARY not in file.name]
        return len({file.stem for file in files}) >= pieces // 2

    return is_half


def _build_killed(args: Sequence[str], output: Path, moments: Sequence[Moment]) -> None:
    """Build a corpus, and send SIGKILL to all of its processes at each moment.

    Raises:
        RuntimeError: In every attempt, the moment had passed before the signal.
    """
    for moment in moments:
        for _ in range(_TRIES):
            if _is_killed(args, output, moment):
                break
            shutil.rmtree(output)  # the run was complete
        else:
            raise RuntimeError(f"the run could not be killed {moment.name}")
    _build(args, output, 2)


def _is_killed(args: Sequence[str], output: Path, moment: Moment) -> bool:
    process = subprocess.Popen(
        _command(args, output, 2), stdout=subprocess.DEVNULL, start_new_session=True
    )
    while process.poll() is None:
        if (output / PLAN_FILE).exists() and moment.is_now(output):
            os.killpg(process.pid, signal.SIGKILL)
            break
        time.sleep(0.0005)
    return process.wait() == -signal.SIGKILL
