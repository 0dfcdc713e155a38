"""Run the entry script as a user would, time it from outside, and read its log lines."""

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

_GRACE_SECONDS = 45.0  # torchrun kills its processes 30 s after SIGTERM
_LAST_LINES = 25
_ITERATION = re.compile(
    r"^ iteration +(\d+)/ *\d+ .*?elapsed time per iteration \(ms\): ([\d.]+) .*?lm loss: (\S+)"
)
_MEMORY = re.compile(r"max allocated: ([\d.]+) \|.* max reserved: ([\d.]+)")
_MIB = 1024 * 1024


class BenchmarkError(UserError):
    """A measured run failed, hung or did not log enough."""


@dataclass(frozen=True)
class LogLine:
    """A log line about one or more iterations.

    Attributes:
        iteration: The last of these iterations.
        seconds: Logged seconds per iteration.
        arrived: Seconds between the launch and the arrival of the line.
        loss: The logged loss.
    """

    iteration: int
    seconds: float
    arrived: float
    loss: float


@dataclass(frozen=True)
class RunMeasurements:
    """The measurements of one run, over the iterations after the warm-up.

    Attributes:
        first_iteration: Seconds from the launch to the log line of iteration 1.
        best: Lowest logged seconds per iteration.
        median: Median of the logged seconds per iteration.
        mean: Mean seconds per iteration, measured outside the run from the arrival of its lines.
        peak_allocated: Peak of allocated bytes on the rank where it is highest.
        peak_reserved: Peak of reserved bytes on the rank where it is highest.
        first_loss: Loss of the first logged iteration.
        last_loss: Loss of the last logged iteration.
    """

    first_iteration: float
    best: float
    median: float
    mean: float
    peak_allocated: int
    peak_reserved: int
    first_loss: float
    last_loss: float


def entry_command(
    root: Path, gpus: int, flags: Sequence[str], script: str = "pretrain_gpt.py"
) -> list[str]:
    """Return the command that runs a script in `root`, directly or under torchrun."""
    script = str(root / script)
    if gpus == 1:
        return [sys.executable, script, *flags]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*torchrun, "--nproc-per-node", str(gpus), script, *flags]


def run_process(
    command: Sequence[str], *, root: Path, log: Path, timeout: float
) -> list[tuple[float, str]]:
    """Run a command to its end and return its output.

    Args:
        command: The command and its arguments.
        root: Folder to run in.
        log: File for the whole output.
        timeout: Seconds after which the run is ended.

    Returns:
        Each line of output as (seconds from the launch to its arrival, line).

    Raises:
        BenchmarkError: The run took too long or failed. The message has its last lines.
    """
    lines, code = run_to_end(command, timeout=timeout, folder=root)
    log.write_text("".join(f"{when:9.3f} {line}\n" for when, line in lines), encoding="utf-8")
    if code != 0:
        ending = (
            f"did not end in {timeout:.0f} s" if code is None else f"ended with exit code {code}"
        )
        last_lines = "\n".join(f"    {line}" for _, line in lines[-_LAST_LINES:])
        raise BenchmarkError(
            f"the run {ending}; its last lines (full output in {log}):\n{last_lines}"
        )
    return lines


def run_to_end(
    command: Sequence[str], *, timeout: float, folder: Path | None = None, **environment: str
) -> tuple[list[tuple[float, str]], int | None]:
    """Run a command to its end or timeout, and leave none of its processes running.

    Args:
        command: The command and its arguments.
        timeout: Seconds after which the run is ended.
        folder: Folder to run in. The default is this process's current folder.
        environment: Environment variables to set unless they are already set.

    Returns:
        Each line of output as (seconds from the launch to its arrival, line); and the exit code, or
        `None` if the run timed out.
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
    """Run a process, and end its process group when the block ends."""
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
    """End a process and the processes that it started.

    The process first receives SIGTERM, because torchrun's workers are not in its group and only
    torchrun ends them.
    """
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


def read_log(lines: Sequence[tuple[float, str]]) -> list[LogLine]:
    """Return the log lines about iterations in the output."""
    found = ((when, _ITERATION.match(line)) for when, line in lines)
    return [
        LogLine(int(match[1]), float(match[2]) / 1000, when, float(match[3]))
        for when, match in found
        if match
    ]


def measure(lines: Sequence[tuple[float, str]], *, warmup: int, last: int) -> RunMeasurements:
    """Measure iterations `warmup + 1` to `last` from a run's output.

    Raises:
        BenchmarkError: Log lines are missing, or a loss is not finite.
    """
    logged = read_log(lines)
    before = [line for line in logged if line.iteration <= warmup]
    timed = [line for line in logged if warmup < line.iteration <= last]
    if not before or not timed or timed[-1].iteration < last:
        raise BenchmarkError(
            f"log lines are missing within the {warmup} warm-up iterations or up to iteration "
            f"{last}: the run ended early, or does not log every iteration"
        )
    if not all(math.isfinite(line.loss) for line in logged):
        raise BenchmarkError("a loss is not finite, so the run measures nothing")
    span = timed[-1].arrived - before[-1].arrived
    memory = [match for _, line in lines for match in [_MEMORY.search(line)] if match]
    return RunMeasurements(
        first_iteration=logged[0].arrived,
        best=min(line.seconds for line in timed),
        median=statistics.median(line.seconds for line in timed),
        mean=span / (timed[-1].iteration - before[-1].iteration),
        peak_allocated=max((int(float(m[1]) * _MIB) for m in memory), default=0),
        peak_reserved=max((int(float(m[2]) * _MIB) for m in memory), default=0),
        first_loss=logged[0].loss,
        last_loss=logged[-1].loss,
    )
