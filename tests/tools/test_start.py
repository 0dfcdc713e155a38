"""How everything that users start begins: from any folder, without an installation of the package,
and without importing what --help does not need."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig

import pytest

from tests.repository import ROOT, entry_points, name, tracked_files


@pytest.mark.parametrize("file", entry_points(), ids=name)
def test_starts_in_a_clone_where_the_package_is_not_installed(file, tmp_path):
    # -S leaves .pth files unread, so that an editable installation of this package is not found,
    # while the requirements are.
    without = {**os.environ, "PYTHONPATH": sysconfig.get_path("purelib")}
    finished = subprocess.run(
        [sys.executable, "-S", str(file), "--help"],
        cwd=tmp_path,
        env=without,
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr[-2000:]
    assert "usage" in finished.stdout.lower()


def test_a_file_that_names_its_interpreter_can_be_run():
    files = [file for file in tracked_files() if file.suffix == ".py"]
    named = [file for file in files if file.read_bytes().startswith(b"#!")]
    assert ROOT / "tools" / "text_generation_cli.py" in named
    assert not [name(file) for file in named if not os.access(file, os.X_OK)]


@pytest.mark.parametrize(
    "tool",
    [
        *("preprocess_data", "train_tokenizer", "merge_datasets", "benchmark_preprocess"),
        *("plot_loss", "show_schedule"),
    ],
)
@pytest.mark.parametrize("as_module", [False, True])
def test_help_both_ways_without_heavy_imports(tool, as_module, tmp_path):
    command = ["-m", f"tools.{tool}"] if as_module else [str(ROOT / "tools" / f"{tool}.py")]
    finished = subprocess.run(
        [sys.executable, "-X", "importtime", *command, "--help"],
        cwd=ROOT if as_module else tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "usage" in finished.stdout
    modules = {line.split("|")[-1].strip() for line in finished.stderr.splitlines()}
    assert "argparse" in modules
    assert not {"torch", "numpy", "tokenizers", "pyarrow", "nltk"} & modules
