"""The demo: every step runs with a local classifier, and toxicity falls."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from megatron.cli.main import COMMANDS
from megatron.cli.main import main as megatron
from megatron.tools import demo_detoxify
from tests.launch import run_command
from tests.repository import ROOT


def test_it_replaces_only_itself(tmp_path: Path, capsys) -> None:
    (tmp_path / "notes").write_text("mine")
    for flags in ([], ["--overwrite"]):
        assert megatron(["detoxify", "demo", "--out", str(tmp_path), *flags]) == 9
        assert "this folder is not empty" in capsys.readouterr().err
    assert (tmp_path / "notes").exists()


@pytest.mark.slow
def test_the_toxicity_falls_and_the_perplexity_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    pytest.importorskip("transformers", reason="needs the extra [detoxify]")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def run_here(title: str, command: Sequence[str]) -> None:
        """Run in this process: a new interpreter would load torch a dozen times."""
        if command[0] == "megatron":
            assert megatron(command[1:]) == 0, title
            return
        words = [command[0], str(ROOT / command[1]), *command[2:]]
        done = run_command(words, {**os.environ, "OMP_NUM_THREADS": "1"})
        assert done.returncode == 0, done.stdout + done.stderr

    monkeypatch.setattr(demo_detoxify, "run_step", run_here)
    assert megatron(["detoxify", "demo", "--out", str(tmp_path / "demo")]) == 0
    models = json.loads((tmp_path / "demo" / "results.json").read_text())["models"]
    before, after = models["base"], models["detoxified"]
    for kind in ("all", "toxic", "non-toxic"):
        assert after[kind]["expected_maximum"] < before[kind]["expected_maximum"] - 0.1, kind
    assert after["all"]["probability"] < before["all"]["probability"]
    assert 1 < before["perplexity"] < after["perplexity"] < 10
    table = capsys.readouterr().out.partition("prompts: 7 all, 3 toxic, 4 non-toxic")[2]
    assert table.splitlines()[2].endswith("perplexity")


def test_the_commands_it_shows_can_be_repeated(tmp_path: Path, capsys) -> None:
    """Each is a `megatron` command or a script of this folder, and nothing needs quoting."""
    for title, (program, name, *_) in demo_detoxify.steps(tmp_path):
        assert (program == "megatron" and name in COMMANDS) or (ROOT / name).is_file(), title
