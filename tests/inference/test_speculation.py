"""Speculative decoding: the same tokens in fewer steps, with any drafter."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megatron.config.generation import (
    ServerConfig,
    Speculation,
    read_speculation,
    server_problems,
)
from megatron.config.run import ModelRun
from megatron.config.stages import parts_of_stage, plan_parts
from megatron.device import Device
from megatron.errors import ConfigError
from megatron.inference.build import EngineOptions, build_engine
from megatron.inference.engine import BatchEngine
from megatron.inference.executor import Executor
from megatron.inference.load import Loaded, serving_context
from megatron.inference.request import Request, Sampling, Stats, Token
from megatron.inference.scheduler import Row, Sequence, StepPlan
from megatron.inference.speculation import (
    MultiTokenDrafter,
    NgramDrafter,
    _DepthWindow,
    describe_drafts,
)
from megatron.models.build import build_model
from megatron.models.gpt import GPTModel
from megatron.parallel.layout import Layout
from megatron.parallel.parameter import initialize
from tests.distributed import run_distributed
from tests.inference.toy import drain, end_of, greedy, prompts, tokens_of
from tests.models.small import LLAMA, config

VOCAB, POSITIONS, DEPTHS, NEW = 48, 40, 3, 16
OPTIONS = EngineOptions(max_sequences=6, max_step_tokens=40, cache_tokens=512, block_size=4)
PROMPTS = [*prompts(8, longest=14, vocab=VOCAB - 2), (3, 4, 5) * 5, (3, 4, 5, 3, 4, 5, 9), (7,)]
NGRAM = Speculation(method="ngram", num_speculative_tokens=4, prompt_lookup_min=1)
MTP = Speculation(method="mtp", num_speculative_tokens=DEPTHS)


def engine_of(
    speculation: Speculation | None = None,
    options: EngineOptions = OPTIONS,
    layout: Layout | None = None,
    seed: int = 1,
) -> BatchEngine:
    """Return an engine over a random model with multi-token prediction."""
    layout = layout or Layout.single()
    network = config(
        **{**LLAMA, "num_layers": 2, "max_position_embeddings": POSITIONS, "init_method_std": 0.2},
        mtp_num_layers=DEPTHS,
    )
    run = ModelRun(model=network)
    parallel = replace(run.parallel, pipeline_model_parallel_size=layout.pipeline.size)
    (part,) = parts_of_stage(plan_parts(2, parallel), layout.pipeline.rank, layout.pipeline.size)
    context = serving_context(run, layout, Device.cpu())
    model = build_model(GPTModel, run, context, VOCAB, part)
    initialize(model.named_parameters(), seed)
    tokenizer: Any = SimpleNamespace(vocab_size=VOCAB - 2)  # the rest is padding
    loaded = Loaded(model, tokenizer, run, 0, layout)  # type: ignore[arg-type]
    return build_engine(loaded, Device.cpu(), replace(options, speculation=speculation))


def answers(engine: BatchEngine, sampling: Sampling) -> list[list[int]]:
    """Return the answers to all prompts; for a beam search, the best ones."""
    events = drain(engine, [Request(str(i), each, sampling) for i, each in enumerate(PROMPTS)])
    found = []
    for number in range(len(PROMPTS)):
        end = end_of(events[str(number)])
        found.append(list(end.beams[0].tokens) if end.beams else tokens_of(events[str(number)]))
        assert end.new_tokens == len(found[-1])
    return found


_SAMPLINGS = {
    "greedy": greedy(NEW),
    "logprobs": greedy(NEW, logprobs=True, top_logprobs=3, prompt_logprobs=True),
    "sampled": Sampling(max_new_tokens=NEW, temperature=0.7, seed=5),
    "top-k": Sampling(max_new_tokens=NEW, temperature=1.2, top_k=3, seed=6),
    "top-p that decays": Sampling(
        max_new_tokens=NEW, temperature=0.9, top_p=0.9, top_p_decay=0.9, top_p_bound=0.3, seed=7
    ),
    "banned": greedy(NEW, banned_pairs=tuple((i, (i + 1) % 40) for i in range(40))),
    "stops": greedy(NEW, stop_tokens=frozenset({1, 2, 3, 5, 8, 13, 21})),
    "penalized": greedy(NEW, repetition_penalty=1.3),
    "beams": greedy(6, beam_width=2),
}


@pytest.mark.parametrize("sampling", _SAMPLINGS.values(), ids=_SAMPLINGS)
@pytest.mark.parametrize("speculation", [NGRAM, MTP], ids=["ngram", "mtp"])
def test_answers_are_those_without_drafts(speculation: Speculation, sampling: Sampling) -> None:
    engine = engine_of(speculation)
    assert answers(engine, sampling) == answers(engine_of(), sampling)
    drafts = sampling.repetition_penalty == 1 and sampling.beam_width == 1
    assert (engine.stats.drafted_tokens > 0) == drafts


@pytest.mark.parametrize("speculation", [NGRAM, MTP], ids=["ngram", "mtp"])
def test_scores_are_those_without_drafts(speculation: Speculation) -> None:
    sampling = _SAMPLINGS["logprobs"]
    requests = [Request("one", (3, 4, 5) * 4, sampling)]
    found, expected = (drain(engine_of(each), requests)["one"] for each in (speculation, None))
    for ours, theirs in zip(found, expected, strict=True):
        if isinstance(ours, Token) and isinstance(theirs, Token):
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-5)
            assert [token for token, _ in ours.top] == [token for token, _ in theirs.top]


def test_a_window_begins_where_it_is_unless_the_position_before_was_kept() -> None:
    drafter: Any = SimpleNamespace(_last_states={})
    sequence = Sequence("r", [1, 2, 3, 4])
    row = Row(sequence, 2, (3,), sequence.blocks, is_last=False)
    first = _DepthWindow(row, 2, 3, torch.tensor([[[2.0]]]))
    assert MultiTokenDrafter._extend_window(drafter, first, 1) is first
    second = MultiTokenDrafter._extend_window(
        drafter, _DepthWindow(row, 3, 4, torch.tensor([[[3.0]]])), 1
    )
    assert second.start == 2
    assert second.states is not None
    assert second.states.flatten().tolist() == [2.0, 3.0]


@pytest.mark.parametrize("speculation", [NGRAM, MTP], ids=["ngram", "mtp"])
def test_chunks_preemption_and_shared_beginnings_change_nothing(speculation: Speculation) -> None:
    small = EngineOptions(max_sequences=4, max_step_tokens=7, cache_tokens=40, block_size=2)
    engine = engine_of(speculation, small)
    assert answers(engine, greedy(NEW)) == answers(engine_of(), greedy(NEW))
    assert engine.stats.preempted > 0
    assert engine.stats.drafted_tokens > 0


class Oracle:
    """A drafter that knows the answers, and errs where it is told to."""

    def __init__(self, known: list[list[int]], lies: int) -> None:
        self.known, self.lies, self.calls = known, lies, 0

    def draft(self, plan: StepPlan) -> None:
        for row in plan:
            sequence = row.sequence
            if sequence.is_removed or not row.is_last:
                continue
            self.calls += 1
            answer = self.known[int(sequence.request)]
            at = len(sequence.tokens) - len(PROMPTS[int(sequence.request)])
            drafts = answer[at : min(at + 3, sequence.draft_limit - 1)]
            if self.lies and self.calls % self.lies == 0 and len(drafts) > 1:
                drafts[1] = (drafts[1] + 1) % 40
            sequence.drafts = tuple(drafts[: sequence.draft_limit - 1 - len(sequence.tokens)])


@pytest.mark.parametrize("lies", [0, 2])
def test_right_drafts_save_steps_and_are_counted(lies: int) -> None:
    expected = answers(engine_of(), greedy(NEW))
    engine = engine_of()
    engine.drafter = Oracle(expected, lies)
    assert answers(engine, greedy(NEW)) == expected
    stats = engine.stats
    if not lies:  # 1 from the prompt, then 4 at a time
        assert stats.choosing_rows == len(PROMPTS) * (1 + 4)
        assert stats.accepted_tokens == stats.drafted_tokens == len(PROMPTS) * (15 - 4)
    else:
        assert stats.accepted_tokens < stats.drafted_tokens
    assert stats.new_tokens == stats.choosing_rows + stats.accepted_tokens == len(PROMPTS) * NEW


def _depth_by_depth(model: GPTModel, tokens: list[int], depths: int) -> list[int]:
    """Return the drafts after the tokens, from whole passes without a cache."""
    text = list(tokens)
    with torch.no_grad():
        places = torch.arange(len(tokens) - 1)
        rotation = model.rotation_in(model.plan.layers[-1], model.rotation(places))
        x, _ = model._run_layers(torch.tensor([text[:-1]]), None, None, None, None, len(text) - 1)
        for depth in range(depths):
            read = torch.tensor([text[depth + 1 : depth + len(tokens)]])
            x = model.mtp[depth](x, model.embed(read, places), None, rotation)
            text.append(int(model.logits(x[-1:])[0, -1, : VOCAB - 2].argmax()))
    return text[len(tokens) :]


@pytest.mark.parametrize("budget", [40, 5])
def test_drafts_are_those_of_the_depths_over_the_whole_text(budget: int) -> None:
    """This holds for any number of accepted tokens, and for prompts in chunks."""
    options = replace(OPTIONS, max_step_tokens=max(budget, 4), max_sequences=4)
    engine = engine_of(MTP, options)
    drafter = engine.drafter
    assert isinstance(drafter, MultiTokenDrafter)
    assert isinstance(engine.executor, Executor)
    seen = 0

    def check(plan: StepPlan) -> None:
        nonlocal seen
        MultiTokenDrafter.draft(drafter, plan)
        for row in plan:
            sequence = row.sequence
            if row.is_last and not sequence.is_removed:
                room = min(DEPTHS, sequence.draft_limit - 1 - len(sequence.tokens))
                expected = _depth_by_depth(engine.executor.model, sequence.tokens, DEPTHS)  # type: ignore[attr-defined]
                assert sequence.drafts == tuple(expected[: max(0, room)])
                seen += bool(sequence.drafts)

    with patch.object(drafter, "draft", check):
        found = answers(engine, Sampling(max_new_tokens=NEW, temperature=1.0, seed=3))
    assert seen > 60
    assert all(len(tokens) == NEW for tokens in found)


def _in_two_processes(layout: Layout, speculation: Speculation) -> list[list[int]]:
    return answers(engine_of(speculation, layout=layout), greedy(NEW))


@pytest.mark.parametrize("axis", ["tensor", "pipeline"])
def test_processes_that_share_a_model_agree(axis: str) -> None:
    expected = answers(engine_of(), greedy(NEW))
    for found in run_distributed(2, _in_two_processes, MTP, **{axis: 2}):
        assert found == expected


def _row(tokens: list[int], limit: int = 100) -> Row:
    sequence = Sequence("r", tokens, draft_limit=limit)
    return Row(sequence, 0, tuple(tokens), sequence.blocks, is_last=True)


def test_ngrams_continue_the_last_longest_match() -> None:
    drafter = NgramDrafter(3, 3, 2)

    def drafts(row: Row) -> tuple[int, ...]:
        drafter.draft((row,))
        return row.sequence.drafts

    row = _row([1, 2, 3, 4, 9, 1, 2, 3, 5, 2, 3, 6, 1, 2, 3])
    assert drafts(row) == (5, 2, 3)  # after 1 2 3, not after 2 3
    row.sequence.tokens += [5]
    assert drafts(row) == (2, 3, 6)
    row.sequence.tokens += [7]
    assert drafts(row) == ()
    assert drafts(_row([2, 3, 4, 2, 3, 5, 2, 3])) == (5, 2, 3)  # the last match
    assert drafts(_row([2, 3, 4, 5, 6, 2, 3], limit=9)) == (4,)  # one more token is chosen anyway
    assert drafts(_row([2, 3, 4, 5, 6, 2, 3], limit=0)) == ()
    assert drafts(_row([1])) == ()


def test_a_server_refuses_what_it_cannot_read_at_start() -> None:
    (problem,) = server_problems(ServerConfig(speculative_config="ngram"))
    assert problem.startswith("--speculative-config ngram: give a JSON object")
    good = '{"method": "ngram", "num_speculative_tokens": 2}'
    assert not server_problems(ServerConfig(speculative_config=good))


def test_what_is_asked_for_has_vllm_s_names() -> None:
    assert read_speculation(None) is None
    assert read_speculation('{"method": "mtp", "num_speculative_tokens": 2}') == Speculation(
        method="mtp", num_speculative_tokens=2
    )
    found = read_speculation(
        '{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 1}'
    )
    assert found == Speculation(
        method="ngram", num_speculative_tokens=5, prompt_lookup_max=1, prompt_lookup_min=1
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ngram", "give a JSON object such as"),
        ("[1]", "give a JSON object such as"),
        ('{"method": "ngram"}', "num_speculative_tokens is missing"),
        ('{"num_speculative_tokens": 3}', "method is missing"),
        ('{"method": "eagle", "num_speculative_tokens": 3}', "eagle"),
        ('{"method": "ngram", "num_speculative_tokens": 0}', "num_speculative_tokens is 0"),
        ('{"method": "ngram", "num_speculative_tokens": "3"}', 'num_speculative_tokens is "3"'),
        ('{"method": "ngram", "num_speculative_tokens": true}', "is true"),
        ('{"method": "ngram", "num_speculative_tokens": 3, "model": "x"}', "unknown key 'model'"),
        (
            '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 9}',
            "prompt_lookup_min 9 is more than prompt_lookup_max 4",
        ),
        (
            '{"method": "mtp", "num_speculative_tokens": 3, "prompt_lookup_min": 9}',
            "prompt_lookup_min is for the method ngram",
        ),
    ],
)
def test_mistakes_are_named(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_speculation(text)
    assert message in str(caught.value)


def test_more_drafts_than_depths_are_refused() -> None:
    with pytest.raises(ConfigError, match="give at most 3"):
        engine_of(replace(MTP, num_speculative_tokens=4))


@pytest.mark.parametrize(
    ("stats", "line"),
    [
        (Stats(), "0.00 tokens of an answer per step, 0 of 0 drafts accepted"),
        (
            Stats(new_tokens=3, choosing_rows=1, drafted_tokens=2, accepted_tokens=2),
            "3.00 tokens of an answer per step, 2 of 2 drafts accepted",
        ),
        (
            Stats(new_tokens=5000, choosing_rows=2000, drafted_tokens=6000, accepted_tokens=3000),
            "2.50 tokens of an answer per step, 3,000 of 6,000 drafts accepted",
        ),
    ],
)
def test_a_line_says_what_drafts_have_saved(stats: Stats, line: str) -> None:
    assert describe_drafts(stats) == f"speculative decoding: {line}"
