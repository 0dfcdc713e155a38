"""Text from a saved mixture of experts: that of plain forward passes, whatever is beside it."""

import json
from dataclasses import replace

import pytest
import torch

from megatron.models.router import Router
from megatron.parallel.layout import Layout
from tests.parity.mixtures import SIGMOID, SOFTMAX, MixtureCase
from tests.tools.test_checkpoint_util import convert
from tests.training.toy import train_toy
from tools import generate_samples_gpt

PROMPTS = [[3, 1, 4], [1, 5], [9, 2, 6, 5, 3, 5], [8], [97, 9, 3, 2]]
MORE = 8  # tokens
# In training experts have room for few tokens; a text must not depend on those beside it.
DROPS = f"{SOFTMAX} --moe-expert-capacity-factor 0.5 --moe-input-jitter-eps 0.1"


@pytest.fixture(
    scope="module", params=[SOFTMAX, SIGMOID, DROPS], ids=["softmax", "sigmoid", "drops"]
)
def trained(request, tmp_path_factory):
    """The folder of a trained toy mixture, and its model."""
    folder = tmp_path_factory.mktemp("mixture")
    words = MixtureCase(1, network=request.param, iterations=10).words
    _, run = train_toy(Layout.single(), [*words, "--save", str(folder), "--save-interval", "10"])
    model = run.parts[0].eval()
    for module in model.modules():
        if isinstance(module, Router):
            module.plan = replace(module.plan, capacity=None)
    return folder, model


def _plain(model, prompt):
    """The most likely tokens, one whole forward pass for each."""
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(MORE):
            scores = model(torch.tensor([tokens]))
            tokens.append(scores[0, -1, :100].argmax().item())
    return tokens[len(prompt) :]


def _generated(folder, tmp_path, prompts, name):
    source, target = tmp_path / f"{name}.txt", tmp_path / f"{name}.jsonl"
    source.write_text("".join(" ".join(map(str, prompt)) + "\n" for prompt in prompts))
    words = ["--load", folder, "--sample-input-file", source, "--sample-output-file", target]
    words += ["--greedy", "--out-seq-length", MORE]
    assert generate_samples_gpt.main([str(word) for word in words]) == 0
    answers = [json.loads(line)["text"] for line in target.read_text().splitlines()]
    return [[int(word) for word in answer.split()] for answer in answers]


def test_greedy_text_is_that_of_forward_passes_alone_and_in_a_batch(trained, tmp_path):
    folder, model = trained
    together = _generated(folder, tmp_path, PROMPTS, "together")
    assert together == [_plain(model, prompt) for prompt in PROMPTS]
    alone = [_generated(folder, tmp_path, [p], f"alone{i}")[0] for i, p in enumerate(PROMPTS)]
    assert alone == together


@pytest.mark.parametrize("target", ["hf", "megatron"])
def test_formats_without_such_experts_refuse_them(trained, tmp_path, target, capsys):
    """This toy has shared experts, biases, learned positions and a dense layer."""
    folder, _ = trained
    assert convert("native", target, folder, tmp_path / "out") != 0
    assert not (tmp_path / "out").exists() or not any((tmp_path / "out").iterdir())
    error = capsys.readouterr().err
    expected = {"hf": "no family can express this network", "megatron": "Megatron-LM 23.08"}
    assert expected[target] in error
    assert "Traceback" not in error
