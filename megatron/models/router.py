"""The router of a mixture of experts: which experts each token is sent to, with which weights.

Scores, losses and the choice follow Megatron Core. Load-balancing losses are those of Fedus et al.,
"Switch Transformers" (2021), over a micro-batch or over each sequence; the z-loss is that of Zoph
et al., "ST-MoE" (2022); biases instead of losses are those of DeepSeek-V3 (2024).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.models.plan import RouterPlan
from megatron.parallel.build import BuildContext
from megatron.parallel.collectives import all_reduce
from megatron.parallel.random import split_region
from megatron.parallel.routing import attach

_TINY = 1e-20  # added to sums of scores, as in Megatron Core


class Routing(NamedTuple):
    """The experts of each token.

    Attributes:
        choices: The chosen experts, int64 [T, k]; -1 for a choice that was dropped.
        weights: The factor of each chosen expert's output, fp32 [T, k]; 0 for a dropped choice.
    """

    choices: Tensor
    weights: Tensor


class Router(nn.Module):
    """A linear layer in fp32 that scores the experts for each token.

    Args:
        plan: The record of the router.
        context: Layout, device and number formats.
    """

    def __init__(self, plan: RouterPlan, context: BuildContext) -> None:
        """Allocate the weight, and announce the router's losses and counts."""
        super().__init__()
        self.plan, self.layout = plan, context.layout
        self.weight = context.new_parameter(
            (plan.experts, plan.hidden),
            init=plan.init.weight(plan.hidden, plan.experts),
            partial_gradient=context.layout.sequence.size > 1,
        )
        z_loss = () if plan.z_loss is None else ("z_loss",)
        losses = (*z_loss, *(kind for kind, _ in plan.balancing))
        self.state = context.registry.routers.add(
            plan.experts, losses, plan.bias_rate, context.device
        )
        # The same memory: checkpoints hold the biases with the weights.
        self.register_buffer("expert_bias", self.state.bias)

    def forward(self, x: Tensor) -> Routing:
        """Choose the experts of tokens [s, b, h]; T = s b."""
        plan = self.plan
        if self.training and plan.jitter:
            with split_region(self.layout.sequence, x.device, self.state.number, "router"):
                noise = torch.empty_like(x).uniform_(1 - plan.jitter, 1 + plan.jitter)
            x = x * noise
        # After sums in fp64, their order hardly ever changes the fp32 result: text does not depend
        # on its batch.
        dtype = torch.float32 if torch.is_grad_enabled() else torch.float64
        logits = F.linear(x.to(dtype), self.weight.to(dtype)).float()  # [s, b, experts]
        sequences, logits = logits.shape[1], logits.flatten(0, 1)
        counts_losses = self.training and torch.is_grad_enabled()
        if counts_losses and plan.z_loss is not None:
            share = 1 / (self.layout.context.size * self.layout.sequence.size)
            z_loss = torch.logsumexp(logits, dim=-1).square().mean() * share
            logits = self._with_loss(logits, "z_loss", plan.z_loss, z_loss)
        routing, scores = self._choose(logits)
        if counts_losses and plan.balancing:
            if plan.score == "softmax":
                scores = torch.softmax(logits, dim=-1)
            else:
                scores = scores / (scores.sum(-1, keepdim=True) + _TINY)
            weights = routing.weights
            for kind, coefficient in plan.balancing:
                loss = self._balancing_loss(scores, 1 if kind == "aux_loss" else sequences)
                weights = self._with_loss(weights, kind, coefficient, loss)
            routing = routing._replace(weights=weights)
        if plan.capacity is not None:
            routing = drop(routing, plan)
        if counts_losses:
            self.state.count(routing.choices)
        return routing

    def _choose(self, logits: Tensor) -> tuple[Routing, Tensor]:
        """Return the chosen experts, and the scores [T, experts] before any choice."""
        plan = self.plan
        if plan.score == "sigmoid":
            scores = torch.sigmoid(logits)
        else:
            scores = torch.softmax(logits, dim=-1) if plan.scores_all else logits
        ranking = scores.detach()
        if self.state.bias is not None:
            ranking = ranking + self.state.bias
        if plan.groups > 1:
            ranking = within_best_groups(ranking, plan)
        choices = ranking.topk(plan.chosen, dim=-1).indices
        weights = scores.gather(1, choices)
        if plan.score == "sigmoid" and plan.chosen > 1:
            weights = weights / (weights.sum(-1, keepdim=True) + _TINY)
        elif plan.score == "softmax" and not plan.scores_all:
            weights = torch.softmax(weights, dim=-1)
        if plan.scale != 1.0:
            weights = weights * plan.scale
        return Routing(choices, weights), scores

    def _balancing_loss(self, scores: Tensor, sequences: int) -> Tensor:
        """Return this rank's part of experts x sum over experts of (share x mean score).

        It is 1 if all experts get equally many tokens. The parts of all ranks that share the
        sequences add up to the loss, or to the mean of the losses of `sequences` interleaved
        sequences.

        Args:
            scores: Scores of each token, [s b, experts].
            sequences: Number of sequences b that have a loss of their own, or 1.
        """
        plan, layout = self.plan, self.layout
        best = scores.detach().topk(plan.chosen, dim=-1).indices
        hits = torch.zeros_like(scores).scatter_(1, best, 1.0)
        hits = hits.unflatten(0, (-1, sequences)).sum(0)  # [sequences, experts]
        hits = all_reduce(all_reduce(hits, layout.context), layout.sequence)
        sums = scores.unflatten(0, (-1, sequences)).sum(0)
        tokens = len(scores) // sequences * layout.context.size * layout.sequence.size
        factor = plan.experts / (plan.chosen * tokens * tokens * sequences)
        return (sums * hits).sum() * factor

    def _with_loss(self, x: Tensor, kind: str, coefficient: float, part: Tensor) -> Tensor:
        """Return x, whose backward pass also differentiates this rank's part of the loss."""
        layout = self.layout
        # Without sequence parallelism every tensor rank has the same part.
        self.state.add_loss(kind, part.detach() * layout.sequence.size / layout.tensor.size)
        # Gradients are averaged over context ranks, but the parts add up.
        return attach(x, part * (coefficient * layout.context.size), self.state.loss_scale)


def within_best_groups(scores: Tensor, plan: RouterPlan) -> Tensor:
    """Return scores [T, experts] with -inf outside each token's best groups.

    A group's score is the sum of its best experts' scores, as many as a token takes from each of
    its groups.
    """
    groups = scores.unflatten(1, (plan.groups, -1))  # [T, groups, experts of a group]
    best_of_each = groups.topk(plan.chosen // plan.groups_chosen, dim=-1).values.sum(-1)
    best = best_of_each.topk(plan.groups_chosen, dim=-1).indices
    is_out = torch.ones_like(best_of_each, dtype=torch.bool).scatter_(1, best, False)
    return groups.masked_fill(is_out.unsqueeze(-1), -math.inf).flatten(1)


def capacity(tokens: int, plan: RouterPlan) -> int:
    """Return how many tokens of a rank's micro-batch an expert keeps."""
    assert plan.capacity is not None
    return math.ceil(tokens * plan.chosen / plan.experts * plan.capacity)


def drop(routing: Routing, plan: RouterPlan) -> Routing:
    """Drop the choices of full experts: those with the lowest weights, or those that come last."""
    choices, weights = routing
    tokens, chosen = choices.shape
    limit = min(capacity(tokens, plan), tokens)
    # Each expert's queue [T, experts]: lower numbers are served first, and absent tokens last.
    waits = torch.full((tokens, plan.experts), math.inf, device=choices.device)
    if plan.drops_last:
        order = torch.arange(tokens, device=choices.device, dtype=waits.dtype)
        waits.scatter_(1, choices, order.unsqueeze(1).expand(-1, chosen))
    else:
        waits.scatter_(1, choices, -weights.detach())
    served = waits.argsort(dim=0, stable=True)[:limit]  # [limit, experts]
    kept = torch.zeros_like(waits, dtype=torch.bool).scatter_(0, served, True)
    kept = kept.gather(1, choices)
    return Routing(torch.where(kept, choices, -1), torch.where(kept, weights, 0.0))
