"""The engine on a GPU: recorded steps equal others, and results do not depend on the batch."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

from megatron.config import RunConfig, parse_config
from megatron.config.generation import Speculation
from megatron.device import Device
from megatron.inference.build import EngineOptions, build_engine
from megatron.inference.engine import BatchEngine
from megatron.inference.load import Loaded, serving_context
from megatron.inference.request import Event, Finished, Request, Sampling
from megatron.models.build import build_model
from megatron.models.gpt import GPTModel
from megatron.parallel.layout import Layout
from megatron.parallel.parameter import initialize
from megatron.tokenizer import build_tokenizer
from tests.inference.toy import drain, greedy, prompts, tokens_of
from tools.generation_benchmark.measure import add_adapters

DEVICE = Device.pick()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not DEVICE.is_gpu, reason="needs a GPU")]

VOCAB = 2048
FLAGS = """
    --num-layers 4 --hidden-size 512 --num-attention-heads 8 --seq-length 1024
    --max-position-embeddings 1024 --init-method-std 0.08
    --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --bf16
    --tokenizer-type NullTokenizer --vocab-size 2047 --micro-batch-size 1 --lr 1 --train-iters 1
    --mock-data
""".split()
OPTIONS = EngineOptions(max_sequences=24, max_step_tokens=256, cache_tokens=24 * 512)
SAMPLING = greedy(40, logprobs=True)
ASKED = [
    Request(str(i), prompt, SAMPLING)
    for i, prompt in enumerate(prompts(40, longest=400, vocab=VOCAB))
]


MIXTURE = (
    *("--num-experts", "16", "--moe-router-topk", "4", "--moe-ffn-hidden-size", "256"),
    *("--moe-shared-expert-intermediate-size", "512"),
)


BOUNDED = ("--attn-logit-softcapping", "20", "--softmax-scale", "0.1")
SINKS = ("--softmax-type", "learnable", "--window-size", "60,0", "--window-attn-skip-freq", "2")


CHUNKS = (
    *("--no-rope-freq", "2", "--attention-chunk-size", "64", "--qk-l2-norm"),
    *("--attention-temperature-scale", "0.1", "--attention-temperature-floor", "50"),
)


AHEAD = ("--mtp-num-layers", "2")
LATENT = (
    *("--multi-latent-attention", "--kv-lora-rank", "128", "--q-lora-rank", "192"),
    *("--qk-head-dim", "64", "--qk-pos-emb-head-dim", "32", "--v-head-dim", "64"),
    "--qk-layernorm",
)
GROUPS = ("--group-query-attention", "--num-query-groups", "2")


def configuration(further: tuple[str, ...]) -> RunConfig:
    groups = () if "--multi-latent-attention" in further else GROUPS
    return parse_config([*FLAGS, *groups, *further], world_size=1).config


@cache
def model(further: tuple[str, ...]) -> GPTModel:
    config = configuration(further)
    made = build_model(GPTModel, config, serving_context(config, Layout.single(), DEVICE), VOCAB)
    initialize(made.named_parameters(), seed=1)
    return made


def engine(options: EngineOptions, further: tuple[str, ...] = ()) -> BatchEngine:
    config = configuration(further)
    tokenizer = build_tokenizer(config.tokenizer)
    return build_engine(
        Loaded(model(further), tokenizer, config, 0, Layout.single()), DEVICE, options
    )


@pytest.mark.parametrize(
    "further",
    [(), MIXTURE, SINKS, BOUNDED, CHUNKS, LATENT],
    ids=["dense", "mixture", "sinks", "bounded", "chunks", "latent"],
)
def test_recorded_steps_equal_unrecorded_ones(further: tuple[str, ...]) -> None:
    """Results are bit-identical, although a recording has more rows."""
    recorded = engine(OPTIONS, further)
    found = drain(recorded, ASKED)
    graphs = recorded.executor.graphs
    assert graphs is not None
    assert graphs._recordings
    assert found == drain(engine(replace(OPTIONS, graphs=False), further), ASKED)


@pytest.mark.parametrize(
    "further",
    [(), MIXTURE, SINKS, CHUNKS, LATENT],
    ids=["dense", "mixture", "sinks", "chunks", "latent"],
)
def test_results_do_not_depend_on_the_batch(further: tuple[str, ...]) -> None:
    """Compare the tokens and all bits of the log probabilities of prompts and generated text."""
    scored = replace(SAMPLING, max_new_tokens=3, prompt_logprobs=True)
    both = [*ASKED, *(replace(r, id=f"scored {r.id}", sampling=scored) for r in ASKED[:6])]
    together = drain(engine(OPTIONS, further), both)
    alone = engine(OPTIONS, further)
    for request in both[:12] + both[-6:]:
        assert drain(alone, [request])[request.id] == together[request.id]


@pytest.mark.parametrize("graphs", [True, False], ids=["recorded", "not recorded"])
@pytest.mark.parametrize("method", ["ngram", "mtp"])
def test_results_do_not_depend_on_drafts(method: str, graphs: bool) -> None:
    """Every log-probability is the same to the bit, for right and wrong drafts."""
    asked = [*ASKED, *(Request(f"loop {i}", (3, 4, 5 + i) * 50, SAMPLING) for i in range(8))]
    guessing = replace(
        OPTIONS,
        speculation=Speculation(method=method, num_speculative_tokens=2, prompt_lookup_min=1),
        graphs=graphs,
    )
    found = engine(guessing, AHEAD)
    assert drain(found, asked) == drain(engine(OPTIONS, AHEAD), asked)
    assert found.stats.drafted_tokens > 200
    recorded = found.executor.graphs
    assert (recorded is not None and len(recorded._recordings) > 0) == graphs


def test_results_do_not_depend_on_where_a_prefix_is_found_or_cut() -> None:
    stem = ASKED[0].prompt * (1 + 300 // len(ASKED[0].prompt))
    asked = [
        Request(str(i), stem[:length] + tail, SAMPLING)
        for i, (length, tail) in enumerate([(300, ()), (300, (5, 6)), (128, (7,)), (48, ())])
    ]
    fresh = {r.id: drain(engine(OPTIONS), [r])[r.id] for r in asked}
    one = engine(replace(OPTIONS, max_step_tokens=70, max_sequences=3))
    for request in asked:
        (found,) = drain(one, [request]).values()
        assert events_alike(found) == events_alike(fresh[request.id])


def adapted(options: EngineOptions) -> BatchEngine:
    """Return an engine over the same model with three random adapters."""
    config = configuration(())
    context = serving_context(config, Layout.single(), DEVICE)
    made = build_model(GPTModel, config, context, VOCAB)
    initialize(made.named_parameters(), seed=1)
    torch.manual_seed(1)
    rows = add_adapters(made, context, count=3, rank=12)
    loaded = Loaded(made, build_tokenizer(config.tokenizer), config, 0, Layout.single(), rows)
    return build_engine(loaded, DEVICE, options)


def test_answers_of_adapters_do_not_depend_on_the_batch() -> None:
    """Answers are bit-identical, recorded or not, also those of requests without an adapter."""
    asked = [replace(request, adapter=i % 4) for i, request in enumerate(ASKED)]
    recorded = adapted(OPTIONS)
    found = drain(recorded, asked)
    graphs = recorded.executor.graphs
    assert graphs is not None
    assert {is_adapted for _, _, is_adapted in graphs._recordings} >= {True}
    assert found == drain(adapted(replace(OPTIONS, graphs=False)), asked)
    alone, plain = adapted(OPTIONS), engine(OPTIONS)
    for request in asked[:12]:
        assert drain(alone, [request])[request.id] == found[request.id]
        without = drain(plain, [replace(request, adapter=0)])[request.id]
        assert (without == found[request.id]) == (request.adapter == 0)


def events_alike(events: list[Event]) -> list[Event]:
    """Return the events with the number of cached tokens set to 0."""
    *before, end = events
    assert isinstance(end, Finished)
    return [*before, replace(end, cached_tokens=0)]


def test_drawn_tokens_follow_the_seed() -> None:
    warm = Sampling(max_new_tokens=30, temperature=1.0, top_k=50, top_p=0.9, seed=3)
    request = Request("a", (1, 2, 3), warm)
    first = tokens_of(drain(engine(OPTIONS), [request])["a"])
    among = tokens_of(drain(engine(OPTIONS), [*ASKED, request])["a"])
    assert first == among
    assert torch.tensor(first).unique().numel() > 5
