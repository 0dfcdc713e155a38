"""Runs of the entry script as a user starts them, timed from outside, and what their lines say."""

from __future__ import annotations

import math
import os
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from megatron.errors import UserError

_GRACE_SECONDS = 45.0  # torchrun itself kills its processes 30 s after it was asked to end
_SHOWN_LINES = 25
_ITERATION = re.compile(
    r"^ iteration +(\d+)/ *\d+ .*?elapsed time per iteration \(ms\): ([\d.]+) .*?lm loss: (\S+)"
)
_MEMORY = re.compile(r"max allocated: ([\d.]+) \|.* max reserved: ([\d.]+)")
_MIB = 1024 * 1024


class BenchmarkError(UserError):
    """A run that was to be measured failed, hung or told too little."""


@dataclass(frozen=True)
class Logged:
    """One log line.

    Attributes:
        iteration: the last one that the line covers.
        seconds: of one iteration, as logged.
        arrived: seconds after the launch at which the line came.
        loss: as logged.
    """

    iteration: int
    seconds: float
    arrived: float
    loss: float


@dataclass(frozen=True)
class Measured:
    """What one run showed, over the timed iterations: those after the warm-up.

    Attributes:
        first_iteration: seconds from launch to the end of iteration 1, by its log line.
        best, median: seconds of one iteration, over the log lines.
        mean: seconds of one iteration by the clock outside the run, from line to line.
        peak_allocated, peak_reserved: bytes, of the rank that says most.
        first_loss, last_loss: of the first and the last logged iteration.
    """

    first_iteration: float
    best: float
    median: float
    mean: float
    peak_allocated: int
    peak_reserved: int
    first_loss: float
    last_loss: float


def entry_command(root: Path, gpus: int, flags: Sequence[str]) -> list[str]:
    """pretrain_gpt.py of the checkout `root`, alone or under torchrun."""
    script = str(root / "pretrain_gpt.py")
    if gpus == 1:
        return [sys.executable, script, *flags]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*torchrun, "--nproc-per-node", str(gpus), script, *flags]


def run_process(
    command: Sequence[str], *, root: Path, log: Path, timeout: float
) -> list[tuple[float, str]]:
    """Run to the end; every line of output with the seconds after the launch at which it came.

    Args:
        command: the words.
        root: folder to run in.
        log: file for the whole output.
        timeout: seconds after which the run is ended.

    Raises:
        BenchmarkError: it took too long or failed; the message has its last lines.
    """
    lines, code = run_to_end(command, timeout=timeout, folder=root)
    log.write_text("".join(f"{when:9.3f} {line}\n" for when, line in lines), encoding="utf-8")
    if code != 0:
        what = f"did not end in {timeout:.0f} s" if code is None else f"ended with exit code {code}"
        last = "\n".join(f"    {line}" for _, line in lines[-_SHOWN_LINES:])
        raise BenchmarkError(f"the run {what}; its last lines (all of them in {log}):\n{last}")
    return lines


def run_to_end(
    command: Sequence[str], *, timeout: float, folder: Path | None = None, **environment: str
) -> tuple[list[tuple[float, str]], int | None]:
    """Run, whatever comes of it; nothing that it has started stays behind.

    Args:
        command: the words.
        timeout: seconds after which the run is ended.
        folder: to run in; None: this process's.
        environment: variables, where they are not set.

    Returns:
        Every line of output with the seconds after the launch at which it came; and the exit code,
        None where the run had to be ended.
    """
    lines: list[tuple[float, str]] = []
    start = time.perf_counter()
    with _process(command, folder, environment) as process:
        assert process.stdout is not None
        reader = threading.Thread(target=_collect, args=(process.stdout, start, lines))
        reader.start()
        try:
            code: int | None = process.wait(timeout)
        except subprocess.TimeoutExpired:
            code = None
            _end(process)
        reader.join(_GRACE_SECONDS)
    return lines, code


@contextmanager
def _process(
    command: Sequence[str], folder: Path | None, environment: Mapping[str, str]
) -> Iterator[subprocess.Popen[str]]:
    """A process whose whole group is gone at the end of the block."""
    process = subprocess.Popen(
        command,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env={**environment, **os.environ, "PYTHONUNBUFFERED": "1"},
        start_new_session=True,
    )
    try:
        yield process
    finally:
        _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    """End a process and what it started: asked first, because torchrun's workers are not in its
    group and only torchrun ends them."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _collect(stream: object, start: float, lines: list[tuple[float, str]]) -> None:
    for line in stream:  # type: ignore[attr-defined]
        lines.append((time.perf_counter() - start, line.rstrip("\n")))


def read_log(lines: Sequence[tuple[float, str]]) -> list[Logged]:
    """The log lines among all lines."""
    found = ((when, _ITERATION.match(line)) for when, line in lines)
    return [
        Logged(int(match[1]), float(match[2]) / 1000, when, float(match[3]))
        for when, match in found
        if match
    ]


def measure(lines: Sequence[tuple[float, str]], *, warmup: int, last: int) -> Measured:
    """What a run's output says about iterations `warmup + 1` to `last`.

    Raises:
        BenchmarkError: log lines are missing, or a loss is not finite.
    """
    logged = read_log(lines)
    before = [line for line in logged if line.iteration <= warmup]
    timed = [line for line in logged if warmup < line.iteration <= last]
    if not before or not timed or timed[-1].iteration < last:
        raise BenchmarkError(
            f"no log lines both within the {warmup} iterations of warm-up and up to iteration "
            f"{last}: the run ended before, or does not log each iteration"
        )
    if not all(math.isfinite(line.loss) for line in logged):
        raise BenchmarkError("a loss is not finite: such a run measures nothing")
    span = timed[-1].arrived - before[-1].arrived
    memory = [match for _, line in lines for match in [_MEMORY.search(line)] if match]
    return Measured(
        first_iteration=logged[0].arrived,
        best=min(line.seconds for line in timed),
        median=statistics.median(line.seconds for line in timed),
        mean=span / (timed[-1].iteration - before[-1].iteration),
        peak_allocated=max((int(float(m[1]) * _MIB) for m in memory), default=0),
        peak_reserved=max((int(float(m[2]) * _MIB) for m in memory), default=0),
        first_loss=logged[0].loss,
        last_loss=logged[-1].loss,
    )
