"""How a forked rank runs its script."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from queue import SimpleQueue

import pytest

from megatron.processes import warm


def _run(
    monkeypatch: pytest.MonkeyPatch, folder: Path, kind: str, code: str
) -> tuple[int | str | None, bool]:
    """Run a script or module that consists of `code`; return its exit code and whether it ended."""
    (folder / "warm_script.py").write_text(code)
    name = str(folder / "warm_script.py") if kind == "script" else "warm_script"
    followed: SimpleQueue[threading.Event] = SimpleQueue()
    monkeypatch.setattr(warm, "_follow_launcher", followed.put)
    monkeypatch.setattr(warm, "set_python_path", lambda folders: None)
    monkeypatch.setattr(sys, "argv", ["unchanged"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(folder if kind == "module" else "/")
    code_of_exit: int | str | None = None
    try:
        warm._run(kind, name, "", ["--flag", "1"])
    except SystemExit as ending:
        code_of_exit = ending.code
    return code_of_exit, followed.get(timeout=60).is_set()


@pytest.mark.parametrize("kind", ["script", "module"])
@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("pass", (None, True)),
        ("raise SystemExit", (None, True)),
        ("raise SystemExit(0)", (None, True)),
        ("raise SystemExit(3)", (3, False)),
        ("raise SystemExit('no')", ("no", False)),
        ("raise KeyboardInterrupt", (130, False)),
        ("raise ValueError('what went wrong')", (1, False)),
    ],
)
def test_a_script_ends_with_the_code_of_python(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    kind: str,
    code: str,
    expected: tuple[int | str | None, bool],
) -> None:
    assert _run(monkeypatch, tmp_path, kind, code) == expected
    assert ("ValueError: what went wrong" in capsys.readouterr().err) == ("ValueError" in code)


@pytest.mark.parametrize("kind", ["script", "module"])
def test_a_script_sees_its_name_its_arguments_and_its_folder(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, kind: str
) -> None:
    (tmp_path / "neighbor_of_warm_script.py").write_text("")
    code = "import sys, neighbor_of_warm_script; print(__name__, sys.argv)"
    assert _run(monkeypatch, tmp_path, kind, code) == (None, True)
    words = [str(tmp_path / "warm_script.py"), "--flag", "1"]
    assert capsys.readouterr().out == f"__main__ {words}\n"
