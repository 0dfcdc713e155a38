"""The demo: every step runs with a local classifier, and toxicity falls."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from megatron.cli.main import COMMANDS
from megatron.cli.main import main as megatron
from megatron.errors import ConfigError
from megatron.tools import demo_detoxify
from tests.launch import run_command
from tests.repository import ROOT


def test_it_replaces_only_itself(tmp_path: Path, capsys) -> None:
    (tmp_path / "notes").write_text("mine")
    for flags in ([], ["--overwrite"]):
        assert megatron(["detoxify", "demo", "--out", str(tmp_path), *flags]) == 9
        assert "this folder is not empty" in capsys.readouterr().err
    assert (tmp_path / "notes").exists()


def test_an_earlier_demo_is_replaced_only_if_asked(tmp_path: Path) -> None:
    out = tmp_path / "new" / "demo"
    demo_detoxify._open_folder(out, overwrite=False)
    (out / "corpus.jsonl").touch()
    with pytest.raises(ConfigError, match="this folder is not empty: give another one, or --over"):
        demo_detoxify._open_folder(out, overwrite=False)
    demo_detoxify._open_folder(out, overwrite=True)
    assert [path.name for path in out.iterdir()] == [".megatron-demo"]


def test_the_texts_of_a_version_are_those_of_the_next(tmp_path: Path) -> None:
    demo_detoxify.write_texts(tmp_path)
    corpus, held_out, prompts = (
        [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        for name in ("corpus", "held_out", "prompts")
    )
    assert (len(corpus), len(held_out), len(prompts)) == (400, 40, 7)
    first = "the neighbor watered the garden . my sister baked a fresh cake for us . "
    last = "the old train arrived early today . the teacher explained the question again ."
    assert corpus[0]["text"] == first + last
    rude = [any(word in one["text"].split() for word in ("stupid", "fool")) for one in corpus]
    assert 0.25 < sum(rude) / 400 < 0.4
    assert prompts[0] == {"prompt": {"text": "the neighbor", "toxicity": 0.05}}
    digest = hashlib.sha256((tmp_path / "corpus.jsonl").read_bytes()).hexdigest()
    assert digest == "9f7b6b1ec6c261e466e4f8d63e6208a2b3780dfae239044fd0fd9c82c73fe747"


@pytest.mark.slow
def test_the_toxicity_falls_and_the_perplexity_is_reported(
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
