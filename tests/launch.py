"""Run launch scripts as a shell and torchrun would, without starting new interpreters.

A new interpreter takes two seconds to load torch, and torchrun needs one for itself and one for
each rank. Here the shell runs the script, but the command that it would start is only recorded,
and then run in forks of this process, which has already loaded torch.
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
    """Run a shell script with its flags, and the single `python` command that it starts.

    Returns:
        The script's own exit code and errors if it starts no command. Otherwise the exit code and
        errors of the first rank that failed, and the output of all ranks.
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
    """Run `python ...`, or a launcher on this machine (see `run_ranks`)."""
    program, *started = words
    assert program in ("python", sys.executable), program
    launchers = ("megatron.processes.torchrun", "torch.distributed.run")
    if started[0] == "-m" and started[1] in launchers:
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


def fork_steps(
    monkeypatch: pytest.MonkeyPatch, environment: Mapping[str, str], *, anew: Sequence[str] = ()
) -> None:
    """Let the demos run their commands in forks of this process, where everything is loaded.

    Args:
        monkeypatch: pytest's fixture.
        environment: The commands' environment variables.
        anew: Scripts that start new interpreters instead, because their library has threads that
            do not survive a fork.
    """
    from megatron.tools import demo

    def run(words: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        if words[1] in anew:
            started = [sys.executable, *words[1:]]
            done = subprocess.run(
                started, env=environment, capture_output=True, text=True, check=False
            )
        else:
            done = run_command(words, environment)
        print(done.stdout)
        return done

    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # the demo sets this itself
    monkeypatch.chdir(ROOT)  # the folder in which it starts its commands
    monkeypatch.setattr(demo, "subprocess", SimpleNamespace(run=run))


def run_ranks(
    words: Sequence[str],
    environment: Mapping[str, str],
    count: int = 1,
    *,
    seconds: float = 240.0,
    before: Callable[[], object] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a Python file with its flags in `count` processes with torchrun's variables."""
    with tempfile.TemporaryDirectory() as name:
        outputs = [Path(name, str(rank)) for rank in range(count)]
        ranks = start_ranks(words, environment, outputs, outputs, before=before)
        end = time.monotonic() + seconds
        for process in ranks:
            process.join(max(0.0, end - time.monotonic()))
            process.kill()  # if it hangs
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
    """Start one rank for each of `outputs`; several ranks can connect to each other.

    Args:
        words: What would follow `python`: a file or `-m module`, and its flags.
        port: The port at which they meet. By default, a free one.
        before: Called in each rank before it begins, for example to set limits.
        is_new: Whether each rank is a new interpreter, which imports everything again.
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
    """Turn this newly forked process into `python words...`."""
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
        sys.excepthook(*sys.exc_info())  # a program may install its own hook
        sys.exit(1)
