"""Part of row 7: torchrun continues a run with fewer or more machines, or with a spare one."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from unittest import mock

from tests.reliability.processes import children, module, torchrun, wait_until
from tests.reliability.scoreboard.score import Trials, expect
from tools.chaos import read_metrics

_ITERATIONS = 500  # long enough for an added machine to join, on a busy machine too
_TIMEOUT = 120.0  # seconds
_RDZV_CONFIG = "last_call_timeout=2,keep_alive_interval=2,keep_alive_max_attempt=4"
_NO_FAULT = "none:0:0"

Machine = Callable[[str], AbstractContextManager[int]]


def changing_machines(folder: Path, trials: Trials) -> None:
    """Try runs on machines with one process each, one of which is lost.

    The first continues with the other machine until a new one joins. The second has a spare.
    """
    expected = samples_of(_undisturbed(folder / "calm"))
    for name, nodes, scenario in (("elastic", "1:2", _fewer_and_more), ("spare", "2:2", _spare)):
        inner = folder / name
        inner.mkdir()
        with trials.trial(f"torchrun --nnodes {nodes}, {name}"), _torchrun(inner, nodes) as start:
            sizes = scenario(inner, start)
            expect(samples_of(inner) == expected, "other samples, or another order")
            expect(_sizes(inner) == sizes, f"the run had {_sizes(inner)} processes")


def samples_of(folder: Path) -> dict[int, list[int]]:
    """Return the samples that each iteration of a run saved in `folder` has read."""
    lines = (folder / "save" / "samples.jsonl").read_text().splitlines()
    return {record["iteration"]: record["ids"] for record in map(json.loads, lines)}


def _command(folder: Path, *flags: str) -> list[str]:
    save = str(folder / "save")
    save_flags = ["--save", save, "--load", save, "--save-interval", "10", "--log-sample-ids"]
    save_flags += ["--train-iters", str(_ITERATIONS), "--metrics-jsonl", str(folder / "metrics")]
    return module(*save_flags, "--distributed-timeout-minutes", "0.2", *flags)


def _undisturbed(folder: Path) -> Path:
    folder.mkdir()
    args = ["--standalone", "--nproc-per-node", "1", *_command(folder)]
    with torchrun(args, _NO_FAULT, folder) as (process, output):
        expect(process.wait(_TIMEOUT) == 0, output.read_text()[-500:])
    return folder


@contextmanager
def _torchrun(folder: Path, nodes: str) -> Iterator[Machine]:
    """Yield a function that starts a machine's torchrun and returns its process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    @contextmanager
    def start(name: str) -> Iterator[int]:
        host = f"is_host={int(name == 'first')}"
        args = ["--nnodes", nodes, "--nproc-per-node", "1", "--max-restarts", "9"]
        args += ["--rdzv-backend", "c10d", "--rdzv-id", "elastic", "--local-addr", "127.0.0.1"]
        args += ["--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-conf", f"{host},{_RDZV_CONFIG}"]
        args += _command(folder, "--fault-inject", "step:0:1:slow=0.1@all")
        with torchrun(args, _NO_FAULT, folder, name=name) as (process, _):
            yield process.pid

    with mock.patch.dict(os.environ, {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}):
        yield start


def _fewer_and_more(folder: Path, start: Machine) -> list[int]:
    with ExitStack() as stack:
        first = stack.enter_context(start("first"))
        second = stack.enter_context(start("second"))
        _until_trained(folder, attempts=1)
        _lose(second)
        _until_trained(folder, attempts=2)
        third = stack.enter_context(start("third"))
        _until_ended(first, third)
    return [2, 1, 2]


def _spare(folder: Path, start: Machine) -> list[int]:
    with ExitStack() as stack:
        first = stack.enter_context(start("first"))
        second = stack.enter_context(start("second"))
        _until_trained(folder, attempts=1)
        spare = stack.enter_context(start("spare"))
        _lose(second)
        _until_ended(first, spare)
    return [2, 2]


def _until_trained(folder: Path, attempts: int) -> None:
    """Wait until the run has started this many times, and has made some steps since."""

    def is_trained() -> bool:
        lines = read_metrics(folder / "metrics")
        starts = [index for index, line in enumerate(lines) if line.get("event") == "start"]
        return len(starts) >= attempts and len(lines) > starts[attempts - 1] + 15

    wait_until(is_trained, _TIMEOUT)


def _lose(pid: int) -> None:
    for process in (pid, *children(pid)):
        os.kill(process, signal.SIGKILL)


def _until_ended(*pids: int) -> None:
    def has_ended(pid: int) -> bool:
        path = Path(f"/proc/{pid}/stat")
        return not path.exists() or path.read_text().rpartition(")")[2].split()[0] == "Z"

    wait_until(lambda: all(map(has_ended, pids)), _TIMEOUT)


def _sizes(folder: Path) -> list[int]:
    """Return the number of processes in each attempt."""
    lines = read_metrics(folder / "metrics")
    starts = [line["facts"]["layout"] for line in lines if line.get("event") == "start"]
    return [int(text.split()[0]) for text in starts]
