"""The Retro demo: its text, and all of its steps at toy size."""

from __future__ import annotations

import hashlib
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


def test_the_text_of_a_version_is_that_of_the_next(tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    demo_retro.write_corpus(path, 40)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert digest == "3cfebbd32cd4acc7945a460864580d45218e23125278fc5698fc3322bd361e70"
    for line in path.read_text().splitlines():
        record = json.loads(line)
        words = " ".join(record["sentences"]).split()
        assert record["text"] == " " + " ".join(words[:-1])


@pytest.mark.parametrize(
    ("iterations", "documents", "split", "sampled", "interval", "evaluations"),
    [(4, 40, "38,2,0", 1216, 1, 4), (20, 80, "76,4,0", 2432, 5, 20)]
    + [(100, 400, "380,20,0", 8000, 25, 20)],
)
def test_the_steps_follow_from_the_number_of_iterations(
    iterations: int, documents: int, split: str, sampled: int, interval: int, evaluations: int
) -> None:
    assert demo_retro.num_documents(iterations) == documents
    *_, bert, neighbors, retro, gpt, plot = (
        f"{command} " for _, command in demo_retro.steps(Path("d"), iterations)
    )
    assert f" --split {split} " in bert
    assert f" --retro-gpt-split {split} " in neighbors
    assert f" --retro-index-ntrain {sampled} " in neighbors
    assert (
        f"--retro-gpt-eval-interval {interval} --retro-gpt-eval-iters {evaluations} " in neighbors
    )
    assert f" --train-iters {iterations} --global-batch-size 8 " in neighbors
    for command in (retro, gpt):
        assert f" --train-iters {iterations} --eval-interval {interval} " in command
        assert f" --eval-iters {evaluations} --log-interval {interval} " in command
    assert f" --save d/checkpoints --save-interval {iterations} " in retro
    assert f" --data-path d/corpus_text_document --split {split} " in gpt
    assert plot.startswith("megatron plot --compare GPT=d/gpt.jsonl Retro=d/retro.jsonl ")


def test_all_steps_at_toy_size(tmp_path: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch) -> None:
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
