"""Steps queued before the previous step's results are read: results are unaffected."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.inference.request import Event, Finished, Request, Sampling, Token
from megatron.inference.scheduler import UNKNOWN
from tests.checkpoint.huggingface.models import VOCAB
from tests.inference.toy import OPTIONS, drain, greedy, prompts, tokens_of, toy_engine, write_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model("llama", tmp_path_factory.mktemp("model"))


def all_kinds() -> list[Request]:
    """Return requests with every way of choosing and all lengths; some are stopped."""
    chance = random.Random(1)
    kinds: list[dict[str, object]] = [
        {},
        {"logprobs": True, "top_logprobs": 2},
        {"temperature": 1.0, "seed": 5},
        {"temperature": 0.8, "top_k": 9, "seed": 6},
        {"temperature": 1.2, "top_p": 0.7, "top_p_decay": 0.9, "seed": 7},
        {"prompt_logprobs": True},
        {"max_new_tokens": 0, "prompt_logprobs": True},
        {"stop_tokens": tuple(range(0, VOCAB, 5))},
    ]
    return [
        Request(str(i), prompt, greedy(chance.randint(1, 14), **kinds[i % len(kinds)]))
        for i, prompt in enumerate(prompts(40, longest=10, vocab=VOCAB))
    ]


LAST = [
    Request("penalty", (1, 2, 3, 4), greedy(9, repetition_penalty=1.5)),
    Request("banned", (4, 5), greedy(9, banned_pairs=((5, 6), (6, 7)))),
    Request("beams", (9, 8, 7), Sampling(max_new_tokens=6, temperature=0, beam_width=3)),
]


@pytest.mark.parametrize("cache_tokens", [512, 72])
def test_answers_are_the_same(folder: Path, cache_tokens: int) -> None:
    """The cache has room for all sequences, or is so small that some are preempted."""
    options = replace(OPTIONS, cache_tokens=cache_tokens)
    plain, engine = (toy_engine(folder, options, looks_ahead=ahead) for ahead in (False, True))
    for requests in (all_kinds(), LAST):
        expected, found = drain(plain, requests), drain(engine, requests)
        assert found.keys() == expected.keys()
        for key, events in expected.items():
            assert [what(event) for event in found[key]] == [what(event) for event in events]
            told = [score for event in found[key] for score in scores(event)]
            assert told == pytest.approx([s for event in events for s in scores(event)], abs=1e-5)
    assert (engine.stats.preempted > 0) == (cache_tokens == 72)


def test_steps_are_begun_ahead_and_as_many_as_needed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = toy_engine(folder, looks_ahead=True)
    executor, unknown, steps = engine.executor, 0, 0
    begin = executor.begin

    def count(plan, outputs):
        nonlocal unknown, steps
        unknown += sum(row.tokens[-1] == UNKNOWN for row in plan)
        steps += 1
        return begin(plan, outputs)

    monkeypatch.setattr(executor, "begin", count)
    drain(engine, [Request("a", (1, 2, 3), greedy(12))])
    assert (steps, unknown) == (12, 11)


def test_a_request_that_leaves_is_not_taken_for_one_that_comes_by_its_name(folder: Path) -> None:
    engine, plain = toy_engine(folder, looks_ahead=True), toy_engine(folder)
    first, second = (Request("a", prompt, greedy(8)) for prompt in ((1, 2, 3), (7, 8, 9, 10)))
    other = Request("b", (5, 6), greedy(8))
    engine.add(first)
    engine.add(other)
    for _ in range(3):
        engine.step()
    (end,) = engine.cancel("a")
    assert end.new_tokens == 3
    found = drain(engine, [second])
    expected = drain(plain, [second, other])
    assert found["a"] == expected["a"]
    assert tokens_of(found["b"]) == tokens_of(expected["b"])[3:]
    assert [event.reason for event in engine.abort("nobody is here")] == []


def test_after_an_abort_the_engine_continues(folder: Path) -> None:
    engine = toy_engine(folder, looks_ahead=True)
    engine.add(Request("a", (1, 2, 3), greedy(8)))
    engine.step()
    engine.step()
    (end,) = engine.abort("enough")
    assert (end.reason, end.new_tokens) == ("error", 2)
    assert not engine.has_work
    again = Request("a", (1, 2, 3), greedy(8))
    assert drain(engine, [again])["a"][:-1] == drain(toy_engine(folder), [again])["a"][:-1]


def what(event: Event) -> tuple[object, ...]:
    """Return all but the number of cached tokens, which depends on when a sequence starts."""
    if isinstance(event, Finished):
        beams = tuple(beam.tokens for beam in event.beams)
        return (event.reason, event.message, event.new_tokens, beams)
    return (event.token,) if isinstance(event, Token) else ()


def scores(event: Event) -> list[float]:
    """Return log probabilities, whose last bits depend on the batch."""
    if isinstance(event, Finished):
        return [beam.score for beam in event.beams]
    if isinstance(event, Token):
        return [event.logprob or 0.0, *(logprob for _, logprob in event.top)]
    return list(event.logprobs)
