"""Losses, rewards and training against TRL 1.16's, as recorded by record_trl.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megatron.config.parser import parse_config
from megatron.config.preferences import PreferenceConfig
from megatron.finetuning.preferences import METRICS, Pairs, pair_losses
from megatron.finetuning.reference import ReferenceLogProbs
from megatron.parallel.layout import Layout
from megatron.training.build import build_run
from megatron.training.checkpointing import network_of
from megatron.training.loop import standard_callbacks, train
from tests.checkpoint.huggingface.models import CASES, tensors_of, write_folder
from tests.distributed import toy_device
from tests.finetuning.record_trl import BATCH, DPO, LORA, LR, RECORD, first_adapter
from tests.finetuning.toy_pairs import FILE, ToyPreferences
from tests.training.toy import Recorder

TRL = json.loads(RECORD.read_text())
WORDS = f"""
    --use-checkpoint-args --finetune --tokenizer-type NullTokenizer --vocab-size 69
    --make-vocab-size-divisible-by 2 --seq-length 24 --max-position-embeddings 24 --no-packing
    --sft --calculate-per-token-loss --micro-batch-size 2 --global-batch-size {BATCH} --lr {LR}
    --lr-decay-style constant --adam-eps 1e-8 --adam-beta2 0.999 --weight-decay 0 --clip-grad 1
    --attention-dropout 0 --hidden-dropout 0 --eval-iters 0 --log-interval 1 --num-workers 0
    --no-exit-signal-handler
""".split()


class TinyPreferences(ToyPreferences):
    """Training on pairs of the tiny Llama's tokens."""

    vocabulary = 70


@pytest.mark.parametrize("loss", DPO)
def test_training_equals_dpo_trainer(loss: str, tmp_path: Path) -> None:
    smoothing = str(DPO[loss].get("label_smoothing", 0))
    words = ["--preference-loss", loss]
    words += ["--preference-label-smoothing", smoothing] if loss == "robust" else []
    assert_equals_trl(TRL[loss], tmp_path, words)


def assert_equals_trl(expected: dict[str, list[float]], folder: Path, words: list[str]) -> None:
    """Train the tiny Llama as TRL did, and compare the logs."""
    case = CASES["llama"]
    model = write_folder(folder / "model", case.config, tensors_of(case))
    words = [*WORDS, "--load", str(model), "--data-path", str(FILE), *words]
    words += ["--train-iters", str(len(expected["loss"]))]
    config = parse_config(
        words, world_size=1, architecture="gpt", read_checkpoint=network_of
    ).config
    run = build_run(config, TinyPreferences(), toy_device(), Layout.single())
    ReferenceLogProbs().begin(run)
    recorder = Recorder()
    train(run, standard_callbacks(run, [recorder])[0])
    for name in (*METRICS, "grad-norm"):
        # Sums of log-probabilities are around -20, of which 1e-5 is five digits of float32.
        assert recorder.values(name) == pytest.approx(expected[name], rel=1e-5, abs=1e-5), name


def test_training_an_adapter_equals_dpo_trainer(tmp_path: Path) -> None:
    """The reference is the model with its adapter off, there and here."""
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    save_file(first_adapter(TRL["adapter"]), adapter / "adapter_model.safetensors")
    (adapter / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", **LORA}))
    words = f"--lora-rank {LORA['r']} --lora-alpha {LORA['lora_alpha']} --load-adapter {adapter}"
    assert_equals_trl(TRL["lora"], tmp_path, ["--preference-loss", "dpo", *words.split()])


def test_losses_without_reference_equal_trl() -> None:
    given = TRL["losses"]
    policy = Pairs(torch.tensor(given["chosen"]), torch.tensor(given["rejected"]))
    one = Pairs(*(torch.ones(8) for _ in range(2)))
    simpo = PreferenceConfig(
        preference_loss="simpo", preference_beta=2.0, preference_label_smoothing=0.1
    )
    found = pair_losses(simpo, policy, one)
    assert found.losses.tolist() == pytest.approx(given["simpo"], rel=1e-6)
    for rewards, expected in zip(found.rewards, given["simpo rewards"], strict=True):
        assert rewards.tolist() == pytest.approx(expected, rel=1e-6)
    found = pair_losses(PreferenceConfig(preference_loss="orpo"), policy, one)
    assert found.losses.tolist() == pytest.approx(given["orpo"], rel=1e-6)
