"""The router of a mixture of experts, which chooses experts and their weights for each token.

Scores, losses and choices follow Megatron Core or, with a `GatingPlan`, DeepSpeed. Load-balancing
losses over a micro-batch or over each sequence come from Fedus et al., "Switch Transformers"
(2021), the z-loss from Zoph et al., "ST-MoE" (2022), and biases instead of losses from DeepSeek-V3
(2024).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.models.mixture_plan import RouterPlan
from megatron.parallel.adapter import Adapter
from megatron.parallel.adapter_stack import AdapterStack
from megatron.parallel.build import BuildContext
from megatron.parallel.collectives import all_reduce
from megatron.parallel.context.split import split_sequence
from megatron.parallel.layers import Projections, Split
from megatron.parallel.parameter import ZEROS, Matrices
from megatron.parallel.random import uniform
from megatron.parallel.routing import attach

_TINY = 1e-20  # added to sums of scores, as in Megatron Core
_SMALL, _CONVERGED = 1e-8, 1e-4  # for Sinkhorn's iterations, as in Megatron Core
_MAX_ITERATIONS = 1000


class Routing(NamedTuple):
    """The experts of each token.

    Attributes:
        choices: The chosen experts, int64 [T, k]; -1 for a choice that was dropped.
        weights: The factor applied to each chosen expert's output, fp32 [T, k]; 0 for a dropped
            choice.
    """

    choices: Tensor
    weights: Tensor


class Router(nn.Module):
    """A linear layer that scores the experts for each token, in fp32 or, without gradients, fp64.

    An adapter changes the router's weight before the product, as in PEFT.

    Args:
        plan: The plan of the router.
        context: Layout, device and number formats.
    """

    def __init__(self, plan: RouterPlan, context: BuildContext) -> None:
        """Allocate the weight, and register the router's losses and counts."""
        super().__init__()
        self.plan, self.layout, self._layer = plan, context.layout, context.layer
        self.in_features, self.out_features = plan.hidden, plan.experts
        self.split: Split | None = None
        self.adapted_as: Projections | None = None
        self.adapter: Adapter | AdapterStack | None = None
        self.weight = context.new_parameter(
            (plan.experts, plan.hidden),
            init=plan.init.weight(plan.hidden, plan.experts),
            partial_gradient=context.layout.sequence.size > 1,
            matrices=Matrices(),
        )
        z_loss = () if plan.z_loss is None else ("z_loss",)
        losses = (*z_loss, *(kind for kind, _ in plan.balancing))
        self.bias = None
        if plan.bias:
            self.bias = context.new_parameter(
                (plan.experts,), init=ZEROS, partial_gradient=context.layout.sequence.size > 1
            )
        self.state = context.registry.routers.add(
            plan.experts, losses, plan.bias_rate, context.device
        )
        # The buffer is the registry's tensor, so checkpoints save the biases with the weights.
        self.register_buffer("expert_bias", self.state.bias)

    def forward(self, x: Tensor) -> Routing:
        """Return the experts chosen for the T = s b tokens of `x`, [s, b, h].

        A training pass with gradients also adds the router's losses, and counts each expert's
        tokens, in the router's state.
        """
        plan = self.plan
        length, sequences = x.shape[:2]
        draw = partial(self._draw, length, sequences, x.device)
        if self.training and plan.jitter:
            # Multiply in fp32, because bf16 cannot represent factors such as 1.001.
            noise = 1 + plan.jitter * (2 * draw("jitter", plan.hidden) - 1)
            x = x.float() * noise.view_as(x)
        # An fp64 sum rounded to fp32 hardly ever depends on the order of its terms, so generated
        # text does not depend on the batch.
        dtype = torch.float32 if torch.is_grad_enabled() else torch.float64
        logits = self._logits(x.to(dtype)).float().flatten(0, 1)
        counts_losses = self.training and torch.is_grad_enabled()
        if counts_losses and plan.z_loss is not None:
            share = 1 / (self.layout.context.size * self.layout.sequence.size)
            z_loss = torch.logsumexp(logits, dim=-1).square().mean() * share
            logits = self._with_loss(logits, "z_loss", plan.z_loss, z_loss)
        routing, scores = self._choose(logits, partial(draw, width=plan.experts))
        if counts_losses and plan.balancing:
            routing = self._with_balancing_losses(routing, logits, scores, sequences)
        limit = expert_capacity(len(logits), plan, training=self.training)
        if limit is not None:
            random = draw("selection", plan.experts) if selects_randomly(plan) else None
            routing = drop_choices(
                routing, queue_positions(routing, plan, random), limit, plan.experts
            )
        if plan.gating is not None and plan.chosen > 1:
            sums = routing.weights.sum(-1, keepdim=True)
            sums = sums.clamp(min=torch.finfo(sums.dtype).eps)  # a token may have no expert left
            routing = routing._replace(weights=routing.weights / sums)
        if counts_losses:
            self.state.count(routing.choices)
        return routing

    def _logits(self, x: Tensor) -> Tensor:
        """Return the logits [s, b, experts] of tokens [s, b, h]."""
        weight, adapter = self.weight.to(x.dtype), self.adapter
        if isinstance(adapter, Adapter):
            weight = weight + adapter.delta_weight(x.dtype)
        logits = F.linear(x, weight, None if self.bias is None else self.bias.to(x.dtype))
        if isinstance(adapter, AdapterStack):
            factors = adapter.for_tokens(len(x))
            if factors is not None:
                low_rank = F.linear(x, factors.a.to(x.dtype)) * factors.mask.unsqueeze(1)
                logits = logits + F.linear(low_rank, factors.b.to(x.dtype))
        return logits

    def _draw(
        self, length: int, sequences: int, device: torch.device, purpose: str, width: int
    ) -> Tensor:
        """Return random numbers from 0 to 1 for this rank's tokens, fp32 [T, width].

        A token gets the same numbers in every layout, because each rank draws the numbers of all
        ranks that share its sequences. In evaluation, all micro-batches get the same numbers.
        """
        context, sequence = self.layout.context, self.layout.sequence
        shape = (length * context.size * sequence.size, sequences, width)
        seed = self.state.seed if self.training else 0
        numbers = uniform(shape, device, seed, "router", self._layer, purpose)
        local = split_sequence(numbers, context, dim=0).chunk(sequence.size)[sequence.rank]
        return local.flatten(0, 1)

    def _choose(self, logits: Tensor, draw: Callable[[str], Tensor]) -> tuple[Routing, Tensor]:
        """Return the chosen experts, and the scores of all experts, [T, experts].

        Args:
            logits: [T, experts].
            draw: A function that draws random numbers [T, experts] for the named purpose.
        """
        plan = self.plan
        if plan.score == "sigmoid":
            scores = torch.sigmoid(logits)
        elif plan.score == "sqrtsoftplus":
            scores = F.softplus(logits).sqrt()
        else:
            scores = torch.softmax(logits, dim=-1) if plan.scores_all else logits
        ranking = scores.detach()
        if plan.sinkhorn and self.training:
            ranking = sinkhorn(logits.detach())
        if self.state.bias is not None:
            ranking = ranking + self.state.bias
        if plan.groups > 1:
            ranking = within_best_groups(ranking, plan)
        if plan.gating is not None and plan.gating.samples and self.training:
            choices = sample_experts(logits.detach(), plan.chosen, draw("choice"))
        else:
            choices = ranking.topk(plan.chosen, dim=-1).indices
        weights = scores.gather(1, choices)
        if plan.score == "softmax" and not plan.scores_all:
            weights = torch.softmax(weights, dim=-1)
        elif plan.score != "softmax" and plan.chosen > 1:
            weights = weights / (weights.sum(-1, keepdim=True) + _TINY)
        if plan.scale != 1.0:
            weights = weights * plan.scale
        return Routing(choices, weights), scores

    def _with_balancing_losses(
        self, routing: Routing, logits: Tensor, scores: Tensor, sequences: int
    ) -> Routing:
        """Attach the load-balancing losses to the weights of the chosen experts.

        Args:
            routing: The chosen experts.
            logits: [T, experts].
            scores: Scores of all experts, [T, experts].
            sequences: Number of interleaved sequences b.
        """
        if self.plan.score == "softmax":
            scores = torch.softmax(logits, dim=-1)
        else:
            scores = scores / (scores.sum(-1, keepdim=True) + _TINY)
        weights = routing.weights
        counted = balanced_choices(routing.choices, scores, self.plan)
        for kind, coefficient in self.plan.balancing:
            loss = self._balancing_loss(kind, scores, counted, sequences)
            weights = self._with_loss(weights, kind, coefficient, loss)
        return routing._replace(weights=weights)

    def _balancing_loss(
        self, kind: str, scores: Tensor, counted_experts: Tensor, sequences: int
    ) -> Tensor:
        """Return this rank's part of the loss: E x sum over E experts of (share x mean score).

        The loss is 1 if all experts get the same number of tokens. The parts of all ranks that
        share the sequences add up to the loss of the micro-batch. The loss over the global batch
        uses the shares of all its micro-batches so far, as in Megatron Core.

        Args:
            kind: "aux_loss" for the loss over all sequences, "seq_aux_loss" for the mean of each
                sequence's loss, "global_aux_loss" for the loss over the global batch.
            scores: Scores of each token, [s b, experts].
            counted_experts: The experts that are counted for each token, int64 [s b, n].
            sequences: Number of interleaved sequences b.
        """
        plan, layout = self.plan, self.layout
        if kind != "seq_aux_loss":
            sequences = 1
        hits = torch.zeros_like(scores).scatter_(1, counted_experts, 1.0)
        hits = hits.unflatten(0, (-1, sequences)).sum(0)  # [sequences, experts]
        hits = all_reduce(all_reduce(hits, layout.context), layout.sequence)
        sums = scores.unflatten(0, (-1, sequences)).sum(0)
        tokens = len(scores) // sequences * layout.context.size * layout.sequence.size
        num_counted = tokens
        if kind == "global_aux_loss":
            hits = self.state.mean_hits(all_reduce(hits, layout.data))
            num_counted *= layout.data.size
        factor = plan.experts / (counted_experts.shape[1] * num_counted * tokens * sequences)
        return (sums * hits).sum() * factor

    def _with_loss(self, x: Tensor, kind: str, coefficient: float, loss: Tensor) -> Tensor:
        """Attach this rank's part of a loss to x, and return x.

        The backward pass of x then also computes the gradients of the loss.
        """
        layout = self.layout
        # Without sequence parallelism, every tensor rank has the same part.
        self.state.add_loss(kind, loss.detach() * layout.sequence.size / layout.tensor.size)
        # Gradients are averaged over context ranks, but the parts add up.
        return attach(x, loss * (coefficient * layout.context.size), self.state.loss_scale)


def within_best_groups(scores: Tensor, plan: RouterPlan) -> Tensor:
    """Return scores [T, experts] with -inf outside each token's best groups.

    A group's score is the sum of its highest expert scores: `plan.group_score` of them, or as many
    as a token chooses from each of its groups.
    """
    scores_per_group = plan.group_score or plan.chosen // plan.groups_chosen
    groups = scores.unflatten(1, (plan.groups, -1))  # [T, groups, experts of a group]
    group_scores = groups.topk(scores_per_group, dim=-1).values.sum(-1)
    best = group_scores.topk(plan.groups_chosen, dim=-1).indices
    is_excluded = torch.ones_like(group_scores, dtype=torch.bool).scatter_(1, best, False)
    return groups.masked_fill(is_excluded.unsqueeze(-1), -math.inf).flatten(1)


def sinkhorn(logits: Tensor) -> Tensor:
    """Return scores [T, experts] that Sinkhorn's algorithm has balanced.

    The scores of every token have the same sum, as do those of every expert. As in Megatron Core,
    iterations end when the experts' scale factors hardly change. The host waits for the device in
    each iteration.

    Args:
        logits: [T, experts].
    """
    # Scaling a row does not change the result.
    scores = torch.exp(logits - logits.amax(-1, keepdim=True))
    tokens, experts = scores.shape
    expert_scales = scores.new_ones(experts)
    for _ in range(_MAX_ITERATIONS):
        token_scales = 1 / (tokens * ((scores * expert_scales).sum(1) + _SMALL))
        previous = expert_scales
        expert_scales = 1 / (experts * ((scores * token_scales.unsqueeze(1)).sum(0) + _SMALL))
        if not (previous - expert_scales).abs().mean() > _CONVERGED:
            break
    return scores * expert_scales * token_scales.unsqueeze(1)


def sample_experts(logits: Tensor, chosen: int, uniform: Tensor) -> Tensor:
    """Return experts chosen with Gumbel noise, as in DeepSpeed, int64 [T, chosen].

    If a token has one expert, it is drawn according to the softmax probabilities. If it has two,
    the first is the best expert and the second is drawn from all others.

    Args:
        logits: [T, experts].
        chosen: 1 or 2.
        uniform: Random numbers from 0 to 1, [T, experts].
    """
    tiny = torch.finfo(uniform.dtype).tiny
    noisy = logits - torch.log(-torch.log(uniform.clamp(min=tiny)))
    if chosen == 1:
        return noisy.argmax(-1, keepdim=True)
    best = logits.argmax(-1, keepdim=True)
    second = noisy.scatter(1, best, -math.inf).argmax(-1, keepdim=True)
    return torch.cat((best, second), dim=1)


def balanced_choices(choices: Tensor, scores: Tensor, plan: RouterPlan) -> Tensor:
    """Return the experts of each token that count toward a balancing loss, int64 [T, n].

    Megatron Core counts the experts with the best scores, regardless of biases and groups.
    DeepSpeed counts the chosen experts, but only the first of two.

    Args:
        choices: The chosen experts, [T, k].
        scores: The scores of all experts without biases, [T, experts].
        plan: The plan of the router.
    """
    if plan.gating is not None:
        return choices[:, :1] if plan.chosen == 2 else choices
    if plan.bias_rate is None and plan.groups == 1 and not plan.sinkhorn:
        return choices  # they have the best scores
    return scores.detach().topk(plan.chosen, dim=-1).indices


def expert_capacity(tokens: int, plan: RouterPlan, *, training: bool = True) -> int | None:
    """Return the largest number of tokens of a rank's micro-batch that an expert keeps.

    Args:
        tokens: Number of tokens in this rank's micro-batch.
        plan: The plan of the router.
        training: Whether the pass is part of training.

    Returns:
        The number, or `None` if no token is dropped.
    """
    factor = plan.capacity
    if not training and plan.eval_capacity is not None:
        factor = plan.eval_capacity
    if factor is None:
        return None
    if plan.gating is None:
        limit = math.ceil(tokens * plan.chosen / plan.experts * factor)
    else:  # DeepSpeed multiplies in fp32, where 10 x 1.1 is exactly 11
        limit = math.ceil(np.float32(tokens / plan.experts) * np.float32(factor * plan.chosen))
    return min(max(limit, plan.min_capacity), tokens)


def selects_randomly(plan: RouterPlan) -> bool:
    """Return whether full experts keep random tokens."""
    return plan.gating is not None and plan.gating.selects_randomly and plan.chosen == 1


def queue_positions(routing: Routing, plan: RouterPlan, random: Tensor | None) -> Tensor:
    """Return each choice's sort key in its expert's queue, fp32 [T, k]. The lowest keys are kept.

    Megatron Core keeps the choices with the highest weights, or the earliest. DeepSpeed's rule
    depends on the number of experts per token. With one it keeps random tokens or the earliest;
    with two it serves first choices in token order, then second choices; with more it keeps the
    highest weights or, if `drops_last`, serves choices in the same order as with two.

    Args:
        routing: The chosen experts and their weights.
        plan: The plan of the router.
        random: Random numbers [T, experts], if full experts keep random tokens.
    """
    choices, weights = routing
    tokens, chosen = choices.shape
    if random is not None:
        return -random.gather(1, choices)
    if not plan.drops_last and (plan.gating is None or chosen > 2):
        return -weights.detach()
    order = torch.arange(tokens, device=choices.device, dtype=torch.float32).unsqueeze(1)
    if plan.gating is None:
        return order.expand(-1, chosen)
    return order + tokens * torch.arange(chosen, device=choices.device)


def drop_choices(routing: Routing, positions: Tensor, limit: int, experts: int) -> Routing:
    """Drop the choices that exceed an expert's limit.

    Args:
        routing: The chosen experts and their weights.
        positions: Each choice's sort key in its expert's queue, fp32 [T, k] (`queue_positions`).
        limit: The largest number of tokens that an expert keeps.
        experts: Number of experts.
    """
    choices, weights = routing
    # Each expert's queue, [T, experts]: lower values are served first, absent tokens last.
    queues = torch.full((len(choices), experts), math.inf, device=choices.device)
    queues.scatter_(1, choices, positions)
    served = queues.argsort(dim=0, stable=True)[:limit]  # [limit, experts]
    is_kept = torch.zeros_like(queues, dtype=torch.bool).scatter_(0, served, True)
    is_kept = is_kept.gather(1, choices)
    return Routing(torch.where(is_kept, choices, -1), torch.where(is_kept, weights, 0.0))
