"""DeepSpeed's gating as loops over tokens and experts, written from its published rules.

Every function takes fp64 tensors and is differentiated by autograd. T: tokens, E: experts.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.models.mixture_plan import RouterPlan
from tests.models.naive_mixture import Assignment


class Gates(NamedTuple):
    """The experts of each token, their weights, and the balancing loss."""

    assignment: Assignment
    loss: Tensor


def gates(
    logits: Tensor, plan: RouterPlan, room: int | None, gumbel: Tensor, selection: Tensor
) -> Gates:
    """Return DeepSpeed's gates for logits [T, E].

    Args:
        logits: The scores before the softmax.
        plan: The router's record.
        room: The number of tokens that an expert keeps, or `None` for no limit.
        gumbel: The noise added to the choice, [T, E]; zeros for none.
        selection: Positive numbers, [T, E]: each expert keeps the tokens with the highest.
    """
    tokens, experts = logits.shape
    scores = [row.exp() / row.exp().sum() for row in logits]
    chosen = [_choose(logits[t].tolist(), gumbel[t].tolist(), plan) for t in range(tokens)]
    kept: Assignment = [{} for _ in range(tokens)]
    for expert in range(experts):
        queue = [
            (_place(t, chosen[t].index(expert), expert, plan, scores, selection), t)
            for t in range(tokens)
            if expert in chosen[t]
        ]
        for _, token in sorted(queue)[:room]:
            kept[token][expert] = scores[token][expert]
    if plan.chosen > 1:
        for factors in kept:
            total = sum(factors.values())
            for expert in factors:
                factors[expert] = factors[expert] / total
    counted = 1 if plan.chosen == 2 else plan.chosen
    loss = torch.zeros((), dtype=logits.dtype)
    for expert in range(experts):
        share = sum(expert in experts_of[:counted] for experts_of in chosen) / (counted * tokens)
        loss = loss + experts * share * sum(score[expert] for score in scores) / tokens
    return Gates(kept, loss)


def _choose(row: list[float], noise: list[float], plan: RouterPlan) -> list[int]:
    """Return a token's experts, the best first."""
    noisy = [logit + extra for logit, extra in zip(row, noise, strict=True)]
    order = range(len(row))
    if plan.chosen == 1:
        return [max(order, key=lambda e: noisy[e])]
    best = sorted(order, key=lambda e: -row[e])[: plan.chosen]
    if plan.chosen == 2:
        best[1] = max((e for e in order if e != best[0]), key=lambda e: noisy[e])
    return best


def _place(
    token: int,
    rank: int,
    expert: int,
    plan: RouterPlan,
    scores: list[Tensor],
    selection: Tensor,
) -> tuple[float, int]:
    """Return a token's position in an expert's queue: lower positions are kept."""
    assert plan.gating is not None
    if plan.chosen == 2:
        return rank, token
    if plan.chosen == 1:
        return (-selection[token, expert].item() if plan.gating.selects_randomly else 0), token
    return -scores[token][expert].item(), token


def room(tokens: int, plan: RouterPlan) -> int:
    """Return the capacity that DeepSpeed gives an expert, for sizes that fp32 divides exactly."""
    assert plan.capacity is not None
    return max(math.ceil(tokens / plan.experts * plan.capacity * plan.chosen), plan.min_capacity)
