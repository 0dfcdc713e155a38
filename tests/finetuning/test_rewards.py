"""Reward models: first values, learning, and every layout against one process."""

from __future__ import annotations

import json
import math
import shutil
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from finetune import FinetuningRecipe, choose
from megatron.config.finetuning import finetuning_args
from megatron.errors import EXIT_OK, CheckpointError, ConfigError, DataError
from megatron.finetuning.preferences import REWARD_METRICS
from megatron.parallel.layout import Layout
from megatron.tools import score
from megatron.training.pretrain import main
from tests.checkpoint.huggingface.models import CASES, tensors_of, write_folder
from tests.distributed import run_sharing_memory
from tests.finetuning.test_reference import losses_in
from tests.finetuning.toy_pairs import FILE, train_pairs
from tests.tools.test_checkpoint_util import convert
from tests.training.toy import TOY

CENTERING = 0.01
REWARDS = f"--preference-loss bradley-terry --center-rewards-coefficient {CENTERING} --lr 1e-2"
LORA = "--lora-rank 4 --lora-alpha 8"
LLAMA = """
    --swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope
    --untie-embeddings-and-output-weights --ffn-hidden-size 48
""".split()


@cache
def one_process(words: str = "") -> dict[str, list[float]]:
    return train_pairs(Layout.single(), f"{REWARDS} {words}".split())


def test_rewards_of_chosen_answers_grow() -> None:
    found = train_pairs(Layout.single(), [*REWARDS.split(), "--train-iters", "20"])
    assert found["loss"][0] == pytest.approx(math.log(2), abs=0.1)
    assert found["loss"][-1] < 0.3
    assert found["rewards/accuracies"][-1] > 0.9
    both = zip(found["rewards/chosen"], found["rewards/rejected"], strict=True)
    margins = [chosen - rejected for chosen, rejected in both]
    assert found["rewards/margins"] == pytest.approx(margins, abs=1e-5)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"tensor": 2}, "--tensor-model-parallel-size 2"),
        ({"tensor": 2}, "--tensor-model-parallel-size 2 --sequence-parallel"),
        ({"pipeline": 2}, "--pipeline-model-parallel-size 2"),
        ({"context": 2}, "--context-parallel-size 2"),
        ({}, "--zero-stage 3"),
    ],
    ids=["tensor", "sequence", "pipeline", "context", "zero"],
)
def test_every_layout_equals_one_process(sizes: dict[str, int], words: str) -> None:
    """Train either all weights, or adapters and the head."""
    for both in run_sharing_memory(2, _both, f"{REWARDS} {words}", **sizes):
        for found, lora in zip(both, ("", LORA), strict=True):
            expected = one_process(lora)
            for metric in (*REWARD_METRICS, "grad-norm"):
                assert found[metric] == pytest.approx(expected[metric], rel=2e-4, abs=2e-5), metric


def _both(layout: Layout, words: str) -> list[dict[str, list[float]]]:
    return [train_pairs(layout, f"{words} {lora}".split()) for lora in ("", LORA)]


def run_program(folder: Path, *words: str) -> int:
    toy = [word for word in TOY if word != "--mock-data"]
    file = shutil.copy(FILE, folder.parent)  # its cache is next to it
    given = [*toy, "--data-path", str(file), "--split", "80,20,0", "--no-exit-signal-handler"]
    given += "--seq-length 32 --max-position-embeddings 32 --train-iters 4".split()
    given += ["--save", str(folder), "--save-interval", "2", *words]
    return main(FinetuningRecipe(), finetuning_args(given), choose=choose)


@pytest.mark.parametrize("output", ["tied", "untied"])
def test_a_reward_model_starts_from_a_language_model_and_resumes(
    output: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    network = ["--untie-embeddings-and-output-weights"] * (output == "untied")
    start, folder = tmp_path / "start", tmp_path / "reward"
    words = [*REWARDS.split(), *network]
    assert run_program(start, "--preference-loss", "orpo", *network) == EXIT_OK
    assert run_program(folder, *words, "--load", str(start)) == EXIT_OK
    told = capsys.readouterr().out
    assert "not in the checkpoint, initialized anew: score; the output layer is dropped" in told
    assert "validation loss" in told
    assert "rewards/accuracies value" in told
    assert "PPL" not in told.partition("dropped")[2]
    expected = losses_in(told)
    output = tmp_path / "rewards.jsonl"
    asked = ["--load", str(folder), "--input", str(FILE), "--output", str(output)]
    assert score.main(asked) == EXIT_OK
    margins = [x["chosen"] - x["rejected"] for x in map(json.loads, output.open())]
    accuracy = sum(margin > 0 for margin in margins) / len(margins)
    assert f"{len(margins)} pairs: accuracy {accuracy:.4f}" in capsys.readouterr().err
    assert score.main(asked) == ConfigError.exit_code
    assert f"--output: {output} already exists" in capsys.readouterr().err
    long = tmp_path / "long.jsonl"
    long.write_text(json.dumps({"prompt": "1 ", "chosen": "2 " * 99, "rejected": "3"}) + "\n")
    assert score.main([*asked, "--input", str(long), "--overwrite"]) == DataError.exit_code
    assert "tokens, but the model reads at most 32: shorten" in capsys.readouterr().err
    assert score.main([*asked, "--overwrite"]) == EXIT_OK
    capsys.readouterr()
    assert score.main(["--load", str(start), "--input", str(FILE)]) == CheckpointError.exit_code
    assert "holds a gpt, but a reward model is needed" in capsys.readouterr().err
    shutil.rmtree(folder / "iter_0000004")
    (folder / "latest_checkpointed_iteration.txt").write_text("2")
    assert run_program(folder, *words, "--load", str(folder)) == EXIT_OK
    assert losses_in(capsys.readouterr().out) == {i: expected[i] for i in (3, 4)}
    words = ["--load", str(folder), *network]
    assert run_program(tmp_path / "other", *words) == CheckpointError.exit_code
    assert "reward_head is off here and on in the checkpoint" in capsys.readouterr().err
    words = ["--load", str(folder), "--use-checkpoint-args"]
    assert run_program(tmp_path / "other", *words) == ConfigError.exit_code
    assert "the checkpoint contains a reward model" in capsys.readouterr().err


def test_a_reward_model_of_adapters_is_scored_exported_and_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start, folder = tmp_path / "start", tmp_path / "reward"
    words = [*REWARDS.split(), *LORA.split(), *LLAMA]
    assert run_program(start, "--preference-loss", "orpo", *LLAMA) == EXIT_OK
    assert run_program(folder, *words, "--load", str(start)) == EXIT_OK
    told = capsys.readouterr().out
    assert "initialized anew: score, the adapters; the output layer is dropped" in told
    expected = losses_in(told)
    output = tmp_path / "rewards.jsonl"
    asked = ["--load", str(folder), "--input", str(FILE), "--output", str(output)]
    assert score.main(asked) == EXIT_OK
    assert len(output.read_text().splitlines()) == 12
    assert convert("native", "hf", folder, tmp_path / "merged", "--verify") == EXIT_OK
    assert "score.weight" in load_file(tmp_path / "merged" / "model.safetensors")
    shutil.rmtree(folder / "iter_0000004")
    (folder / "latest_checkpointed_iteration.txt").write_text("2")
    assert run_program(folder, *words, "--load", str(folder)) == EXIT_OK
    assert losses_in(capsys.readouterr().out) == {i: expected[i] for i in (3, 4)}


def test_peft_reads_and_writes_the_adapters_with_the_head(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, folder, ours = tmp_path / "base", tmp_path / "reward", tmp_path / "peft"
    words = [*REWARDS.split(), *LORA.split(), *LLAMA]
    assert run_program(tmp_path / "start", "--preference-loss", "orpo", *LLAMA) == EXIT_OK
    assert convert("native", "hf", tmp_path / "start", base) == EXIT_OK
    assert run_program(folder, *words, "--load", str(base)) == EXIT_OK
    assert convert("native", "peft", folder, ours) == EXIT_OK
    said = json.loads((ours / "adapter_config.json").read_text())
    assert (said["task_type"], said["modules_to_save"]) == ("SEQ_CLS", ["score"])
    tensors = load_file(ours / "adapter_model.safetensors")
    assert "base_model.model.score.weight" in tensors
    # The adapters and the head are read back from the files unchanged.
    capsys.readouterr()
    again = [*words, "--load", str(base), "--load-adapter", str(ours), *"--lr 0 --min-lr 0".split()]
    assert run_program(tmp_path / "again", *again) == EXIT_OK
    told = capsys.readouterr().out
    assert f"adapters and score loaded from {ours}" in told
    assert "initialized anew" not in told
    assert convert("native", "peft", tmp_path / "again", tmp_path / "back") == EXIT_OK
    back = load_file(tmp_path / "back" / "adapter_model.safetensors")
    assert back.keys() == tensors.keys()
    assert all(back[name].equal(tensors[name]) for name in tensors)
    language_model = ["--preference-loss", "orpo", *LORA.split(), *LLAMA]
    refused = [*language_model, "--load", str(base), "--load-adapter", str(ours)]
    assert run_program(tmp_path / "other", *refused) == CheckpointError.exit_code
    assert "a reward model's adapter is for --preference-loss brad" in capsys.readouterr().err
    # PEFT computes the merged model's rewards.
    peft = pytest.importorskip("peft", reason="needs the extra [parity]")
    transformers = pytest.importorskip("transformers")
    assert convert("native", "hf", folder, tmp_path / "merged", "--verify") == EXIT_OK
    kind = transformers.AutoModelForSequenceClassification
    adapted = peft.PeftModel.from_pretrained(kind.from_pretrained(base, num_labels=1), ours)
    merged = kind.from_pretrained(tmp_path / "merged")
    tokens = torch.arange(1, 17)[None]
    with torch.no_grad():
        rewards = [model.eval()(tokens).logits for model in (adapted, merged)]
    torch.testing.assert_close(*rewards, rtol=1e-5, atol=1e-5)
    adapted.save_pretrained(tmp_path / "theirs")
    theirs = load_file(tmp_path / "theirs" / "adapter_model.safetensors")
    assert theirs.keys() == tensors.keys()
    assert all(theirs[name].equal(tensors[name]) for name in tensors)
    again = [*words, "--load", str(base), "--load-adapter", str(tmp_path / "theirs")]
    assert run_program(tmp_path / "more", *again) == EXIT_OK


@pytest.mark.parametrize("words", ["--ckpt-format torch_dist", "--sample-prompts prompts.jsonl"])
def test_refused_combinations_are_named(
    words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [*REWARDS.split(), *words.split()]
    assert run_program(tmp_path / "model", *given) == ConfigError.exit_code
    assert f"bradley-terry cannot be combined with {words}" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_hugging_face_reads_what_we_write(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """--verify compares the rewards computed by both programs."""
    transformers = pytest.importorskip("transformers")
    case = CASES[name]
    tensors = tensors_of(case)
    tensors.pop("lm_head.weight", None)
    tensors["score.weight"] = torch.randn(1, case.config["hidden_size"])
    classes = [case.config["architectures"][0].replace("CausalLM", "SequenceClassification")]
    labels = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    config = {**case.config, "architectures": classes, **labels}
    theirs = write_folder(tmp_path / "theirs", config, tensors)
    ours, again = tmp_path / "ours", tmp_path / "again"
    assert convert("hf", "native", theirs, ours) == EXIT_OK
    assert convert("native", "hf", ours, again, "--verify") == EXIT_OK
    assert "rewards" in capsys.readouterr().out
    assert load_file(again / "model.safetensors").keys() == tensors.keys()
    model = transformers.AutoModelForSequenceClassification.from_pretrained(again)
    assert (type(model).__name__, model.config.num_labels) == (classes[0], 1)
    assert torch.equal(model.score.weight, tensors["score.weight"])
