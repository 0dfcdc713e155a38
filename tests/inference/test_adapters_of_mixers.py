"""Served adapters of latent attention, output gates, mixers with states, outputs and routers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pytest
import torch

from megatron.config.parser import Program
from megatron.device import Device
from megatron.inference.adapters import add_to, open_adapters
from megatron.inference.build import EngineOptions, build_engine
from megatron.inference.engine import BatchEngine
from megatron.inference.load import Loaded, load_gpt, parse_generation
from megatron.inference.request import Request, Token
from megatron.parallel.layout import Layout
from megatron.training.checkpointing import save_run
from megatron.training.run import Run
from tests.checkpoint.huggingface.record_peft import written_base
from tests.distributed import run_distributed
from tests.inference.toy import drain, greedy, prompt_of, prompts
from tests.repository import ROOT
from tests.training.test_adapters_of_mixers import NETWORKS
from tests.training.toy import build_toy

CPU = Device.cpu()
PEFT = ROOT / "tests" / "checkpoint" / "huggingface" / "peft"
_ALSO = "--max-position-embeddings 64 --init-method-std 0.2 --save-interval 1 --train-iters 1"
_EVERY = "--lora-rank 4 --lora-target-modules all-linear output_layer"
# Two adapters of different ranks, layers and kinds.
ADAPTERS = {
    "latent": (_EVERY, "--lora-rank 3 --use-dora --lora-target-modules kv_b_proj q_b_proj lm_head"),
    "delta": (
        "--lora-rank 4 --lora-target-modules *.attention output_layer router",
        "--lora-rank 2 --use-dora --lora-target-modules in_proj_ba q_proj",
    ),
    "mamba": (_EVERY, "--lora-rank 3 --use-dora --lora-target-modules in_proj"),
}
PROMPTS = prompts(4, longest=18, vocab=100, seed=3)
# Prompts are computed in several chunks, and sequences are preempted.
SMALL = EngineOptions(max_sequences=5, max_step_tokens=7, cache_tokens=128, block_size=4)
Answers = dict[str, list[tuple[int, float]]]


@dataclass(frozen=True)
class Saved:
    """The folders of a base model and of its adapters."""

    base: str
    adapters: tuple[str, ...]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


@cache
def _saved(root: Path, network: str) -> Saved:
    folder = root / network
    words = f"{NETWORKS[network]} {_ALSO}"
    base = str(folder / "base")
    save_run(build_toy(Layout.single(), f"{words} --save {base}".split()))
    for number, flags in enumerate(ADAPTERS[network], 1):
        target = f"{words} {flags} --load {base} --finetune --save {folder / str(number)}"
        save_run(_with_random_adapters(target, seed=number))
    return Saved(base, (str(folder / "1"), str(folder / "2")))


def _with_random_adapters(words: str, seed: int) -> Run:
    run = build_toy(Layout.single(), words.split())
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in run.named_parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.15)
    run.optimizer.reload_masters()
    return run


def _engine(
    base: str, adapters: Sequence[str], options: EngineOptions = SMALL, layout: Layout | None = None
) -> BatchEngine:
    layout = layout or Layout.single()
    sizes = ["--tensor-model-parallel-size", str(layout.tensor.size)]
    program = Program(name="serve")
    config = parse_generation(["--load", base, *sizes], layout.world.size, program).config
    named = [f"{number}={folder}" for number, folder in enumerate(adapters, 1)]
    loaded = load_gpt(base, CPU, layout, config=config)
    return build_engine(add_to(loaded, open_adapters(named, config), CPU), CPU, options)


def _answers(engine: BatchEngine, requests: Sequence[Request]) -> Answers:
    """Return tokens and their log probabilities by request."""
    return {
        name: [(event.token, event.logprob or 0.0) for event in found if isinstance(event, Token)]
        for name, found in drain(engine, requests).items()
    }


def _asked(adapter: int) -> list[Request]:
    return [
        Request(f"{adapter} {number}", prompt, greedy(16, logprobs=True), adapter)
        for number, prompt in enumerate(PROMPTS)
    ]


_MIXED = [request for group in zip(*map(_asked, range(3)), strict=True) for request in group]


@cache
def _alone(root: Path, network: str) -> Answers:
    """Return the answers of each merged model served by itself."""
    saved, found = _saved(root, network), Answers()
    for adapter, folder in enumerate((saved.base, *saved.adapters)):
        plain = [replace(request, adapter=0) for request in _asked(adapter)]
        found |= _answers(_engine(folder, ()), plain)
    return found


def _assert_same(found: Answers, expected: Answers) -> None:
    assert found.keys() == expected.keys()
    for name, pairs in found.items():
        tokens, scores = zip(*pairs, strict=True)
        wanted, values = zip(*expected[name], strict=True)
        assert tokens == wanted, name
        assert scores == pytest.approx(values, abs=2e-5), name


@pytest.mark.parametrize("network", NETWORKS)
def test_a_mixed_batch_gives_the_answers_of_each_merged_model(root: Path, network: str) -> None:
    saved, alone = _saved(root, network), _alone(root, network)
    texts = {tuple(token for token, _ in alone[f"{adapter} 0"]) for adapter in range(3)}
    assert len(texts) == 3, "the models say different things"
    _assert_same(_answers(_engine(saved.base, saved.adapters), _MIXED), alone)


def _found_in(layout: Layout, saved: dict[str, Saved]) -> dict[str, Answers]:
    return {
        network: _answers(_engine(one.base, one.adapters, layout=layout), _MIXED)
        for network, one in saved.items()
    }


def test_tensor_parallel_ranks_give_the_same_answers(root: Path) -> None:
    saved = {network: _saved(root, network) for network in NETWORKS}
    for found in run_distributed(2, _found_in, saved, tensor=2):
        for network, answers in found.items():
            _assert_same(answers, _alone(root, network))


@pytest.mark.parametrize("kind", ["deepseek_v3", "qwen3_next", "nemotron_h"])
def test_files_that_peft_wrote_give_the_results_of_peft(kind: str, tmp_path: Path) -> None:
    record = json.loads((PEFT / "record.json").read_text())
    base = str(written_base(kind, tmp_path))
    rows = len(record[kind]["logits"][0][0])
    words = ["--load", base, "--tokenizer-type", "NullTokenizer", "--vocab-size", str(rows - 1)]
    config = parse_generation(words, 1, Program(name="serve")).config
    loaded = load_gpt(base, CPU, config=config)
    opened = open_adapters([f"{kind}={PEFT / kind}"], config)
    engine = build_engine(add_to(loaded, opened, CPU), CPU, SMALL)
    scored = greedy(0, prompt_logprobs=True, top_logprobs=rows)
    requests = [
        Request(f"{adapter} {row}", tuple(tokens), scored, adapter)
        for row, tokens in enumerate(record["tokens"])
        for adapter in range(2)
    ]
    found = drain(engine, requests)
    for row, logits in enumerate(record[kind]["logits"]):
        tops = prompt_of(found[f"1 {row}"]).top[::4]  # the positions that are recorded
        expected = torch.tensor(logits).log_softmax(-1).tolist()
        for top, scores in zip(tops, expected, strict=True):
            assert [score for _, score in sorted(top)] == pytest.approx(scores, abs=1e-5)
        assert prompt_of(found[f"0 {row}"]).top[::4] != tops


@pytest.mark.parametrize("frozen", ["", "--bf16", "--frozen-weights-dtype nf4"])
def test_a_run_generates_with_adapters_that_are_not_merged(frozen: str) -> None:
    """Latent attention reads its weight directly, and has to see the adapter."""
    sizes = "--hidden-size 64 --kv-lora-rank 64 --q-lora-rank 64 --v-head-dim 16" * bool(frozen)
    words = f"{NETWORKS['latent']} {_ALSO} --lora-rank 4 --use-dora {sizes} {frozen}"
    run = _with_random_adapters(words, seed=1)
    loaded = Loaded(run.parts[0].eval(), run.tokenizer, run.config, 1, run.layout)
    scored = greedy(8, logprobs=True)
    requests = [Request(str(i), prompt, scored) for i, prompt in enumerate(PROMPTS)]
    answers = _answers(build_engine(loaded, CPU, SMALL), requests)
    for i, prompt in enumerate(PROMPTS):
        tokens, scores = zip(*answers[str(i)], strict=True)
        with torch.no_grad():
            logits = run.parts[0](torch.tensor([[*prompt, *tokens]]))[0, len(prompt) - 1 : -1]
        entries = logits[:, : run.tokenizer.vocab_size].float()  # without padding
        wanted = entries.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert scores == pytest.approx(wanted.tolist(), abs=0.1 if frozen == "--bf16" else 2e-4)
