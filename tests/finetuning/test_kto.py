"""KTO: against a second implementation, in every layout, and whole runs of finetune.py."""

from __future__ import annotations

import copy
import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from finetune import FinetuningRecipe, choose
from megatron.config.finetuning import finetuning_words
from megatron.config.parser import parse_config
from megatron.data.preferences import FittedAnswers
from megatron.errors import EXIT_OK, DataError
from megatron.finetuning.kto import METRICS
from megatron.finetuning.reference import ReferenceLogProbs
from megatron.parallel.layout import Layout
from megatron.training.build import build_run
from megatron.training.checkpointing import network_of
from megatron.training.loop import standard_callbacks, train
from megatron.training.pretrain import main
from tests.checkpoint.huggingface.models import CASES, tensors_of, write_folder
from tests.distributed import run_sharing_memory, toy_device
from tests.finetuning.record_trl import BATCH, LR
from tests.finetuning.test_reference import losses_in
from tests.finetuning.test_trl import WORDS
from tests.finetuning.toy_pairs import (
    FILE,
    ToyAnswers,
    rows_of_one_pair,
    toy_answers,
    toy_pairs,
    train_pairs,
)
from tests.training.toy import TOY, Recorder

KTO = "--preference-loss kto"
STEPS, BETA, WEIGHTS = 20, 0.3, {True: 1.0, False: 1.5}


class TinyAnswers(ToyAnswers):
    """Training on answers of the tiny Llama's tokens."""

    vocabulary = 70


def second_implementation(folder: Path) -> dict[str, list[float]]:
    """Train transformers' Llama with the loss of the paper (arXiv:2402.01306, equation 8).

    Every sequence is computed alone, and the reference is a second model.
    """
    transformers = pytest.importorskip("transformers")
    policy = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    reference = copy.deepcopy(policy).eval()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=LR, eps=1e-8, weight_decay=0)
    examples = toy_answers(70)
    count = len(examples)
    prompts = [int((~examples[i][1][1:]).sum()) + 1 for i in range(count)]

    def log_prob(model: Any, prompt: int, answer: int) -> torch.Tensor:
        start = examples[prompt][0][: prompts[prompt]]
        ids = torch.tensor(np.append(start, examples[answer][0][prompts[answer] :])).long()
        scores = model(ids[None, :-1]).logits[0].double().log_softmax(-1)
        return scores.gather(1, ids[1:, None])[len(start) - 1 :].sum()

    def ratio(prompt: int, answer: int) -> torch.Tensor:
        with torch.no_grad():
            known = log_prob(reference, prompt, answer)
        return log_prob(policy, prompt, answer) - known

    found: dict[str, list[float]] = {name: [] for name in (*METRICS, "grad-norm")}
    order = rows_of_one_pair(examples, STEPS * BATCH, FittedAnswers)
    for step in range(STEPS):
        batch = order[step * BATCH : (step + 1) * BATCH]
        with torch.no_grad():
            others = [ratio(i, (i + count // 2) % count) for i in batch]
            divergence = max(0.0, float(sum(others)) / BATCH)
        terms, log_probs, rewards = [], {True: [], False: []}, {True: [], False: []}
        for i in batch:
            is_desirable = bool(examples[i][1][0])
            log_ratio = ratio(i, i)
            gain = BETA * (log_ratio - divergence) * (1 if is_desirable else -1)
            terms.append(WEIGHTS[is_desirable] * (1 - torch.sigmoid(gain)))
            rewards[is_desirable].append(BETA * float(log_ratio.detach()))
            with torch.no_grad():
                log_probs[is_desirable].append(float(log_prob(policy, i, i)))
        loss = sum(terms) / BATCH
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        mean = {
            kind: [
                float(np.mean(each[kind])) if each[kind] else 0.0 for each in (rewards, log_probs)
            ]
            for kind in (True, False)
        }
        values = (float(loss.detach()), divergence, len(rewards[True]) / BATCH)
        values += (mean[True][0], mean[False][0], mean[True][0] - mean[False][0])
        values += (mean[True][1], mean[False][1], float(norm))
        for name, value in zip(found, values, strict=True):
            found[name].append(value)
    return found


def test_training_equals_a_second_implementation(tmp_path: Path) -> None:
    case = CASES["llama"]
    model = write_folder(tmp_path / "model", case.config, tensors_of(case))
    words = f"{KTO} --preference-beta {BETA} --kto-undesirable-weight {WEIGHTS[False]}".split()
    words += ["--train-iters", str(STEPS), "--micro-batch-size", str(BATCH)]
    words = [*WORDS, "--load", str(model), "--data-path", str(FILE), *words]
    config = parse_config(
        words, world_size=1, architecture="gpt", read_checkpoint=network_of
    ).config
    run = build_run(config, TinyAnswers(), toy_device(), Layout.single())
    ReferenceLogProbs().begin(run)
    recorder = Recorder()
    train(run, standard_callbacks(run, [recorder])[0])
    expected = second_implementation(model)
    assert max(expected["kl"]) > 0
    for name, values in expected.items():
        assert recorder.values(name) == pytest.approx(values, rel=1e-5, abs=1e-5), name


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
# The sizes of the layout, and flags of its runs with those of equal runs in one process. The
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
    return main(FinetuningRecipe(), finetuning_words(given), choose=choose)


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
        (LABELLED[:1], "one answer, but KTO compares answers with those to other prompts"),
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
