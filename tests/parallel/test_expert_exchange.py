"""Tokens sent to experts on other processes and back, against a loop over experts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron.kernels.grouped import combine
from megatron.parallel.collectives import all_gather
from megatron.parallel.exchange import GroupExchange
from megatron.parallel.expert_exchange import ExpertExchange, gathers_all
from tests.distributed import run_sharing_memory

EXPERTS, TOKENS, HIDDEN, CHOSEN = 8, 6, 4, 3


def _inputs(rank, kind):
    """Return the tokens, choices and weights of one process, which differ on every rank."""
    generator = torch.Generator().manual_seed(rank)
    tokens = torch.randn(TOKENS, HIDDEN, generator=generator, dtype=torch.float64)
    weights = torch.rand(TOKENS, CHOSEN, generator=generator, dtype=torch.float64)
    scores = torch.rand(TOKENS, EXPERTS, generator=generator)
    choices = scores.topk(CHOSEN, dim=1).indices
    if kind == "dropped":
        choices = torch.where(torch.rand(choices.shape, generator=generator) < 0.5, -1, choices)
    elif kind == "one process":  # the others get nothing
        choices = torch.arange(CHOSEN).expand(TOKENS, -1) % 2
        choices = torch.where(torch.arange(CHOSEN) < 2, choices, -1)
    elif kind == "nothing":
        choices = torch.full_like(choices, -1)
    return tokens, choices, weights


def _factors():
    """Return the experts' stand-ins: each multiplies by its own vector."""
    generator = torch.Generator().manual_seed(99)
    return torch.randn(EXPERTS, HIDDEN, generator=generator, dtype=torch.float64)


def _naive(tokens, choices, weights, factors):
    rows = []
    for token, chosen, shares in zip(tokens, choices.tolist(), weights, strict=True):
        total = 0 * token * shares.sum() * factors.sum()  # gradients exist, even if they are zero
        for expert, share in zip(chosen, shares, strict=True):
            if expert >= 0:
                total = total + share * token * factors[expert]
        rows.append(total)
    return torch.stack(rows)


def _exchanged(layout, kind, sequence_parallel, way):
    """Return outputs, gradients as divided among replicas, and the number of received tokens."""
    layout = replace(layout, sequence_parallel=sequence_parallel)
    # Without sequence parallelism, all tensor ranks have the same tokens.
    rank = layout.world.rank
    if not sequence_parallel:
        rank -= layout.tensor.rank
    tokens, choices, weights = _inputs(rank, kind)
    tokens, weights = tokens.requires_grad_(), weights.requires_grad_()
    messages = (
        GroupExchange(layout.expert) if way == "exchange" and layout.expert.size > 1 else None
    )
    exchange = ExpertExchange(layout, EXPERTS, CHOSEN, exchange=messages)
    arrived = exchange.dispatch(tokens, choices, weights, equal_counts=way != "where needed")
    first = layout.expert.rank * exchange.local
    here = _factors()[first : first + exchange.local].requires_grad_()
    received = len(arrived.choices)
    rows, grouping = arrived.rows(exchange.local, None)
    # Each part of a split expert gives a part of the sum.
    experts = grouping.expert_of_row().clamp(max=len(here) - 1)  # expertless rows do not count
    scale = here[experts] / layout.expert_tensor.size
    outputs = combine((rows * scale).float(), arrived.weights.float(), grouping).double()
    out = exchange.combine(outputs, arrived)()
    out.square().sum().backward()
    return out.detach(), tokens.grad, weights.grad, here.grad, received, first


LAYOUTS = [
    (2, {"expert": 2}, False),
    (4, {"expert": 4}, False),
    (4, {"expert": 2}, False),
    (4, {"tensor": 2, "expert": 2}, False),
    (4, {"tensor": 2, "expert": 2}, True),
    (4, {"tensor": 2, "expert": 2, "expert_tensor": 1}, True),
    (4, {"tensor": 2, "expert": 4, "expert_tensor": 1}, True),
    (2, {"tensor": 2, "expert_tensor": 1}, True),
    (2, {"tensor": 2}, False),
    (2, {"tensor": 2}, True),
]


@pytest.mark.parametrize("way", ["where needed", "to all", "exchange"])
@pytest.mark.parametrize("kind", ["usual", "dropped", "one process", "nothing"])
@pytest.mark.parametrize(("processes", "sizes", "sequence_parallel"), LAYOUTS, ids=str)
def test_every_token_meets_its_experts(kind, processes, sizes, sequence_parallel, way):
    tensor = sizes.get("tensor", 1)
    parts = sizes.get("expert_tensor", tensor)
    results = run_sharing_memory(processes, _exchanged, kind, sequence_parallel, way, **sizes)
    factors = _factors().requires_grad_()
    for rank, (out, tokens_grad, weights_grad, *_) in enumerate(results):
        source = rank if sequence_parallel else rank - rank % tensor
        tokens, choices, weights = _inputs(source, kind)
        tokens, weights = tokens.requires_grad_(), weights.requires_grad_()
        expected = _naive(tokens, choices, weights, factors)
        torch.testing.assert_close(out, expected.detach(), rtol=1e-5, atol=1e-6)
        # Tokens that several tensor ranks share must not count twice.
        share = 1 if sequence_parallel else 1 / tensor
        (share * expected.square().sum()).backward()
        for ours, theirs in ((tokens_grad, tokens.grad), (weights_grad, weights.grad)):
            torch.testing.assert_close(ours * share, theirs, rtol=1e-4, atol=1e-5)
    # Sum over an expert's replicas, times a replica's size: their mean is over all of them, that
    # of other weights is over the ranks with different tokens.
    total = torch.zeros_like(factors)
    for *_, grad, _, first in results:
        total[first : first + len(grad)] += grad
    groups = processes // (sizes.get("expert", 1) * parts)
    replicas = processes // tensor
    torch.testing.assert_close(total / groups, factors.grad / replicas, rtol=1e-4, atol=1e-5)


def _count_sent(layout):
    """Return the number of tokens received, and all ranks' choices."""
    tokens, choices, weights = _inputs(layout.world.rank, "dropped")
    exchange = ExpertExchange(layout, EXPERTS, CHOSEN)
    arrived = exchange.dispatch(tokens, choices, weights, equal_counts=False)
    assert arrived.count() == (arrived.choices >= 0).sum()
    assert (arrived.choices >= 0).any(1).all()
    assert (arrived.choices < EXPERTS // layout.expert.size).all()
    return len(arrived.tokens.wait()), all_gather(choices, layout.expert)


def test_a_token_is_sent_once_to_each_process_with_its_experts():
    local = EXPERTS // 4
    for rank, (received, choices) in enumerate(run_sharing_memory(4, _count_sent, expert=4)):
        owners = [{expert // local for expert in row if expert >= 0} for row in choices.tolist()]
        assert received == sum(rank in each for each in owners)


def test_all_tokens_are_gathered_where_nearly_all_of_them_go_anyway():
    assert gathers_all(128, 8, 2)  # 99.7% of the tokens
    assert gathers_all(64, 8, 4)  # 91%
    assert not gathers_all(64, 8, 8)  # 67%
    assert not gathers_all(8, 1, 2)
