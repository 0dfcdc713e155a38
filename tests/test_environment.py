"""The user's own folders for compiled files, and new interpreters."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.environment import module_command, private_cache


@pytest.mark.parametrize("asked", ["MEGATRON_CACHE", "XDG_CACHE_HOME", "HOME"])
def test_each_user_of_a_shared_cache_gets_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    for name in ("MEGATRON_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(asked, str(tmp_path))
    inside = {"MEGATRON_CACHE": ".", "XDG_CACHE_HOME": "megatron", "HOME": ".cache/megatron"}
    path = private_cache("kernels")
    assert path == tmp_path / inside[asked] / f"kernels-{os.getuid()}"
    assert path.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("module", ["texts", "front"])
def test_a_new_interpreter_imports_nothing_from_the_current_folder(
    tmp_path: Path, module: str
) -> None:
    for name in ("json", "msgspec", "asyncio", "megatron", "sitecustomize"):
        (tmp_path / f"{name}.py").write_text("open('executed', 'w')\n")
    words = module_command(f"megatron.inference.server.{module}")
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ended = subprocess.run(
        words, cwd=tmp_path, env=variables, capture_output=True, check=False, text=True
    )
    assert not (tmp_path / "executed").exists()
    # Our `main` has run: it misses what its parent sends.
    assert ended.stderr.splitlines()[-1].startswith(("StopIteration", "ValueError: not enough"))
    subprocess.run(
        [sys.executable, "-m", f"megatron.inference.server.{module}"],
        cwd=tmp_path, env=variables, capture_output=True, check=False,
    )  # fmt: skip
    assert (tmp_path / "executed").exists()  # or the test would prove nothing
