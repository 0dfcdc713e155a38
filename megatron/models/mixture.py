"""Mixtures of experts (Shazeer et al., 2017): each token passes through a few of many MLPs.

Shapes: s sequence, b micro-batch, h hidden, T = s b tokens, k experts of a token, f inner width.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.kernels.grouped import combine
from megatron.models.costs import Flops, MicroBatch, WeightSplit
from megatron.models.mixture_plan import MixturePlan
from megatron.models.mlp import MLP
from megatron.models.plan import MLPPlan
from megatron.models.recompute import checkpointed, discarding_output
from megatron.models.router import Router, Routing, expert_capacity
from megatron.parallel.build import BuildContext
from megatron.parallel.expert_exchange import DispatchedTokens, ExpertExchange
from megatron.parallel.expert_linear import ExpertLinear
from megatron.parallel.parameter import ZEROS


class Mixture(nn.Module):
    """A mixture of experts in place of a layer's MLP.

    Args:
        plan: The plan of this layer.
        context: Layout, device, kernels and number formats.
    """

    bias_to_add = None

    def __init__(self, plan: MixturePlan, context: BuildContext) -> None:
        """Build the router, the experts and, if the plan has them, the shared experts."""
        super().__init__()
        self.router = Router(plan.router, context)
        router, library = plan.router, context.kernels.library
        self._exchange = ExpertExchange(
            context.layout, router.experts, router.chosen, library, context.expert_exchange
        )
        self._halves, self._weighs_input = context.halves_experts, plan.weighs_input
        self.experts = Experts(plan.expert, plan.router.experts, context)
        self.shared = None if plan.shared is None else MLP(plan.shared, context)
        self.recomputes_shared = "shared_experts" in context.recomputed
        self.shared_gate = None
        if plan.gates_shared:
            self.shared_gate = context.new_parameter(
                (1, plan.hidden),
                init=plan.init.weight(plan.hidden, 1),
                partial_gradient=context.layout.sequence.size > 1,
            )
        self.coefficient = Coefficient(plan, context) if plan.weighs_shared else None

    @staticmethod
    def matrices(plan: MixturePlan, split: WeightSplit) -> list[tuple[int, int]]:
        """Return (outputs, inputs) of each weight matrix on one process.

        The matrices of all experts are counted as one stacked matrix.
        """
        local_experts = plan.router.experts // split.expert
        expert_shapes = MLP.matrices(plan.expert, split.of_experts)
        shared = [] if plan.shared is None else MLP.matrices(plan.shared, split)
        return [(local_experts * outputs, inputs) for outputs, inputs in expert_shapes] + shared

    @staticmethod
    def vectors(plan: MixturePlan, split: WeightSplit) -> int:
        """Count the parameters of the router, the biases, and the gate or coefficient."""
        local_experts = plan.router.experts // split.expert
        count = plan.router.experts * (plan.hidden + plan.router.bias)
        count += local_experts * MLP.vectors(plan.expert, split.of_experts)
        if plan.shared is not None:
            count += MLP.vectors(plan.shared, split) + plan.hidden * plan.gates_shared
            count += 2 * (plan.hidden + 1) * plan.weighs_shared
        return count

    @staticmethod
    def expert_parameters(plan: MixturePlan, split: WeightSplit) -> int:
        """Count the parameters of the experts on one process, excluding the shared experts."""
        matrices = MLP.matrices(plan.expert, split.of_experts)
        per_expert = sum(outputs * inputs for outputs, inputs in matrices)
        local_experts = plan.router.experts // split.expert
        return local_experts * (per_expert + MLP.vectors(plan.expert, split.of_experts))

    @staticmethod
    def flops(plan: MixturePlan, length: int, encoder_length: int) -> Flops:
        """Count the FLOPs of the router, and of the experts that a token passes through."""
        router, gate = plan.router, plan.gates_shared + 2 * plan.weighs_shared
        products = 6 * length * plan.hidden * (router.experts + gate)
        products += router.chosen * MLP.flops(plan.expert, length, encoder_length).products
        if plan.shared is not None:
            products += MLP.flops(plan.shared, length, encoder_length).products
        return Flops(products)

    @staticmethod
    def activation_bytes(plan: MixturePlan, batch: MicroBatch) -> int:
        """Count the bytes of the scores and of each row's input, activation and output.

        The bytes that the shared experts keep are included. A process receives `batch.imbalance`
        times as many rows as it sends. The imbalance is 1 if all experts get the same number of
        rows.
        """
        router, recomputed = plan.router, batch.recomputed
        scores = 4 * batch.tokens // batch.sequence * 3 * router.experts
        # Each rank that splits an expert holds the rows of all the ranks that split it.
        rows = int(batch.expert_tokens * router.chosen * batch.imbalance)
        inner = plan.expert.up + (0 if "moe_act" in recomputed else plan.expert.inner)
        elements = inner // batch.expert_tensor + 2 * plan.hidden
        shared = 0
        if plan.shared is not None and "shared_experts" not in recomputed:
            shared = MLP.activation_bytes(plan.shared, batch)
        return scores + batch.width * rows * elements + shared

    @staticmethod
    def largest_imbalance(plan: MixturePlan, ranks: int, tokens: int) -> float:
        """Return the imbalance that results if all tokens choose the experts of a single process.

        Tokens beyond the experts' capacity, if it is limited, are not counted.

        Args:
            plan: The plan of the mixture.
            ranks: Number of expert-parallel processes.
            tokens: Number of tokens that a process routes in one pass.
        """
        router = plan.router
        largest = ranks * min(router.experts // ranks, router.chosen) / router.chosen
        limit = expert_capacity(tokens, router)
        if limit is None:
            return largest
        return min(largest, max(router.experts * limit / (tokens * router.chosen), 1.0))

    def forward(self, x: Tensor) -> Tensor:
        """Return the combined outputs of each token's experts, [s, b, h], for x [s, b, h]."""
        routing: Routing = self.router(x)
        wait = self._run_experts(x.flatten(0, 1), routing)
        if self.shared is None:
            return wait().view_as(x)
        # The shared experts compute while the outputs of the other experts are sent.
        shared = checkpointed(self.shared, x) if self.recomputes_shared else self.shared(x)
        out = wait().view_as(x)
        if self.coefficient is not None:
            expert_weight, shared_weight = self.coefficient(x).unbind(-1)
            return out * expert_weight.unsqueeze(-1) + shared * shared_weight.unsqueeze(-1)
        if self.shared_gate is not None:
            shared = shared * torch.sigmoid(F.linear(x, self.shared_gate))
        return out + shared

    def _run_experts(self, tokens: Tensor, routing: Routing) -> Callable[[], Tensor]:
        """Pass tokens [T, h] through their experts. Return a function that waits for the outputs.

        With two halves, the second half's tokens are sent while the first half is computed, and the
        first half's outputs are sent while the second half is computed.
        """
        if self._weighs_input:
            choices, weights = routing
            tokens = (tokens * weights).to(tokens.dtype)
            routing = routing._replace(weights=(choices >= 0).to(weights.dtype))
        halves = 2 if self._halves and self.training else 1
        parts = zip(*(x.tensor_split(halves) for x in (tokens, *routing)), strict=True)
        # Samples for training have the same length on all processes.
        received = [self._exchange.dispatch(*part, equal_counts=self.training) for part in parts]
        waits = [self._exchange.combine(self.experts(rows), rows) for rows in received]
        return waits[0] if halves == 1 else lambda: torch.cat([wait() for wait in waits])


class Coefficient(nn.Module):
    """The learned weights of a token's experts and of its shared MLP: a softmax of two scores.

    Args:
        plan: The plan of the mixture.
        context: Layout, device and number formats.
    """

    def __init__(self, plan: MixturePlan, context: BuildContext) -> None:
        """Allocate a linear layer with two outputs."""
        super().__init__()
        is_partial = context.layout.sequence.size > 1
        self.weight = context.new_parameter(
            (2, plan.hidden), init=plan.init.weight(plan.hidden, 2), partial_gradient=is_partial
        )
        self.bias = context.new_parameter((2,), init=ZEROS, partial_gradient=is_partial)

    def forward(self, x: Tensor) -> Tensor:
        """Map [s, b, h] to the weights of experts and MLP, [s, b, 2], which add up to 1."""
        scores = F.linear(x, self.weight, self.bias)
        return torch.softmax(scores.float(), dim=-1).to(x.dtype)


class Experts(nn.Module):
    """Many MLPs of the same shape, each of which processes its own tokens.

    Args:
        plan: The plan of one expert.
        experts: Number of experts.
        context: Layout, device, kernels and number formats.
    """

    def __init__(self, plan: MLPPlan, experts: int, context: BuildContext) -> None:
        """Allocate the matrices of all experts."""
        super().__init__()
        up = (2, plan.inner) if plan.gated else (plan.inner,)
        self.up = ExpertLinear(
            (experts, *up, plan.hidden),
            context,
            split_dim=len(up),
            init=plan.init.weight(plan.hidden, plan.up),
            bias=plan.bias,
        )
        self.down = ExpertLinear(
            (experts, plan.hidden, plan.inner),
            context,
            split_dim=2,
            init=plan.init.weight(plan.inner, plan.hidden, into_residual=True),
            bias=plan.bias,
        )
        self.activation = context.kernels.activation(
            plan.activation, clamp=plan.clamp, offset=plan.offset
        )
        self.recomputes_activation = "moe_act" in context.recomputed
        self.offloading_rows = context.offloading("expert_fc1")
        self.offloading_inner = context.offloading("moe_act")
        self._library, self._local = context.kernels.library, experts // context.layout.expert.size

    def forward(self, received: DispatchedTokens) -> Tensor:
        """Return the weighted sum of the local experts' outputs for each of R tokens, [R, h]."""
        rows, grouping = received.rows(self._local, self._library)  # [n, h]
        with self.offloading_rows():
            pre_activation = self.up(
                rows, grouping, received.deferred_work
            )  # [n, f], or [n, 2 f] if gated
        with self.offloading_inner():
            inner = self.activation(pre_activation)  # [n, f]
        if self.recomputes_activation and torch.is_grad_enabled():
            saved = pre_activation.detach()
            with discarding_output(inner, lambda: self.activation(saved)):
                outputs = self.down(inner, grouping)  # [n, h]
        else:
            outputs = self.down(inner, grouping)
        return combine(outputs, received.weights, grouping, self._library)
