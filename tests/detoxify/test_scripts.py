"""The scripts of examples/detxoify_lm at small scale, run in order with Megatron-LM's arguments."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.detoxify.stand_in import KEY, StandIn, perspective
from tests.files import read_lines
from tests.launch import run_command, run_script
from tests.ports import free_port
from tests.repository import ROOT, name

FOLDER = ROOT / "examples" / "detxoify_lm"
SCRIPTS = sorted(FOLDER.rglob("*.sh"))
NETWORK = (
    "--num-layers 1 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 2 "
    "--seq-length 16 --max-position-embeddings 16 --micro-batch-size 1 --num-workers 0"
).split()
WORDS = "we thank you for the kind letter and the quiet lake".split()


@pytest.mark.parametrize("script", sorted(FOLDER.rglob("*.*")), ids=name)
def test_a_script_can_be_run(script: Path) -> None:
    if script.suffix in (".sh", ".py"):
        assert os.access(script, os.X_OK)
        assert script.read_text().startswith("#!/usr/bin/env ")


@pytest.mark.parametrize("script", SCRIPTS, ids=name)
def test_a_script_says_what_to_give(script: Path) -> None:
    done = subprocess.run([script, "x"], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert ": give " in done.stderr


@pytest.fixture
def service() -> Iterator[StandIn]:
    with perspective() as found:
        yield found


class Shell:
    """A folder with toy files of GPT-2's tokenizer, in which scripts run."""

    def __init__(self, folder: Path) -> None:
        from tokenizers import ByteLevelBPETokenizer

        bpe = ByteLevelBPETokenizer()
        bpe.train_from_iterator([" ".join(WORDS)], vocab_size=300, special_tokens=["<|endoftext|>"])
        bpe.save_model(str(folder))
        self.folder = folder
        self.environment = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "VOCAB_FILE": str(folder / "vocab.json"),
            "MERGE_FILE": str(folder / "merges.txt"),
            "NPROC_PER_NODE": "2",
            "MASTER_PORT": str(free_port()),
            "PRECISION": "",
            "WORKERS": "1",
            "PERSPECTIVE_API_KEY": KEY,
            "no_proxy": "127.0.0.1",
        }

    def run(self, script: str, *words: object, **environment: str) -> str:
        given = {**self.environment, **environment}
        path = FOLDER / script if (FOLDER / script).exists() else ROOT / script
        flags = [str(path), *map(str, words)]
        run = run_script(flags, given) if path.suffix == ".sh" else self._python(flags, given)
        assert run.returncode == 0, run.stdout + run.stderr
        return run.stdout

    def _python(
        self, words: list[str], environment: dict[str, str]
    ) -> subprocess.CompletedProcess[str]:
        return run_command(["python", *words], environment)


@pytest.mark.slow
def test_the_scripts_from_end_to_end(tmp_path: Path, service: StandIn) -> None:
    shell = Shell(tmp_path)
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text(
        "".join(json.dumps({"text": " ".join(WORDS[i % 5 :])}) + "\n" for i in range(200))
    )
    shell.run("annotations/preprocess.sh", corpus, tmp_path / "corpus")
    blend = f"{tmp_path}/corpus_text_document"
    tokenizer = ["--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", tmp_path / "vocab.json"]
    tokenizer += ["--merge-file", tmp_path / "merges.txt"]
    base, tuned = tmp_path / "base", tmp_path / "tuned"
    training = "--train-iters 2 --save-interval 2 --eval-iters 0 --lr 1e-3 --global-batch-size 1"
    saved = ["--data-path", blend, "--split", "100,0,0", "--save", base]
    shell.run("pretrain_gpt.py", *NETWORK, *tokenizer, *training.split(), *saved)

    generate = "self_generation/selfgenerate-1.3b-unconditional.sh"
    shell.run(generate, 9, base, 2333, "--out-seq-length", 8, OUT=str(tmp_path))
    own = tmp_path / "2333.out"
    assert len({line["text"] for line in read_lines(own)}) == 9
    quick = ["--api-url", service.url, "--requests-per-second", 1000]
    annotated = tmp_path / "2333.annotated.out"
    shell.run(
        *("annotations/perspective_api_annotate.py", "--data-path", own, "--out-path", annotated),
        *("--workers", 3, *quick),
    )
    assert len(service.bodies) == 9
    kept = tmp_path / "2333.annotated.nontoxic.out"
    shell.run("annotations/filter-selfgeneration.py", "--data-path", annotated, "--out-path", kept)
    assert len(read_lines(kept)) == 4
    shell.run("annotations/preprocess.sh", kept, tmp_path / "kept")

    output = shell.run(
        *("finetune_gpt_distributed-1.3b.sh", tmp_path / "kept_text_document", tuned),
        *("2e-5", 2, 3, base, *NETWORK, "--eval-iters", 1),
        DATA_BLEND=blend,
    )
    assert "iteration        3/       3" in output
    assert "validation loss at iteration 3" in output

    prompts = tmp_path / "prompts.jsonl"
    records = [{"prompt": {"text": "we thank", "toxicity": 0.1}}, {"prompt": {"text": "you"}}]
    prompts.write_text("".join(json.dumps(record) + "\n" for record in records))
    given = {"SAMPLES_PER_PROMPT": "25", "SEED": "5"}
    shell.run("generate-1.3b.sh", prompts, tuned, "--out-seq-length", 4, **given)
    continued = tmp_path / "prompts.jsonl_output_tuned_seed_5.jsonl"
    assert len(read_lines(continued)) == 50
    output = shell.run(
        *("perspective_api.py", "--data-path", continued, "--prompt-path", prompts),
        *("--workers", 3, *quick),
    )
    assert "prompts: 2 all, 1 non-toxic" in output
    assert "0.100 ± 0.000" in output
