"""Greedy tokens, log probabilities and beams equal those of `transformers`, if it is installed."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version

from megatron.inference.build import EngineOptions
from megatron.inference.request import Beam, Event, Request, Token
from megatron.parallel.layout import Layout
from tests.distributed import run_sharing_memory
from tests.inference.toy import drain, end_of, greedy, prompt_of, prompts, tokens_of, toy_engine

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

VOCAB, POSITIONS, NEW = 1000, 128, 50
PAD = VOCAB - 1
OPTIONS = EngineOptions(max_sequences=16, max_step_tokens=128, cache_tokens=2048)
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 64, "n_head": 4, "n_layer": 4, "n_positions": POSITIONS},
    "llama": {
        "hidden_size": 64,
        "intermediate_size": 160,
        "max_position_embeddings": POSITIONS,
        "num_attention_heads": 4,
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
    },
    "qwen3": {  # its windows end within every prompt
        "head_dim": 16,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "use_sliding_window": True,
        "hidden_size": 64,
        "intermediate_size": 160,
        "max_position_embeddings": POSITIONS,
        "num_attention_heads": 4,
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "sliding_window": 7,
    },
}


@pytest.fixture(scope="module", params=CONFIGS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a random model, saved at its `name_or_path`. Its answers never repeat themselves."""
    torch.manual_seed(1)
    config = transformers.AutoConfig.for_model(
        request.param, vocab_size=VOCAB, initializer_range=0.3, **CONFIGS[request.param]
    )
    made = transformers.AutoModelForCausalLM.from_config(config).eval()
    folder = tmp_path_factory.mktemp(request.param)
    made.save_pretrained(folder)
    made.name_or_path = str(folder)
    return made


def generate(model: Any, prompt: tuple[int, ...], **options: Any) -> Any:
    """Generate with `transformers`, and return its result object."""
    return model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),  # otherwise PAD is masked
        do_sample=False,
        pad_token_id=PAD,
        return_dict_in_generate=True,
        output_logits=True,
        **{"max_new_tokens": NEW, "eos_token_id": None, **options},
    )


@cache
@torch.no_grad()
def scores_by(model: Any, tokens: tuple[int, ...]) -> torch.Tensor:
    """Return log probabilities by `transformers` of every possible next token, [s, v]."""
    return model(torch.tensor([tokens])).logits[0].log_softmax(-1)


def same_greedy(model: Any, asked: list[tuple[int, ...]], events: dict[str, list[Event]]) -> None:
    """Check that each token is the likeliest one, with its log probability within 1e-4.

    One pass over the whole text is enough, so a hundred answers are checked in a second.
    """
    for key, prompt in enumerate(asked):
        tokens = tokens_of(events[str(key)])
        assert len(tokens) == NEW
        scores = scores_by(model, (*prompt, *tokens))[:-1]
        assert scores[len(prompt) - 1 :].argmax(-1).tolist() == tokens, prompt
        answer = [e.logprob for e in events[str(key)] if isinstance(e, Token)]
        found = torch.tensor([*prompt_of(events[str(key)]).logprobs, *answer])
        following = torch.tensor([*prompt, *tokens])[1:, None]
        torch.testing.assert_close(found, scores.gather(1, following)[:, 0], rtol=0, atol=1e-4)


def requests_for(asked: list[tuple[int, ...]]) -> list[Request]:
    sampling = greedy(NEW, logprobs=True, prompt_logprobs=True)
    return [Request(str(key), prompt, sampling) for key, prompt in enumerate(asked)]


def test_greedy_tokens_and_log_probabilities(model: Any) -> None:
    asked = prompts(6, longest=60, vocab=VOCAB)
    events = drain(toy_engine(Path(model.name_or_path), OPTIONS), requests_for(asked))
    same_greedy(model, asked, events)
    for key, prompt in enumerate(asked):
        theirs = generate(model, prompt).sequences[0, len(prompt) :].tolist()
        assert tokens_of(events[str(key)]) == theirs


def _in_layout(layout: Layout, folder: Path, requests: list[Request]) -> dict[str, list[Event]]:
    return drain(toy_engine(folder, OPTIONS, layout), requests)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{}, {"tensor": 2}, {"pipeline": 2}], ids=str)
def test_a_hundred_prompts_in_every_layout(model: Any, sizes: dict[str, int]) -> None:
    asked = prompts(100, longest=70, vocab=VOCAB, seed=1)
    folder = Path(model.name_or_path)
    if sizes:
        for events in run_sharing_memory(2, _in_layout, folder, requests_for(asked), **sizes):
            same_greedy(model, asked, events)
    else:
        same_greedy(model, asked, drain(toy_engine(folder, OPTIONS), requests_for(asked)))


@pytest.mark.parametrize("penalty", [1.0, 0.0, 2.0])
@pytest.mark.parametrize("width", [2, 4])
def test_beam_search(model: Any, width: int, penalty: float) -> None:
    """Tokens that end answers early make short answers compete with long ones."""
    new, stops = 12, list(range(0, VOCAB, 12))
    engine = toy_engine(Path(model.name_or_path), OPTIONS)
    ended = 0
    for prompt in prompts(3, longest=30, vocab=VOCAB, seed=2):
        theirs = generate(
            model,
            prompt,
            max_new_tokens=new,
            eos_token_id=stops,
            num_beams=width,
            num_return_sequences=width,
            length_penalty=penalty,
            output_scores=True,
        )
        sampling = greedy(new, beam_width=width, length_penalty=penalty, stop_tokens=tuple(stops))
        beams = end_of(drain(engine, [Request("a", prompt, sampling)])["a"]).beams
        for beam, tokens in zip(beams, theirs.sequences, strict=True):
            length = len(prompt) + len(beam.tokens)
            assert beam.tokens == tuple(tokens[len(prompt) : length].tolist())
            assert (tokens[length:] == PAD).all(), "theirs goes on"
            ended += beam.tokens[-1] in stops
            assert sum(beam.logprobs) / len(beam.tokens) ** penalty == pytest.approx(beam.score)
        scores = torch.tensor([beam.score for beam in beams])
        torch.testing.assert_close(scores, theirs.sequences_scores, rtol=1e-5, atol=1e-4)
    assert ended or penalty == 2, "no answer is short"


def test_beams_with_bans_and_sequences_that_end(model: Any) -> None:
    """A banned token's share goes to the others before scores are summed, as in Megatron-LM."""
    if Version(transformers.__version__) < Version("5.18"):
        pytest.skip("before 5.18 transformers' beams are others where pairs are banned")
    width, new = 3, 10
    engine = toy_engine(Path(model.name_or_path), OPTIONS)
    ended = 0
    for prompt in prompts(3, longest=30, vocab=VOCAB, seed=4):
        rules = {"beam_width": width, "length_penalty": 0.0}  # short answers win

        def search(prompt: tuple[int, ...] = prompt, **rules: Any) -> tuple[Beam, ...]:
            return end_of(drain(engine, [Request("a", prompt, greedy(new, **rules))])["a"]).beams

        free = search(**rules)[0].tokens
        rules["banned_pairs"] = banned = ((prompt[-1], free[0]), (free[3], free[4]))
        stop = search(**rules)[0].tokens[3:5]

        def stops(tokens: torch.Tensor, _: Any, stop: tuple[int, ...] = stop, **__: Any) -> Any:
            return (tokens[:, -2:] == torch.tensor(stop)).all(-1)

        theirs = generate(
            model,
            prompt,
            max_new_tokens=new,
            num_beams=width,
            num_return_sequences=width,
            length_penalty=0.0,
            bad_words_ids=[list(pair) for pair in banned],
            renormalize_logits=True,
            stopping_criteria=[stops],
            output_scores=True,
        )
        beams = search(**rules, stop_sequences=(stop,))
        for beam, tokens in zip(beams, theirs.sequences, strict=True):
            length = len(prompt) + len(beam.tokens)
            assert beam.tokens == tuple(tokens[len(prompt) : length].tolist())
            assert (tokens[length:] == -1).all(), "theirs goes on"  # no end token, so no padding
            ended += len(beam.tokens) < new
        scores = torch.tensor([beam.score for beam in beams])
        torch.testing.assert_close(scores, theirs.sequences_scores, rtol=1e-5, atol=1e-4)
        assert free not in [beam.tokens for beam in beams], "the ban did nothing"
    assert ended, "no answer is short"


def test_beams_survive_preemption_and_other_requests(model: Any) -> None:
    folder = Path(model.name_or_path)
    asked = prompts(4, longest=20, vocab=VOCAB, seed=3)
    searches = [
        Request(f"beam {i}", prompt, greedy(10, beam_width=4)) for i, prompt in enumerate(asked)
    ]
    alone = toy_engine(folder, OPTIONS)
    expected = {request.id: drain(alone, [request])[request.id] for request in searches}
    small = replace(OPTIONS, max_sequences=5, cache_tokens=200, block_size=4)
    engine = toy_engine(folder, small)
    plain = [Request(f"plain {i}", prompt * 2, greedy(30)) for i, prompt in enumerate(asked)]
    found = drain(engine, [*plain, *searches, *(replace(r, id=r.id + "b") for r in plain)])
    assert engine.stats.preempted
    for key, events in expected.items():
        ours = [beam.tokens for beam in end_of(found[key]).beams]
        assert ours == [beam.tokens for beam in end_of(events).beams]
