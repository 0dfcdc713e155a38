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
    argv: Sequence[str], environment: Mapping[str, str], *, seconds: float = 240.0
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
            list(argv),
            env={**environment, "PATH": path, "RECORDED": str(folder)},
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
        if done.returncode or not (folder / "words").exists():
            return done
        program, *args = (folder / "words").read_text().split("\0")[:-1]
        lines = (folder / "environment").read_text().split("\0")[:-1]
    variables = dict(line.split("=", 1) for line in lines)
    return run_command([program, *args], variables, seconds=seconds)


def run_command(
    argv: Sequence[str], environment: Mapping[str, str], *, seconds: float = 240.0
) -> subprocess.CompletedProcess[str]:
    """Run `python ...`, or a launcher on this machine (see `run_ranks`)."""
    program, *args = argv
    assert program in ("python", sys.executable), program
    launchers = ("megatron.processes.torchrun", "torch.distributed.run")
    if args[0] == "-m" and args[1] in launchers:
        launcher_args = args[2:]
    elif args[0].endswith("tools/torchrun.py"):
        launcher_args = args[1:]
    else:
        return run_ranks(args, environment, 1, seconds=seconds)
    from torch.distributed.run import parse_args

    options = parse_args(launcher_args)
    assert options.nnodes in ("1", "1:1"), "another machine is needed"
    command = [options.training_script, *options.training_script_args]
    return run_ranks(command, environment, int(options.nproc_per_node), seconds=seconds)


def fork_steps(
    monkeypatch: pytest.MonkeyPatch,
    environment: Mapping[str, str],
    *,
    new_interpreters: Sequence[str] = (),
) -> None:
    """Let the demos run their commands in forks of this process, where everything is loaded.

    Args:
        monkeypatch: pytest's fixture.
        environment: The commands' environment variables.
        new_interpreters: Scripts that start new interpreters instead, because their library has
            threads that do not survive a fork.
    """
    from megatron.tools import demo

    def run(argv: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        if argv[1] in new_interpreters:
            command = [sys.executable, *argv[1:]]
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, check=False
            )
        else:
            done = run_command(argv, environment)
        print(done.stdout)
        return done

    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # the demo sets this itself
    monkeypatch.chdir(ROOT)  # the folder in which it starts its commands
    monkeypatch.setattr(demo, "subprocess", SimpleNamespace(run=run))


def run_ranks(
    argv: Sequence[str],
    environment: Mapping[str, str],
    count: int = 1,
    *,
    seconds: float = 240.0,
    preexec: Callable[[], object] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a Python file with its flags in `count` processes with torchrun's variables."""
    with tempfile.TemporaryDirectory() as name:
        outputs = [Path(name, str(rank)) for rank in range(count)]
        ranks = start_ranks(argv, environment, outputs, outputs, preexec=preexec)
        deadline = time.monotonic() + seconds
        for process in ranks:
            process.join(max(0.0, deadline - time.monotonic()))
            process.kill()  # if it hangs
            process.join()
        text = "".join(output.read_text() for output in outputs)
    code = next((process.exitcode for process in ranks if process.exitcode), 0)
    return subprocess.CompletedProcess(list(argv), code, text, "")


def start_ranks(
    argv: Sequence[str],
    environment: Mapping[str, str],
    outputs: Sequence[Path],
    errors: Sequence[Path],
    *,
    port: int | None = None,
    preexec: Callable[[], object] | None = None,
    new_interpreter: bool = False,
) -> list[BaseProcess]:
    """Start one rank for each of `outputs`; several ranks can connect to each other.

    Args:
        argv: What would follow `python`: a file or `-m module`, and its flags.
        environment: The environment variables of all ranks, except those of torchrun.
        outputs: A file for each rank's stdout.
        errors: A file for each rank's stderr.
        port: The port at which they meet. By default, a free one.
        preexec: Called in each rank before it begins, for example to set limits.
        new_interpreter: Whether each rank is a new interpreter, which imports everything again.
    """
    count = len(outputs)
    shared_variables = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port or free_port())}
    shared_variables |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    context = start_method()
    ranks = []
    for rank, streams in enumerate(zip(outputs, errors, strict=True)):
        rank_variables = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        variables = {**environment, **(shared_variables | rank_variables if count > 1 else {})}
        args = (list(argv), variables, *streams, preexec, new_interpreter)
        ranks.append(context.Process(target=_as_main, args=args))
    for process in ranks:
        process.start()
    return ranks


def _as_main(
    argv: list[str],
    environment: dict[str, str],
    output: Path,
    errors: Path,
    preexec: Callable[[], object] | None = None,
    new_interpreter: bool = False,
) -> None:
    """Turn this newly forked process into `python words...`."""
    freeze_inherited()
    for descriptor, path in ((1, output), (2, errors)):
        with path.open("a") as stream:
            os.dup2(stream.fileno(), descriptor)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", closefd=False)
    if preexec is not None:
        preexec()
    if new_interpreter:
        os.execve(sys.executable, [sys.executable, *argv], environment)
    os.environ.clear()
    os.environ.update(environment)
    try:
        if argv[0] == "-m":
            sys.argv = argv[1:]
            runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = argv
            sys.path.insert(0, str(Path(argv[0]).parent))
            runpy.run_path(argv[0], run_name="__main__")
    except Exception:
        sys.excepthook(*sys.exc_info())  # a program may install its own hook
        sys.exit(1)
