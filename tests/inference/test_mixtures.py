"""Generation from a saved mixture of experts equals plain forward passes, in any batch."""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from megatron.inference.build import EngineOptions
from megatron.inference.request import Request
from megatron.models.router import Router
from megatron.parallel.layout import Layout
from tests.checkpoint.huggingface.models import CASES, tensors_of, write_folder
from tests.inference.server.live import make_settings, running, write_tokenizer
from tests.inference.toy import drain, greedy, prompts, tokens_of, toy_engine
from tests.parity.mixtures import SIGMOID, SOFTMAX, TOP1, MixtureCase
from tests.tools.test_checkpoint_util import convert
from tests.training.toy import train_toy
from tools import generate_samples_gpt

PROMPTS = [[3, 1, 4], [1, 5], [9, 2, 6, 5, 3, 5], [8], [97, 9, 3, 2]]
MORE = 8  # tokens
# Experts' capacity is small in training; a text must not depend on others in its batch.
DROPS = f"{SOFTMAX} --moe-expert-capacity-factor 0.5 --moe-input-jitter-eps 0.1"
GATED = f"{TOP1} --moe-eval-capacity-factor 0.5"  # residual experts, each token drawing one


@pytest.fixture(
    scope="module",
    params=[SOFTMAX, SIGMOID, DROPS, GATED],
    ids=["softmax", "sigmoid", "drops", "DeepSpeed's gating"],
)
def trained(request, tmp_path_factory):
    """Return the folder of a trained toy mixture, and its model."""
    folder = tmp_path_factory.mktemp("mixture")
    words = MixtureCase(1, network=request.param, iterations=10).words
    _, run = train_toy(Layout.single(), [*words, "--save", str(folder), "--save-interval", "10"])
    model = run.parts[0].eval()
    for module in model.modules():
        if isinstance(module, Router):
            module.plan = replace(module.plan, capacity=None, eval_capacity=None)
    return folder, model


def _plain(model, prompt):
    """Return the most likely tokens, with one whole forward pass for each."""
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


FAMILIES = ["mixtral", "olmoe", "qwen2 mixture", "qwen3 mixture"]
VOCABULARY = 400  # the tokenizer's


def _engine(name, folder):
    """Return an engine for 256 sequences, over a random model."""
    case = replace(CASES[name], config={**CASES[name].config, "vocab_size": VOCABULARY})
    write_folder(folder, case.config, tensors_of(case))
    options = EngineOptions(max_sequences=256, max_step_tokens=512, cache_tokens=8192)
    return toy_engine(folder, options)


@pytest.mark.parametrize("name", FAMILIES)
def test_texts_do_not_depend_on_the_batch(name, tmp_path):
    """Compare texts alone, in batches of 32, and all 256 at once, greedy and with a seed."""
    engine = _engine(name, tmp_path)
    asked = [
        Request(str(i), prompt, greedy(8, temperature=0.0 if i % 2 else 1.0, seed=i))
        for i, prompt in enumerate(prompts(256, longest=9, vocab=VOCABULARY))
    ]
    together = drain(engine, asked)
    for first in range(0, 256, 32):
        batch = drain(engine, asked[first : first + 32])
        assert all(tokens_of(batch[key]) == tokens_of(together[key]) for key in batch)
    for request in asked[::11]:
        alone = drain(engine, [request])
        assert tokens_of(alone[request.id]) == tokens_of(together[request.id])


def test_texts_of_a_server_do_not_depend_on_the_batch(tmp_path):
    engine = _engine("olmoe", tmp_path / "model")
    write_tokenizer(tmp_path)
    words = "def main return Hello world One two three four five".split()
    texts = [" ".join((words * 2)[i % 7 : i % 7 + 1 + i % 3]) + str(i) for i in range(256)]

    def clear_texts(batch):
        """Return the texts none of whose choices is between two tokens of almost equal scores.

        On a CPU, the last bits of scores depend on the batch.
        """
        body = {"prompt": batch, "max_tokens": 8, "temperature": 0, "logprobs": 2}
        choices = server.post("/v1/completions", body).json()["choices"]
        return [
            text
            for text, choice in zip(batch, choices, strict=True)
            if all(
                max(scores.values()) - min(scores.values()) > 1e-3 or len(scores) < 2
                for scores in choice["logprobs"]["top_logprobs"]
            )
        ]

    def ask(batch):
        body = {"prompts": batch, "tokens_to_generate": 8, "top_k": 1}
        answer = server.put(body)
        assert answer.status_code == 200, answer.text
        return answer.json()["text"]

    with running(engine, make_settings(tmp_path, engine)) as server:
        batches = [clear_texts(texts[first : first + 32]) for first in range(0, 256, 32)]
        texts = [text for batch in batches for text in batch]
        apart = [text for batch in batches for text in ask(batch)]
        with ThreadPoolExecutor(len(batches)) as pool:
            together = [text for answer in pool.map(ask, batches) for text in answer]
        alone = [ask([text])[0] for text in texts[::11]]
    assert together == apart
    assert alone == together[::11]
    assert len(set(together)) > 200


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
