"""Text of models with other kinds of attention: that of plain forward passes."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.config.run import ModelRun, narrow
from megatron.device import Device
from megatron.inference.build import EngineOptions, build_engine
from megatron.inference.load import Loaded
from megatron.inference.request import Request
from megatron.parallel.layout import Layout
from tests.inference.toy import drain, greedy, tokens_of
from tests.parity.layouts import DELTA, HYBRID, LATENT, LayoutCase
from tests.training.toy import train_toy

PROMPTS = [(3, 1, 4), (1, 5), (9, 2, 6, 5, 3, 5), (8,), (97, 9, 3, 2), tuple(range(7, 37, 2))]
NEW, VOCAB = 50, 100
# The longest prompt is read in two steps.
OPTIONS = EngineOptions(max_sequences=8, max_step_tokens=12, cache_tokens=512, block_size=4)


NETWORKS = {
    "latent": LATENT,
    "delta nets": f"{DELTA} --init-method-std 0.3",
    "gated": "--attention-output-gate --position-embedding-type rope --group-query-attention "
    "--num-query-groups 2 --init-method-std 0.3",
    "sinks in windows": "--softmax-type learnable --window-size 9,0 --window-attn-skip-freq 2 "
    "--init-method-std 0.3",
    "hybrid": HYBRID,
    "Mamba-2 alone": HYBRID.replace("M-M*", "MMMM"),
    "alibi": "--position-embedding-type alibi --embed-layernorm --window-size 9,0 "
    "--window-attn-skip-freq 2 --init-method-std 0.3",
    "alibi, one group": "--position-embedding-type alibi --scale-alibi --parallel-residual "
    "--shared-parallel-norm --group-query-attention --num-query-groups 1 --init-method-std 0.3",
    "off by one": "--softmax-type off-by-one --init-method-std 0.3",
}


@pytest.mark.parametrize("network", NETWORKS)
def test_greedy_tokens_are_those_of_a_model_without_a_cache(network: str) -> None:
    words = LayoutCase(1, network=f"{NETWORKS[network]} --max-position-embeddings 72").words()
    _, run = train_toy(Layout.single(), words)
    model, tokenizer = run.parts[0].eval(), SimpleNamespace(vocab_size=VOCAB)
    loaded: Any = Loaded(model, tokenizer, narrow(run.config, ModelRun), 0, Layout.single())
    requests = [Request(str(i), prompt, greedy(NEW)) for i, prompt in enumerate(PROMPTS)]
    built = build_engine(loaded, Device.cpu(), OPTIONS)
    events = drain(built, requests)
    if network == "latent":
        tensors = built.executor.memory.layers.values()
        assert {tuple(memory.shape) for memory in tensors} == {(1, 516, 1, 20 + 6)}
    for key, prompt in enumerate(PROMPTS):
        tokens = list(prompt)
        with torch.no_grad():
            for _ in range(NEW):
                scores = model(torch.tensor([tokens]))[0, -1]
                tokens.append(scores[:VOCAB].argmax().item())
        assert tokens_of(events[str(key)]) == tokens[len(prompt) :]
