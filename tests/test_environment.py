"""The user's own folders for compiled files, and new interpreters."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.environment import cuda_home, module_command, name_problem, private_cache
from tests.repository import ROOT

# What a training does before it imports torch.
_PARSE = f"""
import sys
from megatron.command import run_command
from megatron.config.parser import parse_config
words = ["--config", "{ROOT}/examples/gpt_tiny.yaml", "--save-interval", "1", *sys.argv[1:]]
sys.exit(run_command(lambda: parse_config(words, world_size=1) and 0))
"""


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


def test_the_cuda_toolkit_is_the_one_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_HOME", "/opt/cuda-13")
    monkeypatch.setenv("CUDA_PATH", "/opt/cuda-12")
    assert cuda_home() == Path("/opt/cuda-13")
    monkeypatch.setenv("CUDA_HOME", "")
    assert cuda_home() == Path("/opt/cuda-12")
    monkeypatch.delenv("CUDA_PATH")
    assert cuda_home() is None


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
    # Our `main` has run and lacks what its parent would send.
    assert ended.stderr.splitlines()[-1].startswith(("StopIteration", "ValueError: not enough"))
    subprocess.run(
        [sys.executable, "-m", f"megatron.inference.server.{module}"],
        cwd=tmp_path, env=variables, capture_output=True, check=False,
    )  # fmt: skip
    assert (tmp_path / "executed").exists()  # otherwise the test would prove nothing


def test_a_name_is_utf_8_for_python_and_for_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    assert name_problem("data/é") is None
    assert name_problem("data/\udce9") == "is not UTF-8: rename it"
    monkeypatch.setattr(sys, "getfilesystemencoding", lambda: "ascii")
    assert name_problem("data/x") is None
    for name in ("data/\udcc3\udca9", "data/é"):
        assert name_problem(name) == "is read as ascii in this locale: set PYTHONUTF8=1"


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({}, r"--save 'caf\udce9': the path '{}/caf\udce9' is not UTF-8: rename it"),
        ({"PYTHONUTF8": "0"}, r"'{}/caf\udce9' is read as ascii in this locale: set PYTHONUTF8=1"),
    ],
)
def test_a_path_that_is_not_utf_8_is_named_in_any_locale(
    tmp_path: Path, variables: dict[str, str], said: str
) -> None:
    words = [sys.executable, "-c", _PARSE, "--save", b"caf\xe9"]
    environment = {**os.environ, "LC_ALL": "C", "PYTHONPATH": str(ROOT), **variables}
    ended = subprocess.run(
        words, cwd=tmp_path, env=environment, capture_output=True, check=False, text=True
    )
    assert ended.returncode == 9, ended.stderr
    assert said.format(tmp_path) in ended.stderr
    assert "Traceback" not in ended.stderr
