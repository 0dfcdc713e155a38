"""Generation by models with recurrent states equals plain passes, in any batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.config.generation import Speculation
from megatron.errors import ConfigError
from megatron.inference import build
from megatron.inference.build import EngineOptions
from megatron.inference.cache import CacheMemory
from megatron.inference.engine import BatchEngine
from megatron.inference.request import Event, Request, Token
from megatron.kernels.paged_attention import PagedAttention
from megatron.parallel.layout import Layout
from tests.checkpoint.huggingface.models import POSITIONS, VOCAB
from tests.distributed import run_sharing_memory
from tests.inference.toy import (
    OPTIONS,
    drain,
    end_of,
    expected_greedy,
    expected_logits,
    greedy,
    prompt_of,
    prompts,
    tokens_of,
    toy_engine,
    write_model,
)

NAME, NEW = "nemotron h", 10
PROMPTS = prompts(12, longest=14, vocab=VOCAB)
REQUESTS = [Request(str(i), prompt, greedy(NEW)) for i, prompt in enumerate(PROMPTS)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(NAME, tmp_path_factory.mktemp("hybrid"))


@pytest.fixture(scope="module")
def expected() -> dict[str, list[int]]:
    return {each.id: expected_greedy(NAME, each.prompt, NEW) for each in REQUESTS}


def texts(events: dict[str, list[Event]]) -> dict[str, list[int]]:
    return {key: tokens_of(each) for key, each in events.items()}


@pytest.mark.parametrize("looks_ahead", [False, True])
def test_a_batch_gives_the_answers_of_each_alone(
    folder: Path, expected: dict[str, list[int]], looks_ahead: bool
) -> None:
    engine = toy_engine(folder, looks_ahead=looks_ahead)
    assert texts(drain(engine, REQUESTS)) == expected


def test_chunks_and_preemption_change_nothing(folder: Path, expected: dict[str, list[int]]) -> None:
    small = EngineOptions(max_sequences=5, max_step_tokens=6, cache_tokens=28, block_size=2)
    engine = toy_engine(folder, small)
    assert texts(drain(engine, REQUESTS)) == expected
    assert engine.stats.preempted > 5


TEXT = tuple(range(3, 3 + 22))


def cached(engine: BatchEngine, *asked: tuple[int, ...], new: int = 2) -> list[int]:
    """Return how many tokens of each prompt, run one after another, came from the cache."""
    found = []
    for prompt in asked:
        events = drain(engine, [Request("a", prompt, greedy(new))])["a"]
        assert tokens_of(events) == expected_greedy(NAME, prompt, new)
        found.append(end_of(events).cached_tokens)
    return found


def test_a_prompt_continues_from_a_snapshot_of_states(folder: Path) -> None:
    """Blocks have 4 tokens, and the last token is always computed."""
    engine = toy_engine(folder, replace(OPTIONS, max_sequences=32))
    assert cached(engine, TEXT[:13], TEXT[:13], TEXT[:12], TEXT[:20]) == [0, 12, 0, 12]
    assert cached(engine, TEXT[:20], TEXT[:9], TEXT[:11]) == [16, 8, 8]


def test_blocks_without_a_snapshot_are_not_used(folder: Path) -> None:
    engine = toy_engine(folder)
    other = (*TEXT[:12], *TEXT[15:19])  # shares three blocks, of which only the last has states
    assert cached(engine, TEXT[:20], other, TEXT[:20]) == [0, 0, 16]


def test_a_new_snapshot_takes_the_place_of_the_oldest(folder: Path) -> None:
    engine = toy_engine(folder)  # 8 sequences, hence two snapshots
    first, second, third = TEXT[:9], TEXT[4:13], TEXT[8:17]
    assert cached(engine, first, second, first, third, second, first) == [0, 0, 8, 0, 0, 0]


@pytest.mark.parametrize("name", [NAME, "qwen3 next", "falcon h1"])
def test_snapshots_survive_preemption_and_chunks(name: str, tmp_path: Path) -> None:
    folder = write_model(name, tmp_path)
    small = EngineOptions(max_sequences=5, max_step_tokens=6, cache_tokens=28, block_size=2)
    engine, asked = toy_engine(folder, small), [TEXT[: 3 + i % 7] for i in range(12)]
    requests = [Request(str(i), prompt, greedy(NEW)) for i, prompt in enumerate(asked)]
    found = texts(drain(engine, requests))
    assert engine.stats.preempted
    assert engine.stats.cached_tokens
    for request in requests:
        assert found[request.id] == expected_greedy(name, request.prompt, NEW)


def test_log_probabilities_are_the_models(folder: Path) -> None:
    sampling = greedy(4, logprobs=True, prompt_logprobs=True)
    small = replace(OPTIONS, max_step_tokens=8)  # prompts come in chunks
    events = drain(toy_engine(folder, small), [replace(one, sampling=sampling) for one in REQUESTS])
    for request in REQUESTS:
        mine = events[request.id]
        answer = [event for event in mine if isinstance(event, Token)]
        tokens = [*request.prompt, *(event.token for event in answer)]
        scores = expected_logits(NAME, tokens).log_softmax(-1)
        found = [*prompt_of(mine).logprobs, *(event.logprob for event in answer)]
        wanted = scores[torch.arange(len(tokens) - 1), torch.tensor(tokens[1:])]
        torch.testing.assert_close(torch.tensor(found), wanted.float(), rtol=0, atol=1e-4)


def test_beams_have_the_models_scores(folder: Path) -> None:
    """Beams that branch need the states of their common prefix."""
    engine = toy_engine(folder, replace(OPTIONS, max_sequences=3))
    prompt = PROMPTS[0]
    beams = end_of(drain(engine, [Request("a", prompt, greedy(6, beam_width=3))])["a"]).beams
    assert len({beam.tokens for beam in beams}) == 3
    for beam in beams:
        tokens = [*prompt, *beam.tokens]
        scores = expected_logits(NAME, tokens).log_softmax(-1)
        wanted = scores[torch.arange(len(tokens) - 1), torch.tensor(tokens[1:])][len(prompt) - 1 :]
        torch.testing.assert_close(torch.tensor(beam.logprobs), wanted.float(), rtol=0, atol=1e-4)


def test_recorded_steps_advance_states_once(
    folder: Path, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recorder runs a step before it records it."""
    recorded = 0

    def record(work: Callable[[], Tensor]) -> Callable[[], Tensor]:
        nonlocal recorded
        recorded += 1
        work()
        return work

    monkeypatch.setattr(PagedAttention, "can_capture", True)
    monkeypatch.setattr(build.Device, "recorder", lambda self: record)
    assert texts(drain(toy_engine(folder, looks_ahead=True), REQUESTS)) == expected
    assert recorded > 1


def _in_layout(layout: Layout, folder: Path) -> dict[str, list[int]]:
    return texts(drain(toy_engine(folder, OPTIONS, layout), REQUESTS))


@pytest.mark.parametrize("sizes", [{"tensor": 2}, {"pipeline": 2}], ids=str)
def test_layouts_give_the_same_answers(
    folder: Path, expected: dict[str, list[int]], sizes: dict[str, int]
) -> None:
    for found in run_sharing_memory(2, _in_layout, folder, **sizes):
        assert found == expected


def test_a_model_without_attention_needs_no_keys_and_values(tmp_path: Path) -> None:
    engine = toy_engine(write_model("mamba 2", tmp_path))
    found = texts(drain(engine, REQUESTS[:3]))
    assert found == {each.id: expected_greedy("mamba 2", each.prompt, NEW) for each in REQUESTS[:3]}
    assert not engine.executor.memory.layers  # type: ignore[attr-defined]


def test_a_cache_has_room_for_all_sequences_or_fills_the_memory(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = replace(OPTIONS, cache_tokens=None)
    engine = toy_engine(folder, options)
    executor: Any = engine.executor
    memory: CacheMemory = executor.memory
    precision = SimpleNamespace(weight_dtype=memory.dtype)
    loaded: Any = SimpleNamespace(
        model=executor.model,
        layout=executor.layout,
        config=SimpleNamespace(precision=precision),
        earlier_parts=(),
    )

    def memory_of(limit: int) -> CacheMemory:
        monkeypatch.setattr(build, "_CPU_CACHE_BYTES", limit)
        return build.make_cache(loaded, options, memory.paged, executor.device)

    assert engine.limits.cache_tokens == 4 * engine.settings.blocks == 4 * memory.blocks
    assert (build._CPU_CACHE_BYTES, memory.state_slots) == (2**30, 10)  # two are for snapshots
    assert memory.blocks == 8 * POSITIONS // 4
    states = sum(part.nbytes for parts in memory.states.values() for part in parts) // 11
    block = (memory.size_bytes - 11 * states) // (memory.blocks + 1)
    assert memory_of(10 * states + 7 * block).blocks == 7
    assert memory_of(10 * states + 8 * block - 1).blocks == 7
    with pytest.raises(ConfigError, match="the KV cache has room for 3 tokens, less than one bl"):
        memory_of(10 * states + block - 1)
    message = f"the states of 8 sequences need more than the {10 * states / 1e9:.3g} GB of free"
    with pytest.raises(ConfigError, match=message):
        memory_of(10 * states)


def test_what_does_not_go_together_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="cannot be rolled back past a rejected"):
        toy_engine(folder, replace(OPTIONS, speculation=Speculation(num_speculative_tokens=2)))
    monkeypatch.setattr(build, "_CPU_CACHE_BYTES", 10_000)
    with pytest.raises(ConfigError, match="allow fewer sequences at once"):
        toy_engine(folder, replace(OPTIONS, cache_tokens=None))
