"""Generation with other kinds of attention: the same text as from plain forward passes."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megatron.config.generation import Speculation
from megatron.config.run import ModelRun, narrow
from megatron.device import Device
from megatron.inference import build
from megatron.inference.build import EngineOptions, build_engine
from megatron.inference.load import Loaded
from megatron.inference.request import Request
from megatron.parallel.layout import Layout
from tests.inference.toy import drain, greedy, tokens_of
from tests.parity.layouts import DELTA, HYBRID, LATENT, PARALLEL_MAMBA, LayoutCase
from tests.training.toy import train_toy

PROMPTS = [(3, 1, 4), (1, 5), (9, 2, 6, 5, 3, 5), (8,), (97, 9, 3, 2), tuple(range(7, 37, 2))]
NEW, VOCAB = 50, 100
# The longest prompt is processed in two steps.
OPTIONS = EngineOptions(max_sequences=8, max_step_tokens=12, cache_tokens=512, block_size=4)


LONG_ROPE = (
    "--position-embedding-type rope --rope-type longrope --init-method-std 0.3 "
    "--longrope-original-max-position-embeddings 20 --longrope-short-factor 1 1.1 1.3 1.5 "
    "--longrope-long-factor 1.5 2 3 5 --longrope-attention-factor 1.2"
)
_CHUNKS = (
    "--position-embedding-type rope --no-rope-freq 2 --attention-chunk-size 9 --qk-l2-norm "
    "--attention-temperature-scale 0.5 --attention-temperature-floor 6 --init-method-std 0.3"
)
NETWORKS = {
    "longrope": LONG_ROPE,
    "latent": LATENT,
    "delta nets": f"{DELTA} --init-method-std 0.3",
    "gated": "--attention-output-gate --position-embedding-type rope --group-query-attention "
    "--num-query-groups 2 --init-method-std 0.3",
    "sinks in windows": "--softmax-type learnable --window-size 9,0 --window-attn-skip-freq 2 "
    "--init-method-std 0.3",
    "hybrid": HYBRID,
    "Mamba-2 beside attention": f"{PARALLEL_MAMBA} --init-method-std 0.3",
    "Mamba-2 alone": HYBRID.replace("M-M*", "MMMM"),
    "alibi": "--position-embedding-type alibi --embed-layernorm --window-size 9,0 "
    "--window-attn-skip-freq 2 --init-method-std 0.3",
    "alibi, one group": "--position-embedding-type alibi --scale-alibi --parallel-residual "
    "--shared-parallel-norm --group-query-attention --num-query-groups 1 --init-method-std 0.3",
    "chunks": _CHUNKS,
    "chunks of blocks": _CHUNKS.replace("size 9", "size 8"),
    "off by one": "--softmax-type off-by-one --init-method-std 0.3",
}


DYNAMIC = (
    "--position-embedding-type rope --rope-type dynamic --rotary-scaling-factor 4 "
    "--init-method-std 0.3"
)


def toy(network: str, positions: int = 72) -> Loaded:
    """Return a trained toy model in the form that an engine takes."""
    words = LayoutCase(1, network=f"{network} --max-position-embeddings {positions}").words()
    _, run = train_toy(Layout.single(), words)
    model, tokenizer = run.parts[0].eval(), SimpleNamespace(vocab_size=VOCAB)
    loaded: Any = Loaded(model, tokenizer, narrow(run.config, ModelRun), 0, Layout.single())
    return loaded


def without_cache(model: Any, prompt: tuple[int, ...], new: int = NEW) -> list[int]:
    """Return greedy tokens, each from a pass over the whole text."""
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(new):
            scores = model(torch.tensor([tokens]))[0, -1]
            tokens.append(scores[:VOCAB].argmax().item())
    return tokens[len(prompt) :]


def likeliest(model: Any, prompt: tuple[int, ...], answer: list[int]) -> list[int]:
    """Return the likeliest token after each position of an answer's text, from one pass over it.

    They equal a greedy answer: each position sees what it saw when the answer ended there.
    """
    with torch.no_grad():
        scores = model(torch.tensor([[*prompt, *answer[:-1]]]))[0, len(prompt) - 1 :]
    return scores[:, :VOCAB].argmax(1).tolist()


@pytest.mark.parametrize("network", NETWORKS)
def test_greedy_tokens_are_those_of_a_model_without_a_cache(network: str) -> None:
    loaded = toy(NETWORKS[network])
    requests = [Request(str(i), prompt, greedy(NEW)) for i, prompt in enumerate(PROMPTS)]
    built = build_engine(loaded, Device.cpu(), OPTIONS)
    events = drain(built, requests)
    if network == "latent":
        tensors = built.executor.memory.layers.values()
        assert {tuple(memory.shape) for memory in tensors} == {(1, 516, 1, 20 + 6)}
    for key, prompt in enumerate(PROMPTS):
        answer = tokens_of(events[str(key)])
        assert len(answer) == NEW
        if network == "longrope":  # divisors depend on the current text length
            assert answer == without_cache(loaded.model, prompt)
        else:
            assert answer == likeliest(loaded.model, prompt, answer)


@pytest.mark.parametrize("size", [9, 8])
def test_chunks_of_attention_do_not_depend_on_the_steps(size: int) -> None:
    """Compare small steps, drafts, preempted texts, and a shared prefix."""
    loaded = toy(_CHUNKS.replace("size 9", f"size {size}"))
    shared = tuple(range(40, 61))
    asked = [*PROMPTS[:4], shared, (*shared, 3), (*shared[:-1], 9), shared[:12], *PROMPTS[:2]]
    requests = [Request(str(i), prompt, greedy(30)) for i, prompt in enumerate(asked)]
    ngram = Speculation(method="ngram", num_speculative_tokens=4, prompt_lookup_min=1)
    expected = None
    for changes in (
        {"max_step_tokens": 9},
        {"speculation": ngram},
        {"cache_tokens": 160},
    ):
        events = drain(build_engine(loaded, Device.cpu(), replace(OPTIONS, **changes)), requests)
        found = [tokens_of(events[str(i)]) for i in range(len(asked))]
        if expected is None:
            expected = [likeliest(loaded.model, *one) for one in zip(asked, found, strict=True)]
        assert found == expected, changes


_NGRAM = Speculation(method="ngram", num_speculative_tokens=4, prompt_lookup_min=1)


def _check_engines(loaded: Loaded, asked: list[tuple[int, ...]], expected: list[list[int]]) -> None:
    """Check the answers of 40 tokens in all kinds of steps."""
    requests = [Request(str(i), prompt, greedy(40)) for i, prompt in enumerate(asked)]
    for changes, ahead in (
        ({}, False),
        ({}, True),
        ({"max_step_tokens": 9}, True),
        ({"speculation": _NGRAM}, False),
        ({"cache_tokens": 160}, True),
    ):
        with patch.object(build, "is_asynchronous", lambda device, ahead=ahead: ahead):
            engine = build_engine(loaded, Device.cpu(), replace(OPTIONS, **changes))
        events = drain(engine, requests)
        found = [tokens_of(events[str(i)]) for i in range(len(asked))]
        assert found == expected, (changes, ahead)


def test_texts_grow_beyond_the_trained_context() -> None:
    """Keys are recomputed with the long divisors, and prompts of the same length share blocks.

    This also holds with drafts, steps queued ahead, small chunks and preempted texts.
    """
    loaded = toy(LONG_ROPE)
    shared = tuple(range(40, 60))  # as long as the training context
    asked = [*PROMPTS, shared, (*shared, 3), (*shared[:-1], 9), (*shared, 3, 8), *PROMPTS]
    known = {prompt: without_cache(loaded.model, prompt, 40) for prompt in dict.fromkeys(asked)}
    expected = [known[prompt] for prompt in asked]
    _check_engines(loaded, asked, expected)
    short = toy(LONG_ROPE.replace("position-embeddings 20", "position-embeddings 72"))
    assert without_cache(short.model, PROMPTS[0], 40) != expected[0]


def test_tokens_keep_the_rotation_that_they_had_when_they_were_new() -> None:
    """Dynamic NTK is used beyond the training context of 20 tokens.

    This also holds in small chunks, with drafts, steps queued ahead, preempted texts, and
    prompts that share a prefix.
    """
    loaded = toy(DYNAMIC, positions=20)
    model: Any = loaded.model
    assert model.plan.positions == 80
    shared = tuple(range(40, 64))
    asked = [*PROMPTS, shared, (*shared, 3), (*shared[:-1], 9), shared[:18], *PROMPTS, shared]

    def as_when_new(prompt: tuple[int, ...]) -> list[int]:
        def rotation(positions: torch.Tensor, length: Any = None) -> tuple[Any, ...]:
            lengths = (positions + 1).clamp(min=len(prompt))
            return tuple(table(positions, lengths) for table in model.rotary)

        with patch.object(model, "rotation", rotation):
            return without_cache(model, prompt, 40)

    known = {prompt: as_when_new(prompt) for prompt in dict.fromkeys(asked)}
    expected = [known[prompt] for prompt in asked]
    assert known[shared] != without_cache(model, shared, 40), "keys do not grow"
    _check_engines(loaded, asked, expected)
