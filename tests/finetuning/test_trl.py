"""Losses, rewards and training against TRL 1.16's, as recorded by record_trl.py."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from safetensors.torch import save_file

from megatron.config.parser import parse_config
from megatron.finetuning.reference import ReferenceLogProbs
from megatron.parallel.layout import Layout
from megatron.training.build import build_run
from megatron.training.loop import standard_callbacks, train
from megatron.training.restoring import network_of
from tests.distributed import toy_device
from tests.finetuning.record_trl import (
    BATCH,
    LORA,
    LR,
    RECORD,
    STEPS,
    TRAININGS,
    VOCABULARY,
    Log,
    Training,
    first_adapter,
    record,
    write_model,
)
from tests.finetuning.toy_pairs import FILE, ToyAnswers, ToyPreferences, ToyRewards
from tests.training.toy import Recorder

TRL = json.loads(RECORD.read_text())
WORDS = f"""
    --use-checkpoint-args --finetune --tokenizer-type NullTokenizer --vocab-size {VOCABULARY}
    --make-vocab-size-divisible-by 2 --seq-length 24 --max-position-embeddings 24 --no-packing
    --sft --calculate-per-token-loss --micro-batch-size 2 --global-batch-size {BATCH} --lr {LR}
    --lr-decay-style constant --adam-eps 1e-8 --adam-beta2 0.999 --weight-decay 0 --clip-grad 1
    --attention-dropout 0 --hidden-dropout 0 --eval-iters 0 --log-interval 1 --num-workers 0
    --no-exit-signal-handler --train-iters {STEPS} --data-path {FILE}
""".split()


class TinyPreferences(ToyPreferences):
    """Training on pairs of the tiny Llama's tokens."""

    vocabulary = VOCABULARY


class TinyRewards(ToyRewards):
    """Training of a reward model on these pairs."""

    vocabulary = VOCABULARY


class TinyAnswers(ToyAnswers):
    """Training on these answers one by one."""

    vocabulary = VOCABULARY


RECIPES: dict[str, type[ToyPreferences]] = {"Reward": TinyRewards, "KTO": TinyAnswers}


@pytest.mark.parametrize("name", TRAININGS)
def test_training_equals_trl(name: str, tmp_path: Path) -> None:
    training, recorded = TRAININGS[name], TRL[name]
    words = ["--preference-loss", *training.words.split()]
    if training.adapter:
        words += write_adapter(tmp_path / "adapter", recorded["adapter"])
    found = train_as_trl(training, tmp_path / "model", words)
    if training.trainer == "Reward":
        both = zip(found["rewards/chosen"], found["rewards/rejected"], strict=True)
        found["mean_reward"] = [(chosen + rejected) / 2 for chosen, rejected in both]
    # Sums of log-probabilities are around -20. Between processors, which add in other orders, their
    # small differences (rewards, kl) differ by 5e-5 after some updates of KTO.
    assert_same(found, recorded["log"], 1e-4 if name == "kto" else 1e-5)


def write_adapter(folder: Path, shapes: Mapping[str, Sequence[int]]) -> list[str]:
    """Write the adapter that TRL started from, and return the flags to start from it."""
    folder.mkdir()
    save_file(first_adapter(shapes), folder / "adapter_model.safetensors")
    is_reward_model = any("score" in name for name in shapes)
    settings = {"peft_type": "LORA", **LORA, "modules_to_save": ["score"] * is_reward_model}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    sizes = f"--lora-rank {LORA['r']} --lora-alpha {LORA['lora_alpha']}"
    return [*sizes.split(), "--load-adapter", str(folder)]


def train_as_trl(training: Training, folder: Path, words: list[str]) -> Log:
    """Train the tiny Llama as TRL did, and return the log."""
    model = write_model(folder, rewards=training.trainer == "Reward")
    config = parse_config(
        [*WORDS, "--load", str(model), *words],
        world_size=1,
        architecture="gpt",
        read_checkpoint=network_of,
    ).config
    recipe = RECIPES.get(training.trainer, TinyPreferences)()
    run = build_run(config, recipe, toy_device(), Layout.single())
    ReferenceLogProbs().begin(run)
    recorder = Recorder()
    train(run, standard_callbacks(run, [recorder])[0])
    return {name: recorder.values(name) for name in (*recipe.loss_names(config), "grad-norm")}


def assert_same(found: Log, expected: Log, tolerance: float = 1e-5) -> None:
    """Compare each number of each update that is expected, the loss always to 1e-5."""
    for name, values in expected.items():
        ours = [x for x, y in zip(found[name], values, strict=True) if y is not None]
        theirs = [y for y in values if y is not None]
        bound = 1e-5 if name == "loss" else tolerance
        assert ours == pytest.approx(theirs, rel=bound, abs=bound), name


@pytest.mark.parametrize("name", TRAININGS)
def test_the_record_is_what_trl_computes(name: str) -> None:
    pytest.importorskip("trl", reason="needs the extra [parity]")
    found = record(TRAININGS[name])
    assert found["adapter"] == TRL[name]["adapter"]
    assert_same(found["log"], TRL[name]["log"])
