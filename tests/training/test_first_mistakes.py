"""What a first attempt with a mistake prints: once, whatever the number of processes."""

from __future__ import annotations

import os

import pytest

from tests.launch import run_ranks
from tests.repository import ROOT
from tests.training.toy import TOY

_RUN = [word for word in TOY if word != "--mock-data"]
_LENGTH = ["--train-iters", "2"]
_BPE = ["--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", "v.json", "--merge-file", "m.txt"]


@pytest.mark.parametrize(
    ("words", "code", "lines"),
    [
        (
            [*TOY, *_LENGTH, "--num-lyers", "2"],
            9,
            ["error: unknown flag --num-lyers: did you mean --num-layers?"],
        ),
        (
            [],
            9,
            [
                *(f"error: --{name} is required: give it a value" for name in (
                    "num-layers", "hidden-size", "num-attention-heads", "seq-length",
                    "micro-batch-size", "lr",
                )),
                "error: the length of the run is required: give --train-iters, --train-samples or "
                "--train-tokens",
                "error: no corpus: give --data-path PREFIX, or --mock-data to train on generated "
                "tokens",
                "error: --tokenizer-type is required: for example HuggingFaceTokenizer with "
                "--tokenizer-model tokenizer.json, or NullTokenizer with --vocab-size",
            ],
        ),
        (
            [*_RUN, *_LENGTH, "--data-path", "nowhere/text"],
            6,
            ["error: dataset nowhere/text: nowhere/text.idx does not exist; no dataset in nowhere"],
        ),
        (
            [*TOY, *_LENGTH, *_BPE],
            6,
            ["error: --vocab-file v.json: No such file or directory; give a readable file"],
        ),
    ],
    ids=["misspelled", "nothing", "data", "vocabulary"],
)  # fmt: skip
def test_two_processes_tell_it_once(words: list[str], code: int, lines: list[str]) -> None:
    done = run_ranks([str(ROOT / "pretrain_gpt.py"), *words], dict(os.environ), 2)
    assert done.returncode == code
    # torch 2.10 reports how gloo connects.
    said = [x for x in done.stdout.splitlines() if "note: " not in x and "[Gloo]" not in x]
    # A file may be missing on one machine only; then the line names the rank.
    assert [line.removeprefix("[rank 0] ").removeprefix("[rank 1] ") for line in said] == lines
