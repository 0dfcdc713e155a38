"""KTO: learning, every layout, and whole runs of finetune.py. test_trl.py compares it with TRL."""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from finetune import FinetuningRecipe, choose
from megatron.config.finetuning import finetuning_args
from megatron.data.preferences import FittedAnswers
from megatron.errors import EXIT_OK, DataError
from megatron.finetuning.kto import METRICS, KTORecipe, estimate_divergence
from megatron.parallel.layout import Layout
from megatron.training.pretrain import main
from tests.distributed import run_sharing_memory
from tests.finetuning.test_reference import losses_in
from tests.finetuning.toy_pairs import toy_pairs, train_pairs
from tests.training.toy import TOY

KTO = "--preference-loss kto"


@cache
def one_process(words: str = "") -> dict[str, list[float]]:
    return train_pairs(Layout.single(), f"{KTO} {words}".split())


def test_the_first_loss_is_that_of_a_policy_that_is_its_reference() -> None:
    found = one_process("--train-iters 20")
    assert found["loss"][0] == pytest.approx(0.5, abs=1e-6)
    assert found["kl"][0] == pytest.approx(0, abs=1e-6)
    assert found["loss"][-1] < 0.48
    assert found["rewards/margins"][-1] > 0.1


def _several(layout: Layout, cases: list[str]) -> list[dict[str, list[float]]]:
    return [train_pairs(layout, f"{KTO} {words}".split()) for words in cases]


LORA = "--lora-rank 4 --lr 1e-2"
# The sizes of the layout, and flags of its runs and of the equivalent single-process runs. The
# estimate is a mean over the micro-batches of all data-parallel processes.
LAYOUTS: dict[str, tuple[dict[str, int], dict[str, str]]] = {
    "data": (
        {},
        {
            "--zero-stage 1": "--micro-batch-size 2",
            "--zero-stage 3": "--micro-batch-size 2",
            LORA: f"{LORA} --micro-batch-size 2",
        },
    ),
    "tensor": ({"tensor": 2}, {"--tensor-model-parallel-size 2 --sequence-parallel": ""}),
    "pipeline": ({"pipeline": 2}, {"--pipeline-model-parallel-size 2": ""}),
    "context": ({"context": 2}, {"--context-parallel-size 2": ""}),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_equals_one_process(name: str) -> None:
    sizes, cases = LAYOUTS[name]
    expected = [one_process(words) for words in cases.values()]
    for found in run_sharing_memory(2, _several, [*cases], **sizes):
        for ours, theirs in zip(found, expected, strict=True):
            for metric in (*METRICS, "grad-norm"):
                assert ours[metric] == pytest.approx(theirs[metric], rel=2e-4, abs=2e-5), metric


@pytest.mark.parametrize(
    ("share", "chosen", "rejected"),
    [
        (0.25, 4.0, 2.0),
        (1.0, 1.0, 0.0),
        (0.0, 0.0, 1.5),
        (1e-6, 0.0, 1.5 / (1 - 1e-6)),  # a sum of averages that is not quite 0
        (1.5e-6, 1 / 1.5e-6, 1.5 / (1 - 1.5e-6)),
    ],
)
def test_the_values_of_a_kind_of_answer_are_means_over_that_kind(
    share: float, chosen: float, rejected: float
) -> None:
    losses = dict.fromkeys(METRICS, 0.0)
    losses |= {"desirable": share, "rewards/chosen": 1.0, "rewards/rejected": 1.5}
    losses |= {"logps/chosen": 1.0, "logps/rejected": 1.5}
    reported = KTORecipe.reported(KTORecipe.__new__(KTORecipe), losses)
    assert (reported["rewards/chosen"], reported["logps/chosen"]) == (chosen, chosen)
    assert (reported["rewards/rejected"], reported["logps/rejected"]) == (rejected, rejected)
    assert reported["rewards/margins"] == chosen - rejected


@pytest.mark.parametrize(
    ("log_ratios", "is_answer", "expected"),
    [
        ([3.0, 5.0, 7.0], [True, False, True], 5.0),
        ([3.0, 5.0, 7.0], [False, True, False], 5.0),
        ([3.0, -5.0, 7.0], [True, True, False], 0.0),  # a divergence is not negative
        ([3.0, 5.0, 7.0], [False, False, False], 0.0),
    ],
)
def test_the_divergence_is_the_mean_over_the_answers(
    log_ratios: list[float], is_answer: list[bool], expected: float
) -> None:
    ratios, included = torch.tensor(log_ratios), torch.tensor(is_answer)
    assert estimate_divergence(ratios, included, Layout.single()).item() == expected


def test_an_answer_is_paired_with_one_to_another_prompt() -> None:
    examples = toy_pairs()
    found = FittedAnswers(examples, 32, "error")
    assert len(found) == len(examples)
    for i in range(len(found)):
        own, other = found.answer(i, 0), found.answer(i, 1)
        prompt = int((~examples[i][1][1:]).sum()) + 1
        assert (own[0] == examples[i][0]).all()
        assert (other[0][:prompt] == own[0][:prompt]).all()
        j = (i + len(found) // 2) % len(found)
        start = int((~examples[j][1][1:]).sum()) + 1
        assert (other[0][prompt:] == examples[j][0][start:]).all()
        for tokens, trained in (own, other):
            assert (trained == (np.arange(len(tokens)) >= prompt)).all()


LABELLED = [
    {"prompt": "72", "completion": " 32", "label": True},
    {"prompt": "60 83", "completion": " 26 12 62 3", "label": False},
    {"prompt": "89", "chosen": " 34 92 29 75", "rejected": " 40"},
    {"prompt": "11 12 13", "completion": " 14", "label": True},
]


def run_program(folder: Path, records: list[dict[str, Any]], *words: str) -> int:
    file = folder.parent / "answers.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    given = [word for word in TOY if word != "--mock-data"]
    given += ["--data-path", str(file), "--split", "100,0,0", *KTO.split()]
    given += "--seq-length 32 --max-position-embeddings 32 --no-exit-signal-handler".split()
    given += "--hidden-dropout 0 --attention-dropout 0 --eval-iters 0 --train-iters 4".split()
    given += ["--save", str(folder), "--save-interval", "2", *words]
    return main(FinetuningRecipe(), finetuning_args(given), choose=choose)


def test_a_run_of_the_program_resumes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_program(tmp_path / "run", LABELLED) == EXIT_OK
    told = capsys.readouterr().out
    assert "kto; all answers of the same kind in an update have the same weight" in told
    assert "5 answers in " in told
    whole = losses_in(told)
    assert "kl: " in told
    assert float(whole[1].split()[1]) == pytest.approx(0.5)
    assert not math.isclose(float(whole[4].split()[1]), 0.5, abs_tol=1e-3)
    held = np.load(tmp_path / "run" / "reference_log_probs.npz")["values"]
    assert held.shape == (5, 2)
    resume = ("--load", str(tmp_path / "run"), "--ckpt-step", "2")
    assert run_program(tmp_path / "run", LABELLED, *resume) == EXIT_OK
    assert losses_in(capsys.readouterr().out) == {i: whole[i] for i in (3, 4)}


@pytest.mark.parametrize(
    ("records", "told"),
    [
        ([{"prompt": "1", "completion": " 2"}], "'label' is null: write true"),
        ([{"prompt": "1", "completion": " 2", "label": 1}], "write true for a desirable answer"),
        ([{"text": "1 2"}], "a text record, but this run needs"),
        (LABELLED[:1], "one answer, but KTO also needs answers to other prompts"),
    ],
)
def test_records_that_kto_cannot_use_are_named(
    records: list[dict[str, Any]],
    told: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_program(tmp_path / "run", records) == DataError.exit_code
    assert told in " ".join(capsys.readouterr().err.split())
