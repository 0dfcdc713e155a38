"""The launcher exits with the run's code, and gives ranks time to save on SIGTERM."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.processes import torchrun, warm
from megatron.processes.launch import python_path
from megatron.processes.torchrun import first_failure
from tests.reliability.processes import wait_until
from tests.repository import ROOT, command_environment

_RANK = """
import os, signal, sys, time
from pathlib import Path

def save(number, frame):
    time.sleep(3)
    Path(folder, "saved" + rank).touch()
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
    started: list[tuple[list[str], str | None]] = []
    preloaded: list[str] = []
    monkeypatch.setattr(warm.forkserver, "set_forkserver_preload", preloaded.extend)
    monkeypatch.setattr(
        warm.forkserver, "ensure_running", lambda: started.append((preloaded[:], python_path()))
    )
    monkeypatch.setattr(warm, "without_matrix_threads", lambda: None)
    monkeypatch.setenv("PYTHONPATH", "before")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    script = tmp_path / "rank_of_mine.py"
    script.write_text("import json\n")

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
        folders = os.pathsep.join([str(tmp_path), str(ROOT), "before"])
        assert started.pop() == (["json"], folders)
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


@pytest.mark.parametrize("restarts", [0, 1])
@pytest.mark.parametrize(("code", "expected"), [(0, 0), (9, 9), (-signal.SIGKILL, 137)])
def test_the_launcher_ends_with_the_code_of_the_run(
    code: int, expected: int, restarts: int, tmp_path: Path
) -> None:
    process = _start(tmp_path, code, 1, "--max-restarts", str(restarts))
    _, errors = process.communicate(timeout=60)
    assert process.returncode == expected, errors
    assert (" FAILED" in errors) == (code != 0)
    assert "Traceback" not in errors


def test_ranks_save_on_sigterm_for_as_long_as_they_need(tmp_path: Path) -> None:
    process = _start(tmp_path, 100, 2)
    wait_until(lambda: len(list(tmp_path.glob("ready*"))) == 2, 60.0)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 3, errors
    assert len(list(tmp_path.glob("saved*"))) == 2
    assert "FAILED" not in errors  # this is not a failure


def test_ctrl_c_ends_the_launcher_without_a_traceback(tmp_path: Path) -> None:
    process = _start(tmp_path, 100, 2)
    wait_until(lambda: len(list(tmp_path.glob("ready*"))) == 2, 60.0)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
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
        timeout=120,
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
    wait_until(lambda: all(file.exists() and file.read_text() for file in files), 60.0)
    done, sleeping = (int(file.read_text()) for file in files)
    wait_until((tmp_path / "done").exists, 60.0)
    process.kill()
    process.wait()
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in (done, sleeping)), 10.0)
