"""The engine gives the model's results, whatever else is in the batch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron.errors import ConfigError
from megatron.inference.build import EngineOptions
from megatron.inference.engine import check
from megatron.inference.executor import Executor
from megatron.inference.request import (
    EngineLimits,
    Event,
    Finished,
    Request,
    RequestError,
    Sampling,
    Stats,
    Token,
)
from megatron.inference.scheduler import Row, SchedulerSettings, Sequence
from megatron.parallel.layout import Layout
from tests.checkpoint.huggingface.models import POSITIONS, VOCAB
from tests.distributed import run_distributed
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

PROMPTS = prompts(12, longest=14, vocab=VOCAB)
NEW = 10


def requests_for(sampling: Sampling, count: int = len(PROMPTS)) -> list[Request]:
    return [Request(str(i), prompt, sampling) for i, prompt in enumerate(PROMPTS[:count])]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model("llama", tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize("name", ["llama", "llama 3.2", "qwen3", "gpt2"])
def test_greedy_tokens_are_those_of_a_model_without_a_cache(name: str, tmp_path: Path) -> None:
    engine = toy_engine(write_model(name, tmp_path))
    events = drain(engine, requests_for(greedy(NEW)))
    for key, prompt in enumerate(PROMPTS):
        assert tokens_of(events[str(key)]) == expected_greedy(name, prompt, NEW)
        end = end_of(events[str(key)])
        assert (end.reason, end.new_tokens) == ("length", NEW)


def test_a_prompt_alone_gets_what_it_gets_in_a_full_batch(llama: Path) -> None:
    together = drain(toy_engine(llama), requests_for(greedy(NEW)))
    alone = toy_engine(llama, replace(OPTIONS, max_sequences=1))
    for request in requests_for(greedy(NEW)):
        assert tokens_of(drain(alone, [request])[request.id]) == tokens_of(together[request.id])


def test_chunks_preemption_and_shared_beginnings_change_nothing(llama: Path) -> None:
    common = PROMPTS[0] * 3
    requests = [
        Request(str(i), (common + prompt)[-14:] if i % 2 else prompt, greedy(NEW))
        for i, prompt in enumerate(PROMPTS)
    ]
    expected = drain(toy_engine(llama), requests)
    small = EngineOptions(max_sequences=5, max_step_tokens=6, cache_tokens=28, block_size=2)
    engine = toy_engine(llama, small)
    found = drain(engine, requests)
    assert engine.stats.preempted > 5
    assert {key: tokens_of(events) for key, events in found.items()} == {
        key: tokens_of(events) for key, events in expected.items()
    }


def test_a_second_request_finds_the_first_ones_beginning(llama: Path) -> None:
    engine = toy_engine(llama)
    prompt = prompts(1, longest=14, vocab=VOCAB, seed=5)[0] * 13
    first = drain(engine, [Request("a", prompt[:13], greedy(4))])["a"]
    again = drain(engine, [Request("a", prompt[:13], greedy(4))])["a"]
    assert end_of(first).cached_tokens == 0
    assert end_of(again).cached_tokens == 12
    assert tokens_of(again) == tokens_of(first)
    assert engine.stats.cached_tokens == 12


def test_a_step_s_view_of_the_cache_in_numbers(llama: Path) -> None:
    """With blocks of 4: a token and its draft, a prompt's second chunk, and a new prompt."""

    def row(start: int, size: int, tokens: int, blocks: list[int], drafts: int = 0) -> Row:
        ids = [10 * len(blocks) + i for i in range(tokens + drafts)]
        prompt_length = start if drafts else -1
        sequence = Sequence("r", ids[:tokens], prompt_length=prompt_length)
        part = tuple(ids[start : start + size])
        is_last = start + size >= tokens
        return Row(sequence, start, part, np.array(blocks), is_last, drafts)

    executor = toy_engine(llama).executor
    assert isinstance(executor, Executor)
    rows = (row(5, 2, 6, [2, 0], drafts=1), row(3, 4, 9, [1, 3, 9]), row(0, 2, 2, [4]))
    tokens, cache = executor.inputs(rows, [(0, 0), (0, 1), (2, 1)])
    assert tokens.tolist() == [[25, 26, 33, 34, 35, 36, 10, 11]]
    assert cache.positions.tolist() == [5, 6, 3, 4, 5, 6, 0, 1]
    assert cache.lengths.tolist() == [6, 6, 9, 9, 9, 9, 2, 2]
    assert cache.slots.tolist() == [1, 2, 7, 12, 13, 14, 16, 17]
    assert cache.outputs.tolist() == [0, 1, 7]
    assert cache.singles is not None
    assert cache.chunks is not None
    assert cache.singles.tables.tolist() == [[2, 0], [2, 0]]
    assert cache.singles.lengths.tolist() == [6, 7]
    assert (cache.singles.longest, cache.singles.block_size) == (7, 4)
    assert (cache.chunks.starts, cache.chunks.sizes) == ((3, 0), (4, 2))
    assert cache.chunks.ends.tolist() == [[0, 4, 6], [0, 7, 9]]
    assert cache.chunks.slots is not None
    assert cache.chunks.slots.tolist() == [4, 5, 6, 7, 12, 13, 14, 16, 17]
    assert cache.rows is None
    _, alone = executor.inputs(rows[:1], [])
    assert (alone.chunks, alone.outputs.tolist()) == (None, [])
    _, new = executor.inputs(rows[2:], [(0, 1)])
    assert new.chunks is not None
    assert (new.singles, new.chunks.slots, new.outputs.tolist()) == (None, None, [1])


def test_statistics_count_requests_blocks_and_tokens(llama: Path) -> None:
    """Up to 8 requests of 3 tokens run at a time, and each needs 4 blocks in the end."""
    engine = toy_engine(llama)
    found = [replace(engine.stats)]
    for i in range(12):
        engine.add(Request(str(i), (i, i + 1, i + 2), greedy(NEW)))
    for _ in range(3):
        engine.step()
        found.append(engine.stats)
    engine.cancel("0")
    drain(engine)
    drain(engine, [Request("a", PROMPTS[0], greedy(4, beam_width=2))])
    none = Stats(blocks=128)
    counts = {"prompt_tokens": 36, "running": 8, "waiting": 4, "blocks": 128}
    assert found == [
        none,
        Stats(**counts, blocks_used=8, new_tokens=8, choosing_rows=8),
        Stats(**counts, blocks_used=8, new_tokens=16, choosing_rows=16),
        Stats(**counts, blocks_used=16, new_tokens=24, choosing_rows=24),
    ]
    new = 3 + 11 * NEW
    prompt_tokens = 36 + len(PROMPTS[0])
    assert engine.stats == replace(
        none, prompt_tokens=prompt_tokens, new_tokens=new + 4, choosing_rows=new
    )


def test_log_probabilities_are_the_models(llama: Path) -> None:
    sampling = greedy(4, logprobs=True, top_logprobs=3, prompt_logprobs=True)
    small = replace(OPTIONS, max_step_tokens=8)  # prompts come in chunks
    events = drain(toy_engine(llama, small), requests_for(sampling))
    for key, prompt in enumerate(PROMPTS):
        mine = events[str(key)]
        answer = [event for event in mine if isinstance(event, Token)]
        tokens = [*prompt, *(event.token for event in answer)]
        scores = expected_logits("llama", tokens).log_softmax(-1)
        found = [*prompt_of(mine).logprobs, *(event.logprob for event in answer)]
        expected = scores[torch.arange(len(tokens) - 1), torch.tensor(tokens[1:])]
        torch.testing.assert_close(torch.tensor(found), expected.float(), rtol=0, atol=1e-4)
        tops = [*prompt_of(mine).top, *(event.top for event in answer)]
        best = scores[:-1].topk(3)
        assert [[token for token, _ in top] for top in tops] == best.indices.tolist()
        values = torch.tensor([[value for _, value in top] for top in tops])
        torch.testing.assert_close(values, best.values.float(), rtol=0, atol=1e-4)


def test_only_scoring_a_prompt(llama: Path) -> None:
    request = Request("a", PROMPTS[0], greedy(0, prompt_logprobs=True))
    events = drain(toy_engine(llama), [request])["a"]
    assert len(prompt_of(events).logprobs) == len(PROMPTS[0]) - 1
    assert end_of(events).reason == "length"
    assert len(events) == 2


def test_the_same_seed_draws_the_same_whatever_else_runs(llama: Path) -> None:
    warm = Sampling(max_new_tokens=NEW, temperature=1.5, top_k=20, top_p=0.9, seed=7)
    request = Request("mine", PROMPTS[3], warm)
    alone = tokens_of(drain(toy_engine(llama), [request])["mine"])
    others = requests_for(replace(warm, seed=None, temperature=2.0, top_k=0))
    among = tokens_of(drain(toy_engine(llama), [*others, request])["mine"])
    assert among == alone
    other_seed = Request("mine", PROMPTS[3], replace(warm, seed=8))
    assert tokens_of(drain(toy_engine(llama), [other_seed])["mine"]) != alone


def test_requests_without_a_seed_differ_from_each_other(llama: Path) -> None:
    warm = Sampling(max_new_tokens=NEW, temperature=2.0)
    events = drain(toy_engine(llama), [Request(key, PROMPTS[3], warm) for key in "abc"])
    assert len({tuple(tokens_of(found)) for found in events.values()}) == 3
    # The seed follows from the engine's seed and the request's id, in every version alike.
    same = Request("b", PROMPTS[3], replace(warm, seed=0x2993442427F37C75))
    assert tokens_of(drain(toy_engine(llama), [same])["b"]) == tokens_of(events["a"])


def test_stop_tokens_sequences_and_bans(llama: Path) -> None:
    prompt = PROMPTS[0]
    free = expected_greedy("llama", prompt, NEW)

    def run(**rules: object) -> tuple[list[int], str]:
        events = drain(toy_engine(llama), [Request("a", prompt, greedy(NEW, **rules))])["a"]
        return tokens_of(events), end_of(events).reason

    first = free.index(free[4])
    assert run(stop_tokens=(free[4],)) == (free[: first + 1], "stop")
    assert run(stop_sequences=((free[0], free[1]),)) == (free[:2], "stop")
    assert run(stop_sequences=((prompt[-1], free[0]),)) == (free[:1], "stop")
    assert run(stop_sequences=((prompt[-1], free[0] + 1),))[1] == "length"
    assert run(banned_pairs=((prompt[-1], free[0]),))[0][0] != free[0]
    assert run(banned_pairs=((prompt[-1] + 1, free[0]),)) == (free, "length")


def test_a_cancelled_request_frees_its_blocks(llama: Path) -> None:
    engine = toy_engine(llama)
    for request in requests_for(greedy(NEW)):
        engine.add(request)
    engine.step()
    used = engine.stats.blocks_used
    assert [event.reason for event in engine.cancel("0") if isinstance(event, Finished)] == [
        "cancelled"
    ]
    assert engine.stats.blocks_used < used
    assert engine.cancel("0") == []
    assert "0" not in drain(engine)
    assert engine.step() == []


def test_what_cannot_be_done_is_refused_on_arrival(llama: Path) -> None:
    engine = toy_engine(llama, replace(OPTIONS, cache_tokens=20))
    cases = {
        "outside the vocabulary": Request("a", (VOCAB,), greedy(1)),
        f"model's {POSITIONS} positions": Request("a", (1,) * POSITIONS, greedy(1)),
        "do not fit in the cache": Request("a", (1,) * 12, greedy(12)),
        "sequences": Request("a", (1,), greedy(1, beam_width=9)),
        "repetition_penalty": Request("a", (1,), greedy(1, beam_width=2, repetition_penalty=2.0)),
    }
    for said, request in cases.items():
        with pytest.raises(RequestError, match=said):
            engine.add(request)
    for penalty in (1e300, -1e300, float("nan")):
        with pytest.raises(RequestError, match="penalt"):
            greedy(2, beam_width=2, length_penalty=penalty)
    engine.add(Request("a", (1,), greedy(1)))
    with pytest.raises(RequestError, match="in use"):
        engine.add(Request("a", (1,), greedy(1)))


def test_sizes_of_an_engine_are_at_least_one() -> None:
    sizes = ("max_sequences", "max_step_tokens", "cache_tokens", "block_size")
    EngineOptions(**dict.fromkeys(sizes, 1))  # type: ignore[arg-type]
    with pytest.raises(ConfigError) as caught:
        EngineOptions(**dict.fromkeys(sizes, 0))  # type: ignore[arg-type]
    assert caught.value.problems == [f"{name} 0: give 1 or more" for name in sizes]


def test_a_request_at_every_limit_is_accepted_and_one_beyond_it_is_refused() -> None:
    settings = SchedulerSettings(blocks=6, block_size=4, max_sequences=3, max_tokens=8)
    limits = EngineLimits(vocab_size=10, max_length=24, cache_tokens=24, max_beams=3, adapters=1)
    whole = greedy(22, banned_pairs=((9, 0), (0, 9)), top_logprobs=10)
    penalized, beams = replace(whole, repetition_penalty=2.0), greedy(6, beam_width=3)
    for sampling in (whole, penalized, beams):
        for adapter in (0, 1):
            check(Request("a", (0, 9), sampling, adapter), limits, settings)
    vocabulary = "is outside the vocabulary (0 to 9)"
    for said, request in {
        f"token id 10 {vocabulary}": Request("a", (11, 10), greedy(1)),
        f"token id -1 {vocabulary}": Request("a", (-1,), greedy(1)),
        f"token id 12 {vocabulary}": Request("a", (0,), greedy(1, banned_pairs=((12, 0),))),
        f"token id 13 {vocabulary}": Request("a", (0,), greedy(1, banned_pairs=((0, 13),))),
        "prompt of 3 tokens and max_new_tokens 22 exceed the model's 24 positions: shorten one of "
        "them": Request("a", (0, 9, 1), whole),
        "adapter 2: give 0 (the base model) to 1": Request("a", (0,), greedy(1), adapter=2),
        "adapter -1: give 0 (the base model) to 1": Request("a", (0,), greedy(1), adapter=-1),
        "beam_width 4 exceeds the limit of 3 sequences: give at most 3": Request(
            "a", (0,), greedy(1, beam_width=4)
        ),
        "3 x 9 tokens do not fit in the cache of 24: request fewer, or start with a larger "
        "cache": Request("a", (0, 9, 1), beams),
        "repetition_penalty 2.0 cannot be combined with beam search: give repetition_penalty 1, or "
        "beam_width 1": Request("a", (0,), replace(beams, repetition_penalty=2.0)),
        "top_logprobs 11 exceeds the vocabulary's 10 tokens: give at most 10": Request(
            "a", (0,), greedy(1, top_logprobs=11)
        ),
    }.items():
        with pytest.raises(RequestError) as caught:
            check(request, limits, settings)
        assert str(caught.value) == said


def _in_layout(layout: Layout, folder: Path, requests: list[Request]) -> dict[str, list[Event]]:
    return drain(toy_engine(folder, layout=layout, looks_ahead=True), requests)


@pytest.mark.parametrize("sizes", [{"tensor": 2}, {"pipeline": 2}], ids=str)
@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3 next"])
def test_every_layout_gives_the_same_answers(
    name: str, sizes: dict[str, int], tmp_path: Path
) -> None:
    folder = write_model(name, tmp_path)
    requests = [
        *requests_for(greedy(NEW, prompt_logprobs=True)),
        Request("warm", PROMPTS[1], Sampling(max_new_tokens=NEW, temperature=1.2, seed=3)),
        Request("beam", PROMPTS[2], greedy(NEW, beam_width=3)),
    ]
    expected = drain(toy_engine(folder), requests)
    for found in run_distributed(2, _in_layout, folder, requests, **sizes):
        for key, events in expected.items():
            assert tokens_of(found[key]) == tokens_of(events)
            theirs, ours = end_of(found[key]).beams, end_of(events).beams
            assert [beam.tokens for beam in theirs] == [beam.tokens for beam in ours]
            if key.isdigit():
                torch.testing.assert_close(
                    torch.tensor(prompt_of(found[key]).logprobs),
                    torch.tensor(prompt_of(events).logprobs),
                    rtol=0,
                    atol=1e-4,
                )
