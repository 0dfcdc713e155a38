"""Every command works from any folder without an installation, and --help imports little."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig

import pytest

from tests.repository import ROOT, entry_points, name, tracked_files

_HEAVY = {"torch", "tokenizers", "matplotlib", "pyarrow"}
_LIGHT = {
    *("preprocess_data", "train_tokenizer", "merge_datasets", "benchmark_preprocess"),
    *("plot_loss", "show_schedule"),
}


@pytest.mark.parametrize("file", entry_points(), ids=name)
def test_help_in_a_clone_without_installation_gpu_and_heavy_imports(file, tmp_path):
    # -S ignores .pth files, so that an editable installation of this package is not found, but the
    # requirements are.
    own = {"PYTHONPATH": sysconfig.get_path("purelib"), "CUDA_VISIBLE_DEVICES": ""}
    finished = subprocess.run(
        [sys.executable, "-S", "-X", "importtime", str(file), "--help"],
        cwd=tmp_path,
        env={**os.environ, **own},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr[-2000:]
    assert "usage:" in finished.stdout.lower()
    heavy = _HEAVY | ({"numpy", "nltk"} if file.stem in _LIGHT else set())
    assert not heavy & _modules(finished.stderr)


def _modules(errors: str) -> set[str]:
    """Return the modules that -X importtime reported."""
    modules = {line.split("|")[-1].strip() for line in errors.splitlines()}
    assert "encodings" in modules
    return modules


def test_a_file_that_names_its_interpreter_can_be_run():
    files = [file for file in tracked_files() if file.suffix == ".py"]
    named = [file for file in files if file.read_bytes().startswith(b"#!")]
    assert ROOT / "tools" / "text_generation_cli.py" in named
    assert not [name(file) for file in named if not os.access(file, os.X_OK)]


@pytest.mark.parametrize("tool", sorted(_LIGHT))
def test_help_as_a_module_without_heavy_imports(tool):
    finished = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", f"tools.{tool}", "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "usage" in finished.stdout
    assert not (_HEAVY | {"numpy", "nltk"}) & _modules(finished.stderr)
