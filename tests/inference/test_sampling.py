"""From logits to tokens: which can be chosen, how often, and what is reported."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch

from megatron.inference import sampling as sampling_module
from megatron.inference.answers import PlainAnswer, ends
from megatron.inference.request import Request, Sampling
from megatron.inference.sampling import Choice, choose, uniform, unpack
from megatron.inference.scheduler import Row

SHARES = [0.5, 0.3, 0.15, 0.05]
LOGITS = torch.tensor(SHARES).log()


def chosen(choice: Choice, logits: torch.Tensor = LOGITS) -> int | None:
    rows = [choice]
    return unpack(choose(logits[None], rows).flatten().tolist(), rows)[0].token


def counts(choice: Choice, draws: int = 4000) -> list[float]:
    """Count how often each token is drawn, over evenly spaced random numbers."""
    rows = [choice._replace(uniform=(i + 0.5) / draws) for i in range(draws)]
    found = unpack(choose(LOGITS.expand(draws, -1), rows).flatten().tolist(), rows)
    seen = Counter(result.token for result in found)
    return [seen[token] / draws for token in range(len(SHARES))]


def normal(*weights: float) -> list[float]:
    return [weight / sum(weights) for weight in weights]


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (Choice(temperature=1), SHARES),
        (Choice(temperature=0.5), normal(*(share**2 for share in SHARES))),
        (Choice(temperature=1, top_k=2), normal(0.5, 0.3, 0, 0)),
        (Choice(temperature=1, top_k=99), SHARES),
        (Choice(temperature=1, top_p=0.6), normal(0.5, 0.3, 0, 0)),  # the smallest set over 0.6
        (Choice(temperature=1, top_p=0.4), normal(1, 0, 0, 0)),
        (Choice(temperature=1, top_p=1.0), SHARES),
        (Choice(temperature=1, top_p=1e-9), normal(1, 0, 0, 0)),
        (Choice(temperature=1e-300), normal(1, 0, 0, 0)),
        (Choice(temperature=1e-44, top_p=0.9), normal(1, 0, 0, 0)),
        (Choice(temperature=1e-29, top_k=3), normal(1, 0, 0, 0)),
        (Choice(temperature=2, top_k=3, top_p=0.7), normal(0.5**0.5, 0.3**0.5, 0, 0)),
        (Choice(temperature=1, banned=(0,)), normal(0, 0.3, 0.15, 0.05)),
    ],
    ids=str,
)
def test_tokens_come_as_often_as_they_are_likely(choice: Choice, expected: list[float]) -> None:
    assert counts(choice) == pytest.approx(expected, abs=1e-3)


def test_rows_of_every_kind_do_not_disturb_each_other() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(64, 50, generator=generator)
    kinds = [
        Choice(),
        Choice(temperature=1.0),
        Choice(temperature=0.7, top_k=5),
        Choice(temperature=1.3, top_p=0.8),
        Choice(temperature=1.0, top_k=9, top_p=0.5, logprob=True),
        Choice(repetition_penalty=1.5, history=[1, 2, 3], top_logprobs=3),
        Choice(target=7, logprob=True, top_logprobs=1),
        Choice(banned=(4,), temperature=0.9),
    ]
    rows = [kinds[i % 8]._replace(uniform=uniform(1, i)) for i in range(64)]
    together = unpack(choose(logits, rows).flatten().tolist(), rows)
    for i, row in enumerate(rows):
        (alone,) = unpack(choose(logits[i : i + 1], [row]).flatten().tolist(), [row])
        assert (alone.token, len(alone.top)) == (together[i].token, len(together[i].top))
        if row.logprob:
            assert alone.logprob == pytest.approx(together[i].logprob, abs=1e-6)


def test_the_repetition_penalty_weakens_what_occurred() -> None:
    logits = torch.tensor([2.0, 1.5, -1.0])
    assert chosen(Choice(), logits) == 0
    assert chosen(Choice(repetition_penalty=1.4, history=[0, 0]), logits) == 1
    assert chosen(Choice(repetition_penalty=1.2, history=[0]), logits) == 0
    assert chosen(Choice(repetition_penalty=2.0, history=[0]), torch.tensor([0.9, 0.5])) == 1
    low = torch.tensor([-1.0, -1.5])
    assert chosen(Choice(repetition_penalty=2.0, history=[0]), low) == 1


def test_log_probabilities_are_reported_before_temperature_and_cuts() -> None:
    row = Choice(temperature=0.1, top_k=1, logprob=True, top_logprobs=3)
    (found,) = unpack(choose(LOGITS[None], [row]).flatten().tolist(), [row])
    assert found.logprob == pytest.approx(math.log(0.5), abs=1e-6)
    assert [token for token, _ in found.top] == [0, 1, 2]
    assert [math.exp(value) for _, value in found.top] == pytest.approx(SHARES[:3])


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_scores_that_are_not_finite_give_no_token(broken: float) -> None:
    logits = LOGITS.clone()
    logits[2] = broken
    for choice in (Choice(), Choice(temperature=1.0), Choice(temperature=1.0, top_p=0.5)):
        assert chosen(choice, logits) is None


def test_uniform_numbers_spread_evenly_and_differ_by_seed_and_place() -> None:
    values = [uniform(seed, number) for seed in range(40) for number in range(250)]
    assert len(set(values)) == len(values)
    assert all(0 <= value < 1 for value in values)
    bins = Counter(int(value * 10) for value in values)
    assert all(abs(count - 1000) < 150 for count in bins.values())
    assert uniform(5, 1) == uniform(5, 1)


@pytest.mark.parametrize(
    ("seed", "index", "value"),
    [(0, 0, 2181674112), (1, 0, 1461041750), (0, 1, 1814276812), (2**63 + 5, 7, 907753719)],
)
def test_a_seed_gives_the_same_numbers_in_every_version(seed: int, index: int, value: int) -> None:
    assert uniform(seed, index) * 2**32 == value


def test_the_smallest_number_draws_no_banned_token() -> None:
    assert chosen(Choice(temperature=1, uniform=0.0, banned=(0, 1))) == 2
    assert chosen(Choice(temperature=1, uniform=0.0)) == 0
    assert chosen(Choice(temperature=1, uniform=1 - 2**-32)) == 3


def test_top_p_takes_the_next_token_if_the_first_ones_just_reach_it() -> None:
    """As in Megatron-LM, those before it must exceed the share, not reach it."""
    even = torch.zeros(2)
    assert chosen(Choice(temperature=1, top_p=0.5, uniform=0.75), even) == 1
    assert chosen(Choice(temperature=1, top_p=0.49, uniform=0.75), even) == 0


def test_all_rows_are_scored_and_a_small_vocabulary_is_listed_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sampling_module, "_MAX_SCORED_ROWS", 2)
    rows = [Choice(logprob=True, top_logprobs=3 * (i % 2)) for i in range(5)]
    logits = torch.stack([LOGITS[[0, 1]].roll(i) for i in range(5)])
    found = unpack(choose(logits, rows).flatten().tolist(), rows)
    assert [row.token for row in found] == [0, 1, 0, 1, 0]
    assert [row.logprob for row in found] == pytest.approx([math.log(0.5 / 0.8)] * 5)
    assert [row.top[:2] for row in found[1::2]] == [
        ((1, pytest.approx(math.log(5 / 8))), (0, pytest.approx(math.log(3 / 8))))
    ] * 2


def choices_of(sampling: Sampling, answer: list[int]) -> list[Choice]:
    """Return how each token of the answer is chosen."""
    plain = PlainAnswer(Request("a", (1,), sampling), seed=0)
    (sequence,) = plain.sequences
    found = []
    for token in answer:
        (wish,) = plain.choices(Row(sequence, len(sequence.tokens) - 1, (0,), (), is_last=True))
        found.append(wish[1])
        sequence.tokens.append(token)
    return found


def test_top_p_decays_down_to_its_bound_as_megatron_has_it() -> None:
    sampling = Sampling(max_new_tokens=9, top_p=0.8, top_p_decay=0.5, top_p_bound=0.3)
    found = [choice.top_p for choice in choices_of(sampling, [1, 2, 3, 4])]
    assert found == pytest.approx([0.8, 0.4, 0.3, 0.3])
    free = replace(sampling, top_p_bound=0.0)
    assert [c.top_p for c in choices_of(free, [1, 2, 3])] == pytest.approx([0.8, 0.4, 0.2])
    still = replace(sampling, top_p_decay=0.0)
    assert {choice.top_p for choice in choices_of(still, [1, 2, 3])} == {0.8}


def test_a_pair_is_banned_behind_its_first_token_only() -> None:
    sampling = Sampling(max_new_tokens=9, banned_pairs=((25, 198), (25, 628)))
    found = [choice.banned for choice in choices_of(sampling, [25, 7, 25])]
    assert found == [(), (198, 628), ()]


@pytest.mark.parametrize(
    ("tokens", "over"),
    [([5, 198], False), ([198, 198], True), ([198, 5, 198], False), ([5, 628], True)],
)
def test_megatrons_double_end_of_line(tokens: list[int], over: bool) -> None:
    rules = Sampling(max_new_tokens=9, stop_tokens=(628,), stop_sequences=((198, 198),))
    assert ends(rules, tokens) == over
