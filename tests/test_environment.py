"""The user's own folders for compiled files, and new interpreters."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.environment import (
    cores_per_process,
    corpora_file,
    cuda_home,
    environment_with_interpreter,
    gpus_are_chosen,
    local_rank,
    local_world_size,
    module_command,
    name_problem,
    perspective_api_key,
    private_cache,
    share_cores,
    usable_cores,
    without_matrix_threads,
)
from megatron.errors import ConfigError
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


def test_numbers_of_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOCAL_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert (local_rank(), local_world_size()) == (0, 1)
    monkeypatch.setenv("LOCAL_SIZE", "4")  # DeepSpeed's
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert (local_rank(), local_world_size()) == (3, 4)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert local_world_size() == 2
    monkeypatch.setenv("LOCAL_RANK", "3.0")
    with pytest.raises(ConfigError, match=r"variable LOCAL_RANK='3.0' is not a whole number"):
        local_rank()


@pytest.mark.parametrize(("processes", "cores"), [(0, 6), (1, 6), (2, 3), (4, 1), (7, 1)])
def test_processes_of_a_machine_share_its_cores(
    monkeypatch: pytest.MonkeyPatch, processes: int, cores: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6 + pid)))
    monkeypatch.setattr(os, "cpu_count", lambda: 12)  # this process may use 6
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    assert cores_per_process() == cores
    if processes:
        monkeypatch.setenv("OMP_NUM_THREADS", "")
        monkeypatch.delenv("OMP_NUM_THREADS")
        share_cores(processes)
        assert os.environ["OMP_NUM_THREADS"] == str(cores)
        monkeypatch.setenv("OMP_NUM_THREADS", "5")
        share_cores(processes)
        assert os.environ["OMP_NUM_THREADS"] == "5"  # the user's own


@pytest.mark.parametrize(("cores", "usable"), [(12, 12), (None, 1)])
def test_all_cores_are_usable_where_a_process_has_no_set_of_them(
    monkeypatch: pytest.MonkeyPatch, cores: int | None, usable: int
) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    assert usable_cores() == usable


def test_numpy_starts_no_threads_unless_the_user_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    for given, threads in (("", "1"), ("5", "5")):
        monkeypatch.setenv("OPENBLAS_NUM_THREADS", given)
        if not given:
            monkeypatch.delenv("OPENBLAS_NUM_THREADS")
        without_matrix_threads()
        assert os.environ["OPENBLAS_NUM_THREADS"] == threads


def test_gpus_are_chosen_even_if_none_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert gpus_are_chosen()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert not gpus_are_chosen()


def test_files_and_keys_that_variables_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/folder/me")
    for value, path, key in (("", None, None), ("~/c.yaml", Path("/folder/me/c.yaml"), "~/c.yaml")):
        monkeypatch.setenv("MEGATRON_CORPORA", value)
        monkeypatch.setenv("PERSPECTIVE_API_KEY", value)
        assert (corpora_file(), perspective_api_key()) == (path, key)
    monkeypatch.setenv("PATH", "/bin")
    assert environment_with_interpreter()["PATH"] == f"{Path(sys.executable).parent}:/bin"
    assert os.environ["PATH"] == "/bin"


def test_a_cache_may_be_in_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("MEGATRON_CACHE", "~/cache")
    assert private_cache("x") == tmp_path / "cache" / f"x-{os.getuid()}"
