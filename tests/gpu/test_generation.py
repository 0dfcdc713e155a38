"""The engine on a GPU: recorded steps say what others say, and batches do not show."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

from megatron.config import parse_config
from megatron.device import Device
from megatron.inference.build import EngineOptions, build_engine
from megatron.inference.engine import BatchEngine
from megatron.inference.request import Request, Sampling
from megatron.models.gpt import GPTModel
from megatron.parallel.initialization import initialize
from megatron.parallel.layout import Layout
from tests.inference.toy import drain, greedy, prompts, tokens_of

DEVICE = Device.pick()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not DEVICE.is_gpu, reason="needs a GPU")]

VOCAB = 2048
FLAGS = """
    --num-layers 4 --hidden-size 512 --num-attention-heads 8 --group-query-attention
    --num-query-groups 2 --seq-length 1024 --max-position-embeddings 1024 --init-method-std 0.08
    --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --bf16
    --tokenizer-type NullTokenizer --vocab-size 2047 --micro-batch-size 1 --lr 1 --train-iters 1
    --mock-data
""".split()
OPTIONS = EngineOptions(max_sequences=24, max_step_tokens=256, cache_tokens=24 * 512)
ASKED = [
    Request(str(i), prompt, greedy(40, logprobs=True))
    for i, prompt in enumerate(prompts(40, longest=400, vocab=VOCAB))
]


@cache
def model() -> GPTModel:
    config = parse_config(FLAGS, world_size=1).config
    made = GPTModel.from_config(config, Layout.single(), DEVICE, VOCAB)
    initialize(made.named_parameters(), seed=1)
    return made


def engine(options: EngineOptions) -> BatchEngine:
    config = parse_config(FLAGS, world_size=1).config
    return build_engine(model(), config, Layout.single(), DEVICE, vocab_size=VOCAB, options=options)


def test_recorded_steps_say_what_others_say() -> None:
    """Of fixed products, so that a recording's extra rows change no bits."""
    options = replace(OPTIONS, product_rows=64)
    recorded = engine(options)
    found = drain(recorded, ASKED)
    graphs = recorded._executor._graphs  # type: ignore[attr-defined]
    assert graphs is not None
    assert graphs._recordings
    assert found == drain(engine(replace(options, graphs=False)), ASKED)


def test_with_products_of_fixed_size_the_batch_does_not_show() -> None:
    """Tokens and the bits of their log probabilities."""
    options = replace(OPTIONS, product_rows=64)
    together = drain(engine(options), ASKED)
    alone = engine(options)
    for request in ASKED[:12]:
        assert drain(alone, [request])[request.id] == together[request.id]


def test_greedy_tokens_are_almost_always_those_of_a_prompt_alone() -> None:
    """Without them: two tokens that are nearly as likely may change places."""
    together, alone = drain(engine(OPTIONS), ASKED), engine(OPTIONS)
    same = [
        tokens_of(drain(alone, [request])[request.id]) == tokens_of(together[request.id])
        for request in ASKED
    ]
    assert sum(same) >= 0.5 * len(same)


def test_drawn_tokens_follow_the_seed() -> None:
    warm = Sampling(max_new_tokens=30, temperature=1.0, top_k=50, top_p=0.9, seed=3)
    request = Request("a", (1, 2, 3), warm)
    options = replace(OPTIONS, product_rows=64)
    first = tokens_of(drain(engine(options), [request])["a"])
    among = tokens_of(drain(engine(options), [*ASKED, request])["a"])
    assert first == among
    assert torch.tensor(first).unique().numel() > 5
