"""The launcher exits with the run's code, and gives ranks time to save on SIGTERM."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from megatron.errors import EXIT_SAVED_ON_SIGNAL, CrashLoopError
from megatron.processes import torchrun, warm
from megatron.processes.launch import python_path
from megatron.processes.torchrun import first_failure
from tests.reliability.processes import has_ended, wait_until
from tests.repository import ROOT, command_environment

_RANK = """
import os, signal, sys, time
from pathlib import Path

def save(number, frame):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(3)
    Path(folder, "saved" + rank).touch()
    while len(list(Path(folder).glob("saved*"))) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.01)  # ranks save together
    sys.exit(3)

signal.signal(signal.SIGTERM, save)
folder, rank = sys.argv[1], os.environ["RANK"]
Path(folder, "ready" + rank).touch()
code = int(sys.argv[2])
if code < 0:
    os.kill(os.getpid(), -code)
elif code < 100:
    sys.exit(code)
while True:
    time.sleep(1)
"""


def _start(folder: Path, code: int, count: int, *flags: str) -> subprocess.Popen[str]:
    (folder / "rank.py").write_text(_RANK)
    words = ["--standalone", "--nproc-per-node", str(count), *flags]
    words += [str(folder / "rank.py"), str(folder)]
    # torchrun would kill the ranks one second after a signal, before they have saved.
    # It also prints a warning if OMP_NUM_THREADS is not set.
    return subprocess.Popen(
        [sys.executable, "-m", "megatron.processes.torchrun", *words, str(code)],
        env=command_environment(TORCH_ELASTIC_SHUTDOWN_TIMEOUT="1"),
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize(
    ("failures", "expected"),
    [
        ([(100, -signal.SIGTERM), (100, 4)], 4),
        ([(100, 3), (100, -signal.SIGTERM), (100, 9)], 9),
        ([(100, 4), (100, -signal.SIGTERM)], 4),
        ([(100, -signal.SIGTERM), (101, 4)], -signal.SIGTERM),  # it began
        ([(101, -signal.SIGTERM), (100, 3)], 3),
        ([(100, 3), (100, 3)], 3),
    ],
)
def test_a_rank_that_the_launcher_ended_is_not_the_cause(
    failures: list[tuple[int, int]], expected: int
) -> None:
    ranks: list[Any] = [SimpleNamespace(timestamp=at, exitcode=code) for at, code in failures]
    assert first_failure(ranks).exitcode == expected


@pytest.mark.parametrize(
    ("source", "imported"),
    [
        (
            "import a.b as c, d\nfrom e import f\nfrom . import g\nfrom .h import i",
            ["a.b", "d", "e"],
        ),
        ("x = 1\nimport j\nif x:\n    import k\n", ["j"]),
        ("import a\nthis is no Python", []),
        ("import a\0", []),
    ],
)
def test_the_modules_that_a_file_imports(source: str, imported: list[str], tmp_path: Path) -> None:
    (tmp_path / "file.py").write_text(source)
    assert warm._imports_of(tmp_path / "file.py") == imported
    assert warm._imports_of(tmp_path / "none.py") == []


def test_which_runs_start_from_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[object] = []
    preloaded: list[str] = []
    monkeypatch.setattr(warm.forkserver, "set_forkserver_preload", preloaded.extend)
    monkeypatch.setattr(
        warm.forkserver, "ensure_running", lambda: started.append((preloaded[:], python_path()))
    )
    monkeypatch.setattr(warm, "without_matrix_threads", lambda: started.append("no threads"))
    monkeypatch.setenv("PYTHONPATH", "before")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "folder").mkdir()
    script = tmp_path / "folder" / "script.py"
    for file in (script, tmp_path / "rank_of_mine.py"):
        file.write_text("import json\n")

    def asked(**changes: Any) -> argparse.Namespace:
        named = {"training_script": str(script), "module": False, "training_script_args": ["--a"]}
        plain = {"max_restarts": 1, "no_python": False, "run_path": False}
        return argparse.Namespace(**{**named, **plain, **changes})

    for changes in (
        {"max_restarts": 0},
        {"no_python": True},
        {"run_path": True},
        {"training_script": "none.py"},
        {"training_script": "no_such_module", "module": True},
        {"training_script": "..", "module": True},
        {"training_script": "folder", "module": True},  # a package without a file
    ):
        arguments = asked(**changes)
        warm.start_warm(arguments)
        assert arguments == asked(**changes)
    assert not started
    server = {"training_script": warm.__file__, "module": False, "run_path": True}
    for kind, name in (("script", str(script)), ("module", "rank_of_mine")):
        preloaded.clear()
        arguments = asked(training_script=name, module=kind == "module")
        warm.start_warm(arguments)
        words = [kind, name, "before", "--a"]
        assert arguments == asked(**server, training_script_args=words, start_method="forkserver")
        own = script.parent if kind == "script" else tmp_path
        folders = os.pathsep.join([str(own), str(ROOT), "before"])
        assert started == ["no threads", (["json"], folders)]
        started.clear()
        assert python_path() == "before"


def test_a_signal_is_passed_on_to_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    requested, killed = threading.Event(), list[tuple[int, int]]()

    def kill(pid: int, number: int) -> None:
        killed.append((pid, number))
        if pid == 7:
            raise ProcessLookupError

    monkeypatch.setattr(torchrun, "ranks", lambda: [7, 8])
    monkeypatch.setattr(os, "kill", kill)
    torchrun._pass_on(requested, signal.SIGTERM, None)
    assert requested.is_set()
    assert killed == [(7, signal.SIGTERM), (8, signal.SIGTERM)]
    monkeypatch.setattr(torchrun, "ranks", list)
    with pytest.raises(SystemExit) as ended:
        torchrun._pass_on(threading.Event(), signal.SIGTERM, None)
    assert ended.value.code == 128 + signal.SIGTERM


@pytest.mark.parametrize("word", ["-h", "--help"])
def test_help_needs_no_torch(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert torchrun.main([word, "more"]) == 0
    assert capsys.readouterr().out.startswith("usage: python -m megatron.processes.torchrun")


def _failure(code: int) -> ChildFailedError:
    return ChildFailedError("rank.py", {0: ProcessFailure(0, 1234, code, "")})


def _launched(run: Callable[[argparse.Namespace], None], monkeypatch: pytest.MonkeyPatch) -> int:
    """Run the launcher in this process with `run` as torchrun, and return its exit code."""
    warmed, ran = [], []

    def watched(arguments: argparse.Namespace) -> None:
        ran.append(arguments)
        run(arguments)

    names = ("MEGATRON_LAUNCHER_SIGNAL", "MEGATRON_LAUNCHER_PID")
    prefix = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"
    for name in (*names, prefix):
        monkeypatch.setenv(name, "")  # so that it is restored
    monkeypatch.delenv(prefix)
    monkeypatch.setattr("torch.distributed.run.run", watched)
    monkeypatch.setattr(torchrun, "start_warm", warmed.append)
    monkeypatch.setattr(sys, "argv", ["torchrun", "--nproc-per-node", "2", "rank.py", "--a"])
    logger = logging.getLogger("torch.distributed.elastic.multiprocessing.api")
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    try:
        code = torchrun.main()
        assert torchrun._without_traceback in logger.filters
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        logger.removeFilter(torchrun._without_traceback)
        for number, handler in handlers.items():
            signal.signal(number, handler)
    (arguments,) = ran
    assert warmed == ran
    assert (arguments.nproc_per_node, arguments.training_script) == ("2", "rank.py")
    assert arguments.training_script_args == ["--a"]
    assert "SIGTERM" not in arguments.signals_to_handle
    assert [os.environ[name] for name in names] == [str(signal.SIGUSR2.value), str(os.getpid())]
    assert os.environ[prefix] == "[rank ${rank}] "
    return code


@pytest.mark.parametrize(
    ("ending", "code", "is_printed"),
    [
        (None, 0, False),
        (_failure(9), 9, True),
        (_failure(-signal.SIGKILL), 137, True),
        (_failure(EXIT_SAVED_ON_SIGNAL), 3, False),
        (SignalException("a crash loop", signal.SIGUSR2), CrashLoopError.exit_code, False),
        (SignalException("the run saved", signal.SIGUSR1), 3, False),
        (SignalException("Ctrl-C", signal.SIGINT), 130, False),
    ],
    ids=["done", "failed", "killed", "saved", "crash loop", "saved after a signal", "Ctrl-C"],
)
def test_the_exit_code_of_the_launcher_says_how_the_run_ended(
    ending: Exception | None,
    code: int,
    is_printed: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def run(_: argparse.Namespace) -> None:
        signal.raise_signal(signal.SIGUSR1)  # the run saved, but nobody asked the launcher to end
        if ending is not None:
            raise ending

    assert _launched(run, monkeypatch) == code
    assert (" FAILED" in capsys.readouterr().err) == is_printed


def test_a_run_that_saves_because_of_its_launchers_signal_is_not_restarted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run(_: argparse.Namespace) -> None:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGUSR1)
        raise AssertionError("it goes on")

    monkeypatch.setattr(torchrun, "ranks", lambda: [7])
    monkeypatch.setattr(os, "kill", lambda *_: None)
    assert _launched(run, monkeypatch) == EXIT_SAVED_ON_SIGNAL


def test_the_log_has_no_traceback_of_the_launcher() -> None:
    error = (ValueError, ValueError(), None)
    record = logging.LogRecord("name", logging.ERROR, "file", 1, "failed", (), error)
    assert torchrun._without_traceback(record)
    assert (record.exc_info, record.getMessage()) == (None, "failed")


def test_the_ranks_are_children_of_the_launcher_or_of_the_server() -> None:
    before = set(warm.ranks())
    # `sh` keeps a name as $0, which is in its command line, and starts `cat` as its child.
    names = ("rank", "multiprocessing.forkserver", "multiprocessing.resource_tracker")
    shells = [
        subprocess.Popen(["sh", "-c", "cat; :", name], stdin=subprocess.PIPE) for name in names
    ]
    try:
        wait_until(lambda: all(warm._children_of(shell.pid) for shell in shells), 60.0)
        first, server, _ = (shell.pid for shell in shells)
        assert set(warm.ranks()) - before == {first, *warm._children_of(server)}
    finally:
        for shell in shells:
            shell.communicate()


@pytest.mark.parametrize("kind", ["script", "module"])
@pytest.mark.parametrize(
    ("last", "code"),
    [
        ("", None),
        ("sys.exit(0)", None),
        ("sys.exit(7)", 7),
        ("raise KeyboardInterrupt", 130),
        ("raise ValueError('wrong')", 1),
    ],
)
@pytest.mark.parametrize("folders", ["", "a:b"])
def test_a_forked_rank_runs_as_with_python(
    kind: str,
    last: str,
    code: int | None,
    folders: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    script = tmp_path / "forked_rank.py"
    script.write_text(
        "import os, sys\n"
        "print([__name__, sys.argv, sys.path[0], os.environ.get('PYTHONPATH')])\n"
        f"print(sys.stdout.line_buffering)\n{last}\n"
    )
    followed, raised = list[threading.Event](), list[object]()
    monkeypatch.setattr(warm, "_follow_launcher", followed.append)
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: raised.append(kind))
    monkeypatch.setattr(sys, "argv", sys.argv[:])
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.setenv("PYTHONPATH", "of the server")
    monkeypatch.chdir(tmp_path)
    name = "forked_rank" if kind == "module" else str(script)
    ended = None
    try:
        warm._run(kind, name, folders, ["--a", "b"])
    except SystemExit as ending:
        ended = ending.code
    assert ended == code
    assert raised == ([ValueError] if code == 1 else [])
    said = ["__main__", [str(script), "--a", "b"], str(tmp_path), folders or None]
    assert capsys.readouterr().out == f"{said}\nTrue\n"
    wait_until(lambda: bool(followed), 60.0)
    assert followed[0].is_set() == (code is None)  # otherwise the process ends


@pytest.mark.parametrize("is_done", [False, True])
def test_a_forked_rank_saves_when_its_launcher_ends(
    is_done: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[object] = []
    monkeypatch.setattr(warm, "parent_process", lambda: SimpleNamespace(sentinel=5))
    monkeypatch.setattr(warm.connection, "wait", calls.append)
    monkeypatch.setattr(os, "kill", lambda *call: calls.append(call))
    monkeypatch.setattr(os, "_exit", calls.append)
    done: Any = SimpleNamespace(is_set=lambda: is_done, wait=lambda: calls.append("it is done"))
    warm._follow_launcher(done)
    saves = [] if is_done else [(os.getpid(), signal.SIGTERM), "it is done"]
    assert calls == [[5], *saves, 0]


@pytest.mark.parametrize("restarts", [0, 1])
@pytest.mark.parametrize(("code", "expected"), [(0, 0), (9, 9), (-signal.SIGKILL, 137)])
def test_the_launcher_ends_with_the_code_of_the_run(
    code: int, expected: int, restarts: int, tmp_path: Path
) -> None:
    process = _start(tmp_path, code, 1, "--max-restarts", str(restarts))
    _, errors = process.communicate(timeout=240)
    assert process.returncode == expected, errors
    assert (" FAILED" in errors) == (code != 0)
    assert "Traceback" not in errors


def test_ranks_save_on_sigterm_for_as_long_as_they_need(tmp_path: Path) -> None:
    process = _start(tmp_path, 100, 2)
    wait_until(lambda: len(list(tmp_path.glob("ready*"))) == 2, 240.0)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 3, errors
    assert len(list(tmp_path.glob("saved*"))) == 2
    assert "FAILED" not in errors  # this is not a failure


def test_ctrl_c_ends_the_launcher_without_a_traceback(tmp_path: Path) -> None:
    process = _start(tmp_path, 100, 2)
    wait_until(lambda: len(list(tmp_path.glob("ready*"))) == 2, 240.0)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 128 + signal.SIGINT
    assert "SignalException" not in errors
    assert "torch/distributed/run.py" not in errors


_RESTARTED = """
import os, sys
from pathlib import Path

import imported_once

folder = Path(sys.argv[1])
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
told = [__name__, sys.argv[2:], sys.path[0], os.environ.get("PYTHONPATH"), imported_once.threads]
(folder / f"attempt{attempt}.{os.environ['RANK']}").write_text(repr(told))
os.write(1, f"attempt {attempt}\\n".encode())  # in one piece: the other rank writes, too
if attempt == "0":
    os._exit(7)
"""
_IMPORTED = """
import os
from pathlib import Path

threads = len(os.listdir("/proc/self/task"))
with Path(__file__).with_name("imports").open("a") as file:
    file.write("once ")
"""


@pytest.mark.parametrize("kind", ["script", "module"])
def test_a_restarted_rank_imports_nothing_again(kind: str, tmp_path: Path) -> None:
    (tmp_path / "restarted.py").write_text(_RESTARTED)
    (tmp_path / "imported_once.py").write_text(_IMPORTED)
    named = [str(tmp_path / "restarted.py")] if kind == "script" else ["-m", "restarted"]
    words = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "2", *named]
    done = subprocess.run(
        [sys.executable, "-m", "megatron.processes.torchrun", *words, str(tmp_path), "--a", "b"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    files = list(tmp_path.glob("attempt1.?"))
    assert len(files) == 2
    assert {path.read_text() for path in files} == {
        repr(["__main__", ["--a", "b"], str(tmp_path), str(ROOT), 1])
    }
    assert (tmp_path / "imports").read_text() == "once "
    assert done.stdout.count("attempt 1") == 2


def test_forked_ranks_end_with_their_launcher(tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(
        "import os, sys, time\n"
        "open(os.path.join(sys.argv[1], os.environ['RANK']), 'w').write(str(os.getpid()))\n"
        "time.sleep(1000 * int(os.environ['RANK']))\n"
        "open(os.path.join(sys.argv[1], 'done'), 'w').close()\n"
    )
    words = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "megatron.processes.torchrun",
            *words,
            tmp_path / "rank.py",
            tmp_path,
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.DEVNULL,
    )
    files = [tmp_path / "0", tmp_path / "1"]
    wait_until(lambda: all(file.exists() and file.read_text() for file in files), 240.0)
    done, sleeping = (int(file.read_text()) for file in files)
    wait_until((tmp_path / "done").exists, 60.0)
    process.kill()
    process.wait()
    wait_until(lambda: has_ended(done) and has_ended(sleeping), 60.0)
