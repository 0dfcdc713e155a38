"""Reward models: first values, learning, and every layout against one process."""

from __future__ import annotations

import json
import math
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.utils import parametrize

from finetune import FinetuningRecipe, choose
from megatron.config.finetuning import finetuning_words
from megatron.config.parser import parse_config
from megatron.errors import EXIT_OK, CheckpointError, ConfigError
from megatron.finetuning.preferences import REWARD_METRICS
from megatron.parallel.layout import Layout
from megatron.tools import score
from megatron.training.build import build_run
from megatron.training.checkpointing import network_of
from megatron.training.loop import standard_callbacks, train
from megatron.training.pretrain import main
from tests.checkpoint.huggingface.models import CASES, tensors_of, write_folder
from tests.distributed import run_sharing_memory, toy_device
from tests.finetuning.record_trl import BATCH, LR
from tests.finetuning.test_reference import losses_in
from tests.finetuning.test_trl import WORDS
from tests.finetuning.toy_pairs import FILE, ToyRewards, rows_of_one_pair, toy_pairs, train_pairs
from tests.tools.test_checkpoint_util import convert
from tests.training.toy import TOY, Recorder

CENTERING = 0.01
REWARDS = f"--preference-loss bradley-terry --center-rewards-coefficient {CENTERING} --lr 1e-2"
LORA = "--lora-rank 4 --lora-alpha 8"
STEPS = 20
# transformers' module of each projection that has an adapter.
MODULES = {
    "attention.qkv.adapter.query": "self_attn.q_proj",
    "attention.qkv.adapter.key": "self_attn.k_proj",
    "attention.qkv.adapter.value": "self_attn.v_proj",
    "attention.output.adapter.weight": "self_attn.o_proj",
    "mlp.up.adapter.gate": "mlp.gate_proj",
    "mlp.up.adapter.up": "mlp.up_proj",
    "mlp.down.adapter.weight": "mlp.down_proj",
}


@cache
def one_process(words: str = "") -> dict[str, list[float]]:
    return train_pairs(Layout.single(), f"{REWARDS} {words}".split())


class TinyRewards(ToyRewards):
    """Training on pairs of the tiny Llama's tokens."""

    vocabulary = 70


class LowRank(nn.Module):
    """A weight with an adapter of rank 4 and alpha 8, which changes nothing at first."""

    def __init__(self, a: Tensor, rows: int) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(a.clone()), nn.Parameter(torch.zeros(rows, len(a)))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + 8 / 4 * self.b @ self.a


def second_implementation(folder: Path, start: dict[str, Tensor]) -> dict[str, list[float]]:
    """Train transformers' reward model with the loss of TRL's documentation.

    Every sequence is computed alone.

    Args:
        folder: The language model to start from.
        start: Our first values of the head and of the adapters' A, by our names.
    """
    transformers = pytest.importorskip("transformers")
    kind = transformers.LlamaForSequenceClassification
    model = kind.from_pretrained(folder, num_labels=1, dtype=torch.float32)
    adapters = {name: tensor for name, tensor in start.items() if name.endswith(".a")}
    if adapters:
        model.requires_grad_(False)
    for name, a in adapters.items():
        _, layer, *site = name.removesuffix(".a").split(".")
        module = model.get_submodule(f"model.layers.{layer}.{MODULES['.'.join(site)]}")
        low_rank = LowRank(a, module.out_features)
        parametrize.register_parametrization(module, "weight", low_rank)
    model.score.weight = nn.Parameter(start["score.weight"].clone())
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LR, eps=1e-8, weight_decay=0)
    pairs = toy_pairs(70)
    found: dict[str, list[float]] = {name: [] for name in (*REWARD_METRICS, "grad-norm")}
    order = rows_of_one_pair(pairs, STEPS * BATCH)

    def reward(example: int) -> Any:
        return model(torch.tensor(pairs[example][0])[None].long()).logits[0, 0]

    for step in range(STEPS):
        batch = order[step * BATCH : (step + 1) * BATCH]
        chosen = torch.stack([reward(2 * i) for i in batch])
        rejected = torch.stack([reward(2 * i + 1) for i in batch])
        loss = -nn.functional.logsigmoid(chosen - rejected).mean()
        loss = loss + CENTERING * ((chosen + rejected) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        margins = (chosen - rejected).detach()
        values = (loss, chosen.mean(), rejected.mean(), (margins > 0).float().mean())
        for name, value in zip(found, (*values, margins.mean(), norm), strict=True):
            found[name].append(float(value))
    return found


@pytest.mark.parametrize("lora", ["", LORA], ids=["full", "lora"])
def test_training_equals_a_second_implementation(lora: str, tmp_path: Path) -> None:
    case = CASES["llama"]
    model = write_folder(tmp_path / "model", case.config, tensors_of(case))
    words = ["--preference-loss", "bradley-terry", "--center-rewards-coefficient", str(CENTERING)]
    words += ["--train-iters", str(STEPS), "--load", str(model), "--data-path", str(FILE)]
    words = [*WORDS, *words, *lora.split()]
    config = parse_config(
        words, world_size=1, architecture="gpt", read_checkpoint=network_of
    ).config
    run = build_run(config, TinyRewards(), toy_device(), Layout.single())
    start = {name: parameter.detach().clone() for name, parameter in run.named_parameters()}
    recorder = Recorder()
    train(run, standard_callbacks(run, [recorder])[0])
    after = dict(run.named_parameters())
    changed = {name for name, before in start.items() if not torch.equal(before, after[name])}
    assert "score.weight" in changed
    if lora:
        assert all(".adapter." in name for name in changed - {"score.weight"})
        assert len([name for name in start if name.endswith(".adapter.query.a")]) == 2
    expected = second_implementation(model, start)
    for name, values in expected.items():
        assert recorder.values(name) == pytest.approx(values, rel=1e-5, abs=1e-5), name


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
    """All weights are trained, or adapters and the head."""
    for both in run_sharing_memory(2, _both, f"{REWARDS} {words}", **sizes):
        for found, lora in zip(both, ("", LORA), strict=True):
            expected = one_process(lora)
            for metric in (*REWARD_METRICS, "grad-norm"):
                assert found[metric] == pytest.approx(expected[metric], rel=2e-4, abs=2e-5), metric


def _both(layout: Layout, words: str) -> list[dict[str, list[float]]]:
    return [train_pairs(layout, f"{words} {lora}".split()) for lora in ("", LORA)]


def run_program(folder: Path, *words: str) -> int:
    toy = [word for word in TOY if word != "--mock-data"]
    file = shutil.copy(FILE, folder.parent)  # its cache is beside it
    given = [*toy, "--data-path", str(file), "--split", "80,20,0", "--no-exit-signal-handler"]
    given += "--seq-length 32 --max-position-embeddings 32 --train-iters 4".split()
    given += ["--save", str(folder), "--save-interval", "2", *words]
    return main(FinetuningRecipe(), finetuning_words(given), choose=choose)


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
    assert "the checkpoint holds a reward model" in capsys.readouterr().err


def test_a_reward_model_of_adapters_is_scored_exported_and_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start, folder = tmp_path / "start", tmp_path / "reward"
    llama = "--swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope"
    network = [*llama.split(), "--untie-embeddings-and-output-weights", "--ffn-hidden-size", "48"]
    words = [*REWARDS.split(), *LORA.split(), *network]
    assert run_program(start, "--preference-loss", "orpo", *network) == EXIT_OK
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
    assert convert("native", "peft", folder, tmp_path / "peft") == CheckpointError.exit_code
    assert (
        "whose head was trained along with the adapters: use --saver hf" in capsys.readouterr().err
    )
    shutil.rmtree(folder / "iter_0000004")
    (folder / "latest_checkpointed_iteration.txt").write_text("2")
    assert run_program(folder, *words, "--load", str(folder)) == EXIT_OK
    assert losses_in(capsys.readouterr().out) == {i: expected[i] for i in (3, 4)}


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
    """--verify compares the rewards of both programs."""
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
