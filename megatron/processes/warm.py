"""Ranks forked from a process that has already imported the script's modules.

Importing PyTorch and this package takes seconds, on all cores if a machine has many ranks, and
would have to be repeated at every restart. Our launcher therefore has Python's fork server import
the modules once. Each rank, even after a restart, is a fork of that server and runs the script as
`python` would. The server has no threads, groups or devices, so it is safe to fork.

torchrun runs this file in the forked process, with the script and its arguments.
"""

from __future__ import annotations

import argparse
import ast
import os
import runpy
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from multiprocessing import connection, forkserver, parent_process
from pathlib import Path

from megatron.environment import without_matrix_threads
from megatron.processes.launch import module_search_path, python_path, set_python_path

_ROOT = str(Path(__file__).resolve().parents[2])
_SERVER = b"multiprocessing.forkserver"  # in the command line of the server and its forks
_SCRIPT, _MODULE = "script", "module"


def start_warm(arguments: argparse.Namespace) -> None:
    """Change torchrun's arguments so that ranks are forks of a server, and start the server.

    Nothing changes without --max-restarts, or if torchrun runs something other than a Python file
    or module that exists.

    Args:
        arguments: torchrun's parsed arguments.
    """
    if not arguments.max_restarts or arguments.no_python or arguments.run_path:
        return
    name, kind = arguments.training_script, _MODULE if arguments.module else _SCRIPT
    source = _source_of(name, kind)
    if source is None:  # the ranks will report this
        return
    previous = python_path() or ""
    without_matrix_threads()  # the server must have no threads
    forkserver.set_forkserver_preload(_imports_of(source))
    with module_search_path(
        [str(source.parent), _ROOT] if kind == _SCRIPT else [os.getcwd(), _ROOT]
    ):
        forkserver.ensure_running()
    arguments.training_script_args = [kind, name, previous, *arguments.training_script_args]
    arguments.training_script, arguments.module = str(Path(__file__).resolve()), False
    arguments.run_path, arguments.start_method = True, "forkserver"


def ranks() -> list[int]:
    """Return the process ids of the ranks that this launcher has started and not yet reaped."""
    pids = []
    for pid in _children_of(os.getpid()):
        command = b""
        with suppress(OSError):  # the process has just ended
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        if _SERVER in command:
            pids += _children_of(pid)
        elif b"multiprocessing.resource_tracker" not in command:
            pids.append(pid)
    return pids


def _children_of(pid: int) -> list[int]:
    children = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            children += [int(child) for child in path.read_text().split()]
    return children


def _source_of(name: str, kind: str) -> Path | None:
    if kind == _SCRIPT:
        return Path(name).resolve() if Path(name).is_file() else None
    with suppress(ImportError, ValueError):
        spec = find_spec(name)
        if spec is not None and spec.origin is not None:
            return Path(spec.origin)
    return None


def _imports_of(source: Path) -> list[str]:
    """Return the modules that a file imports at its top level."""
    try:
        body = ast.parse(source.read_bytes()).body
    except (OSError, SyntaxError, ValueError):  # the ranks will report this
        return []
    names = []
    for node in body:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.append(node.module)
    return names


def _run(kind: str, name: str, folders: str, argv: Sequence[str]) -> None:
    """Run the script as `python` would, in this fork of the server.

    Raises:
        SystemExit: The script ended with a code other than 0.
    """
    done = threading.Event()
    threading.Thread(target=_follow_launcher, args=(done,), daemon=True).start()
    set_python_path(folders or None)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    sys.argv = [name, *argv]
    try:
        if kind == _MODULE:
            sys.path.insert(0, os.getcwd())
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(Path(name).resolve().parent))
            runpy.run_path(name, run_name="__main__")
    except SystemExit as ending:
        if ending.code:
            raise
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        sys.exit(1)
    done.set()


def _follow_launcher(done: threading.Event) -> None:
    """Wait for the launcher to end, which nothing else would notice, and then end this process.

    A rank that is training saves a checkpoint and exits, as on any SIGTERM. torchrun makes a rank
    that has finished wait for all the others.
    """
    launcher = parent_process()
    assert launcher is not None, "torchrun starts this process"
    connection.wait([launcher.sentinel])
    if not done.is_set():
        os.kill(os.getpid(), signal.SIGTERM)
        done.wait()
    os._exit(0)


if __name__ == "__main__":
    _run(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4:])
