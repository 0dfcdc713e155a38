"""The launch scripts of downstream tasks, at toy size."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch import run_script
from tests.ports import free_port
from tests.repository import ROOT
from tests.tasks.toy import WORDS, save_bert, save_toy

EXAMPLES = ROOT / "examples"
SCRIPTS = sorted([*EXAMPLES.glob("evaluate_*.sh"), *EXAMPLES.glob("finetune_*.sh")])


def _run(script, environment, *flags, new=False):
    """Run in forks of this process, or in `new` ones through torchrun, as a user does."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "NPROC_PER_NODE": "2",
                   "MASTER_PORT": str(free_port()), "PRECISION": "", **environment}  # fmt: skip
    words = [str(EXAMPLES / script), *flags]
    if not new:
        return run_script(words, environment)
    return subprocess.run(
        words, env=environment, capture_output=True, text=True, timeout=200, check=False
    )


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_a_script_says_what_to_set(script):
    assert os.access(script, os.X_OK)
    done = _run(script.name, {})
    assert done.returncode != 0
    assert "_DATA: set it to" in done.stderr


def test_zero_shot_evaluation(tmp_path):
    (tmp_path / "corpus.jsonl").write_text('{"text": "1 2 3"}\n{"text": "4 5 6 7"}\n')
    save_toy(str(tmp_path / "model"))
    given = {"VALID_DATA": str(tmp_path / "corpus.jsonl"), "CHECKPOINT": str(tmp_path / "model")}
    done = _run("evaluate_zeroshot_gpt.sh", {**given, "TENSOR_PARALLEL": "2"})
    assert done.returncode == 0, done.stdout + done.stderr
    assert "validation results on LAMBADA" in done.stdout


def _data(task, folder):
    """Write eight labeled samples of a task."""
    if task == "RACE":
        article = {
            "article": " ".join(WORDS[:5]),
            "questions": ["what is _"] * 8,
            "options": [WORDS[:4]] * 8,
            "answers": list("ABCDABCD"),
        }
        folder.mkdir()
        (folder / "1.txt").write_text(json.dumps(article))
        return folder
    starts = ["x"] * {"MNLI": 8, "QQP": 3}[task]
    cells = {"MNLI": [*starts, "w1 w2", "w3", "x", "neutral"], "QQP": [*starts, "w1", "w2", "1"]}
    folder.with_suffix(".tsv").write_text(("\t".join(cells[task]) + "\n") * 8)
    return folder.with_suffix(".tsv")


@pytest.mark.parametrize("task", ["MNLI", "QQP", "RACE"])
def test_finetuning(tmp_path, task):
    _, pretrained = save_bert(tmp_path)
    data = str(_data(task, tmp_path / "data"))
    given = {
        "TRAIN_DATA": data,
        "VALID_DATA": data,
        "PRETRAINED": pretrained,
        "VOCAB_FILE": str(tmp_path / "vocab.txt"),
        "OUT": str(tmp_path / "out"),
    }
    toy = ["--epochs", "1", "--micro-batch-size", "2", "--seq-length", "24", "--num-workers", "0"]
    done = _run(f"finetune_{task.lower()}_distributed.sh", given, *toy, new=task == "MNLI")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    file = tmp_path / "out" / "checkpoints" / "evaluation" / f"{task.lower()}-iter_0000002.json"
    assert json.loads(file.read_text())["results"]["total_examples"] == 8
    assert (tmp_path / "out" / "checkpoints" / "best").is_dir()
