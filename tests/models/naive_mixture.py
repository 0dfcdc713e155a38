"""Mixtures of experts as loops over tokens and experts, from Megatron Core's published formulas.

Every function takes fp64 tensors and is differentiated by autograd. T: tokens, E: experts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.models.mixture_plan import RouterPlan
from megatron.models.plan import MLPPlan

Assignment = list[dict[int, Tensor]]
"""For each token its experts, each with the factor of its output."""


def assign(logits: Tensor, plan: RouterPlan, bias: Tensor | None = None) -> Assignment:
    """Return the experts of each token, given logits [T, E] and the experts' biases [E]."""
    found = []
    for row in logits:
        scores = _alone(row, plan) if plan.score != "softmax" else row
        if plan.score == "softmax" and plan.scores_all:
            scores = row.exp() / row.exp().sum()
        rank = (scores if bias is None else scores + bias).tolist()
        allowed = _allowed(rank, plan)
        chosen = sorted(allowed, key=lambda e: -rank[e])[: plan.chosen]
        factors = {e: scores[e] for e in chosen}
        if plan.score == "softmax" and not plan.scores_all:
            total = sum(row[e].exp() for e in chosen)
            factors = {e: row[e].exp() / total for e in chosen}
        elif plan.score != "softmax" and plan.chosen > 1:
            total = sum(factors.values())
            factors = {e: score / (total + 1e-20) for e, score in factors.items()}
        found.append({e: factor * plan.scale for e, factor in factors.items()})
    return found


def _alone(row: Tensor, plan: RouterPlan) -> Tensor:
    """Return scores that are independent of each other."""
    return torch.sigmoid(row) if plan.score == "sigmoid" else (1 + row.exp()).log().sqrt()


def _allowed(rank: list[float], plan: RouterPlan) -> list[int]:
    """Return which experts are in the best groups."""
    size, each = plan.experts // plan.groups, plan.chosen // plan.groups_chosen
    groups = [list(range(g * size, (g + 1) * size)) for g in range(plan.groups)]
    groups.sort(key=lambda group: -sum(sorted((rank[e] for e in group), reverse=True)[:each]))
    return sorted(e for group in groups[: plan.groups_chosen] for e in group)


def without_overflow(assignment: Assignment, plan: RouterPlan) -> Assignment:
    """Return the assignment without the tokens that exceed their expert's capacity."""
    assert plan.capacity is not None
    room = math.ceil(len(assignment) * plan.chosen / plan.experts * plan.capacity)
    kept: Assignment = [{} for _ in assignment]
    for expert in range(plan.experts):
        queue = [token for token, factors in enumerate(assignment) if expert in factors]
        if not plan.drops_last:
            queue.sort(key=lambda token: -assignment[token][expert].item())  # ties keep their order
        for token in queue[:room]:
            kept[token][expert] = assignment[token][expert]
    return kept


def balancing_loss(
    logits: Tensor, plan: RouterPlan, sequences: int = 1, others: Sequence[Tensor] = ()
) -> Tensor:
    """Return Switch Transformers' loss, averaged over sequences, which are interleaved.

    Args:
        logits: [T, E].
        plan: The router's record.
        sequences: The number of sequences.
        others: Logits of other micro-batches, whose tokens count as well.
    """
    losses = []
    for sequence in range(sequences):
        rows = logits[sequence::sequences]
        tokens = torch.zeros(plan.experts, dtype=logits.dtype)
        sums = torch.zeros(plan.experts, dtype=logits.dtype)
        for row in (*rows, *(row for other in others for row in other.detach())):
            rank = row.tolist()
            for expert in sorted(range(plan.experts), key=lambda e: -rank[e])[: plan.chosen]:
                tokens[expert] += 1
        for row in rows:
            scores = row.exp() if plan.score == "softmax" else _alone(row, plan)
            sums = sums + scores / (scores.sum() + 1e-20)
        shares = tokens / tokens.sum()
        losses.append((sums * shares).sum() * plan.experts / len(rows))
    return sum(losses) / sequences


def sinkhorn(logits: Tensor) -> list[list[float]]:
    """Rank the experts for each token by Core's published Sinkhorn iteration."""
    cost = logits.detach().exp().tolist()
    tokens, experts = len(cost), len(cost[0])
    columns, change = [1.0] * experts, 1.0
    while change > 1e-4:
        rows = [
            1 / tokens / (sum(c * x for c, x in zip(columns, row, strict=True)) + 1e-8)
            for row in cost
        ]
        old = columns
        columns = [
            1 / experts / (sum(r * row[e] for r, row in zip(rows, cost, strict=True)) + 1e-8)
            for e in range(experts)
        ]
        change = sum(abs(a - b) for a, b in zip(old, columns, strict=True)) / experts
    return [
        [c * x * r for c, x in zip(columns, row, strict=True)]
        for r, row in zip(rows, cost, strict=True)
    ]


def z_loss(logits: Tensor) -> Tensor:
    """Return the mean of the squared logsumexp of the logits."""
    return sum(row.exp().sum().log() ** 2 for row in logits) / len(logits)


def mlp(x: Tensor, weights: Mapping[str, Tensor], plan: MLPPlan) -> Tensor:
    """Return one expert's output [h] for a token [h].

    Args:
        x: The token.
        weights: "up" [up, h] and "down" [h, inner], and "up_bias" [up] and "down_bias" [h] if it
            has biases.
        plan: The expert's plan; only SwiGLU and GeLU are supported.
    """
    inner = weights["up"] @ x + weights.get("up_bias", 0)
    if plan.gated:
        assert plan.activation == "swiglu"
        gate, up = inner[: plan.inner], inner[plan.inner :]
        inner = gate / (1 + (-gate).exp()) * up
    else:
        assert plan.activation == "gelu"
        inner = F.gelu(inner)
    return weights["down"] @ inner + weights.get("down_bias", 0)
