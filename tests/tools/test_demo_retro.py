"""The Retro demo: its text, and all of its steps at toy size."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from megatron.tools import demo, demo_retro
from megatron.tools.plot_loss import read_validation
from tests.launch import fork_steps


def test_documents_quote_training_documents(tmp_path: Path) -> None:
    path, count = tmp_path / "corpus.jsonl", 60
    demo_retro.write_corpus(path, count)
    documents = [json.loads(line)["sentences"] for line in path.read_text().splitlines()]
    assert len(documents) == count
    known = {passage for passages in documents[:57] for passage in passages}
    for passages in documents:
        assert len(passages) == 4
        assert {len(passage.split()) for passage in passages} == {64}
    for passages in documents[57:]:  # the validation documents
        assert len([passage for passage in passages if passage in known]) == 3


def test_all_steps_in_small(tmp_path: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # An earlier test of this process may have used faiss, whose threads do not survive a fork.
    faiss = ["tools/retro/main.py"]
    fork_steps(monkeypatch, {**os.environ, "OMP_NUM_THREADS": "1"}, new_interpreters=faiss)
    bert = demo_retro._BERT.replace("--train-iters 100", "--train-iters 2")
    bert = bert.replace("--eval-interval 100", "--eval-interval 2")
    monkeypatch.setattr(demo_retro, "_BERT", bert)
    out = tmp_path / "demo"
    assert demo.main(["--model", "retro", "--iters", "4", "--out", str(out)]) == 0
    assert "Retro with shuffled neighbors" in capfd.readouterr().out
    retro, gpt = (read_validation(out / f"{name}.jsonl", "--compare") for name in ("retro", "gpt"))
    assert retro.keys() == {"lm loss", "lm loss with shuffled neighbors"}
    assert [iteration for iteration, _ in gpt["lm loss"]] == [1, 2, 3, 4]
    assert (out / "loss.png").stat().st_size > 10_000


def test_text_of_ones_own_is_refused(tmp_path: Path, capsys: Any) -> None:
    words = ["--model", "retro", "--input", str(tmp_path / "x.jsonl"), "--out", str(tmp_path / "d")]
    assert demo.main(words) == 9
    assert "--input" in capsys.readouterr().err
