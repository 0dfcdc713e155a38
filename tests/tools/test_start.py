"""How tools for data start: from any folder, and without what --help does not need."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.repository import ROOT


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
