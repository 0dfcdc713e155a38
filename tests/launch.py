"""Run launch scripts as a shell and torchrun would, without starting Python anew.

A new interpreter loads torch for two seconds, torchrun for itself and for each rank. Here the shell
runs the script, but what it would start is only written down, and then run by forks of this
process, which has torch loaded.
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.distributed import freeze_inherited, start_method
from tests.ports import free_port
from tests.repository import ROOT

_RECORD = """#!/bin/sh
env -0 > "$RECORDED/environment"
printf '%s\\0' "${0##*/}" "$@" > "$RECORDED/words"
"""


def run_script(
    words: Sequence[str], environment: Mapping[str, str], *, seconds: float = 240.0
) -> subprocess.CompletedProcess[str]:
    """A shell script with its flags, and the one command that it starts, which is a `python`.

    Returns:
        The script's own code and errors where it starts none; else those of the first rank that
        failed, and the output of all.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "python").write_text(_RECORD)
        (folder / "python").chmod(0o755)
        path = f"{folder}{os.pathsep}{environment['PATH']}"
        done = subprocess.run(
            list(words),
            env={**environment, "PATH": path, "RECORDED": str(folder)},
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
        if done.returncode or not (folder / "words").exists():
            return done
        program, *started = (folder / "words").read_text().split("\0")[:-1]
        lines = (folder / "environment").read_text().split("\0")[:-1]
    given = dict(line.split("=", 1) for line in lines)
    return run_command([program, *started], given, seconds=seconds)


def run_command(
    words: Sequence[str], environment: Mapping[str, str], *, seconds: float = 240.0
) -> subprocess.CompletedProcess[str]:
    """`python ...`, or our launcher on this machine alone: see `run_ranks`."""
    program, *started = words
    assert program == "python", program
    if started[:2] == ["-m", "megatron.processes.torchrun"]:
        launched = started[2:]
    elif started[0].endswith("tools/torchrun.py"):
        launched = started[1:]
    else:
        return run_ranks(started, environment, 1, seconds=seconds)
    from torch.distributed.run import parse_args

    options = parse_args(launched)
    assert options.nnodes in ("1", "1:1"), "another machine is needed"
    command = [options.training_script, *options.training_script_args]
    return run_ranks(command, environment, int(options.nproc_per_node), seconds=seconds)


def fork_steps(monkeypatch: pytest.MonkeyPatch, environment: Mapping[str, str]) -> None:
    """Let the demos run their commands as forks of this process, for which nothing loads again."""
    from megatron.tools import demo

    def run(words: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        done = run_command(words, environment)
        print(done.stdout)
        return done

    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # which a demo sets for itself
    monkeypatch.chdir(ROOT)  # where it starts its commands
    monkeypatch.setattr(demo, "subprocess", SimpleNamespace(run=run))


def run_ranks(
    words: Sequence[str],
    environment: Mapping[str, str],
    count: int = 1,
    *,
    seconds: float = 240.0,
    before: Callable[[], object] | None = None,
) -> subprocess.CompletedProcess[str]:
    """A Python file with its flags, in `count` processes with the variables of torchrun."""
    with tempfile.TemporaryDirectory() as name:
        outputs = [Path(name, str(rank)) for rank in range(count)]
        ranks = start_ranks(words, environment, outputs, outputs, before=before)
        end = time.monotonic() + seconds
        for process in ranks:
            process.join(max(0.0, end - time.monotonic()))
            process.kill()  # one that hangs
            process.join()
        text = "".join(output.read_text() for output in outputs)
    code = next((process.exitcode for process in ranks if process.exitcode), 0)
    return subprocess.CompletedProcess(list(words), code, text, "")


def start_ranks(
    words: Sequence[str],
    environment: Mapping[str, str],
    outputs: Sequence[Path],
    errors: Sequence[Path],
    *,
    port: int | None = None,
    before: Callable[[], object] | None = None,
    is_new: bool = False,
) -> list[BaseProcess]:
    """Start a rank for each of `outputs`, where it writes to; several know of each other.

    Args:
        words: what would follow `python`: a file or `-m module`, and its flags.
        port: where they meet, if not at one that is free.
        before: Called in each rank before it begins, for example to set limits.
        is_new: Whether each rank becomes a new interpreter, which imports everything again.
    """
    count = len(outputs)
    common = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port or free_port())}
    common |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    context = start_method()
    ranks = []
    for rank, streams in enumerate(zip(outputs, errors, strict=True)):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        variables = {**environment, **(common | own if count > 1 else {})}
        work = (list(words), variables, *streams, before, is_new)
        ranks.append(context.Process(target=_as_main, args=work))
    for process in ranks:
        process.start()
    return ranks


def _as_main(
    words: list[str],
    environment: dict[str, str],
    output: Path,
    errors: Path,
    before: Callable[[], object] | None = None,
    is_new: bool = False,
) -> None:
    """Become `python words...`, in a process that has just been forked."""
    freeze_inherited()
    for number, path in ((1, output), (2, errors)):
        with path.open("a") as stream:
            os.dup2(stream.fileno(), number)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", closefd=False)
    if before is not None:
        before()
    if is_new:
        os.execve(sys.executable, [sys.executable, *words], environment)
    os.environ.clear()
    os.environ.update(environment)
    try:
        if words[0] == "-m":
            sys.argv = words[1:]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = words
            sys.path.insert(0, str(Path(words[0]).parent))
            runpy.run_path(words[0], run_name="__main__")
    except Exception:
        sys.excepthook(*sys.exc_info())  # a program may have one of its own
        sys.exit(1)
