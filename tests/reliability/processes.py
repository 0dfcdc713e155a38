"""The faulty toy, with each rank a fork of this process or under torchrun."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

from tests.launch import start_ranks
from tests.repository import ROOT, command_environment

TIMEOUT = 4.0  # seconds that a rank may keep others waiting
TOY = [
    *("--config", str(ROOT / "examples" / "gpt_tiny.yaml"), "--num-workers", "0"),
    *("--micro-batch-size", "1", "--global-batch-size", "4", "--seq-length", "16"),
    *("--hidden-size", "32", "--train-iters", "4", "--eval-iters", "0"),
    *("--distributed-timeout-minutes", f"{TIMEOUT / 60:.4f}"),
]
# Faults injected by --fault-inject: the point and the kind. `faulty_pretrain` has the others.
_INJECTED = {
    "stop": ("forward", "stop"),
    "kill": ("forward", "kill"),
    "sleep": ("forward", "hang"),
    "load": ("data", "hang"),
}
_MODULE = ["-m", "tests.reliability.faulty_pretrain", *TOY]


@dataclass(frozen=True)
class Outcome:
    """A rank's exit code, its stderr, and the seconds from the fault until it ended."""

    code: int
    errors: str
    seconds: float


def environment(fault: str, log: Path) -> dict[str, str]:
    """Return the environment of a process that gets `fault`, "kind:rank:iteration"."""
    return command_environment(FAULT=fault, FAULT_LOG=str(log))


def run_ranks(count: int, fault: str, folder: Path, *flags: str) -> list[Outcome | None]:
    """Return every rank's outcome; `None` for a stopped one, which is killed in the end."""
    log = folder / "fault"
    errors = [folder / f"errors{rank}" for rank in range(count)]
    args = [*_MODULE, *flags]
    kind, rank, iteration = fault.split(":")
    if kind in _INJECTED:
        point, injected = _INJECTED[kind]
        args += ["--fault-inject", f"{point}:{rank}:{iteration}:{injected}"]
        fault = "none:0:0"
    variables = {**environment(fault, log), "READY": str(folder)}
    processes = start_ranks(args, variables, [Path(os.devnull)] * count, errors)
    end_times = _wait_for_exits(processes, 240.0)
    match = re.search(r"fault injected at ([\d.]+)", "".join(map(Path.read_text, errors)))
    fault_time = float(match[1] if match else log.read_text() if log.exists() else time.time())
    return [
        Outcome(process.exitcode or 0, errors[rank].read_text(), end_time - fault_time)
        if (end_time := end_times.get(rank)) is not None
        else None
        for rank, process in enumerate(processes)
    ]


def _wait_for_exits(processes: list[BaseProcess], seconds: float) -> dict[int, float]:
    """Return when each process ended. All but stopped ones must within `seconds`; kill the rest."""
    end_times: dict[int, float] = {}
    deadline = time.monotonic() + seconds
    while len(end_times) < len(processes) and time.monotonic() < deadline:
        time.sleep(0.05)
        for rank, process in enumerate(processes):
            if rank not in end_times and process.exitcode is not None:
                end_times[rank] = time.time()
        running = [p for rank, p in enumerate(processes) if rank not in end_times]
        if running and all(_is_stopped(p.pid or 0) for p in running):
            break
    for process in processes:
        process.kill()
        process.join()
    return end_times


def _is_stopped(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    return False


@contextmanager
def torchrun(
    args: list[str],
    fault: str,
    folder: Path,
    *,
    prefix: tuple[str, ...] = (),
    name: str = "out",
    launcher: str = "torch.distributed.run",
) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """Run the toy under torchrun `prefix` a namespace; yield it and its output, then kill it."""
    output = folder / name
    program = [*prefix, sys.executable, "-m", launcher]
    with output.open("w") as stream:
        process = subprocess.Popen(
            [*program, *args],
            env=environment(fault, folder / "fault"),
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd=ROOT,
        )
    try:
        yield process, output
    finally:
        for pid in [*children(process.pid), process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


def children(pid: int) -> list[int]:
    """Return the running processes that `pid` has started."""
    pids = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
            if int(parent) == pid and state != "Z":
                pids.append(int(stat.parent.name))
    return pids


def has_ended(pid: int) -> bool:
    """Return whether a process has ended, though nobody may have asked for its exit code."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    return True


def wait_until(condition: Callable[[], object], seconds: float) -> None:
    """Wait until a condition holds. Raises AssertionError if it takes longer."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "not within the time"
        time.sleep(0.05)


def module(*flags: str) -> list[str]:
    """Return what torchrun is to run."""
    return [*_MODULE, *flags]
