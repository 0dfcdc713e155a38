"""Mixtures of experts (Shazeer et al., 2017): each token passes through a few of many MLPs.

Shapes: s sequence, b micro-batch, h hidden, T = s b tokens, k experts of a token, f inner width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.kernels.grouped import (
    GroupedProduct,
    Grouping,
    choose_grouped_product,
    collect,
    spread,
)
from megatron.models.mlp import MLP
from megatron.models.plan import (
    MicroBatch,
    MixturePlan,
    MLPPlan,
    WeightSplit,
    Work,
)
from megatron.models.recompute import computed_again, without_keeping
from megatron.models.router import Router, Routing, capacity
from megatron.parallel.build import BuildContext
from megatron.parallel.expert_exchange import ExpertExchange
from megatron.parallel.linear import Owner
from megatron.parallel.parameter import ZEROS, Init


class Mixture(nn.Module):
    """A mixture of experts in place of a layer's MLP.

    Args:
        plan: The record of its sizes.
        context: Layout, device, kernels and number formats.
    """

    bias_to_add = None

    def __init__(self, plan: MixturePlan, context: BuildContext) -> None:
        """Build the router, the experts and the shared experts."""
        super().__init__()
        self.router = Router(plan.router, context)
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

        The matrices of all its experts are stacked.
        """
        held = plan.router.experts // split.expert
        each = MLP.matrices(plan.expert, split.of_experts)
        shared = [] if plan.shared is None else MLP.matrices(plan.shared, split)
        return [(held * outputs, inputs) for outputs, inputs in each] + shared

    @staticmethod
    def vectors(plan: MixturePlan, split: WeightSplit) -> int:
        """Count the parameters of router, gate and biases on one process."""
        held = plan.router.experts // split.expert
        count = plan.router.experts * plan.hidden
        count += held * MLP.vectors(plan.expert, split.of_experts)
        if plan.shared is not None:
            count += MLP.vectors(plan.shared, split) + plan.hidden * plan.gates_shared
            count += 2 * (plan.hidden + 1) * plan.weighs_shared
        return count

    @staticmethod
    def expert_parameters(plan: MixturePlan, split: WeightSplit) -> int:
        """Count the parameters of the experts on one process, without the shared experts."""
        matrices = MLP.matrices(plan.expert, split.of_experts)
        each = sum(outputs * inputs for outputs, inputs in matrices)
        held = plan.router.experts // split.expert
        return held * (each + MLP.vectors(plan.expert, split.of_experts))

    @staticmethod
    def work(plan: MixturePlan, length: int, encoder_length: int) -> Work:
        """Count the operations: those of the experts that a token passes through, not of all."""
        router, gate = plan.router, plan.gates_shared + 2 * plan.weighs_shared
        products = 6 * length * plan.hidden * (router.experts + gate)
        products += router.chosen * MLP.work(plan.expert, length, encoder_length).products
        if plan.shared is not None:
            products += MLP.work(plan.shared, length, encoder_length).products
        return Work(products)

    @staticmethod
    def activation_bytes(plan: MixturePlan, batch: MicroBatch) -> int:
        """Count the bytes of the scores, and of each row's input, activation and output.

        A process receives `batch.imbalance` times as many rows as it sends, which is 1 if all
        experts get equally many.
        """
        router, forgotten = plan.router, batch.recomputed
        scores = 4 * batch.tokens // batch.sequence * 3 * router.experts
        # Each of the ranks that split an expert has the rows of all these ranks.
        rows = int(batch.expert_tokens * router.chosen * batch.imbalance)
        inner = plan.expert.up + (0 if "moe_act" in forgotten else plan.expert.inner)
        elements = inner // batch.expert_tensor + 2 * plan.hidden
        shared = 0
        if plan.shared is not None and "shared_experts" not in forgotten:
            shared = MLP.activation_bytes(plan.shared, batch)
        return scores + batch.width * rows * elements + shared

    @staticmethod
    def largest_imbalance(plan: MixturePlan, ranks: int, tokens: int) -> float:
        """Return the rows of a process whose experts all tokens choose, in even shares.

        Args:
            plan: The record of the mixture.
            ranks: Number of processes that divide the experts.
            tokens: Tokens that a process routes at once.
        """
        router = plan.router
        largest = ranks * min(router.experts // ranks, router.chosen) / router.chosen
        limit = capacity(tokens, router)
        if limit is None:
            return largest
        return min(largest, max(router.experts * limit / (tokens * router.chosen), 1.0))

    def forward(self, x: Tensor) -> Tensor:
        """Map [s, b, h] to [s, b, h]."""
        routing: Routing = self.router(x)
        out: Tensor = self.experts(x.flatten(0, 1), routing).view_as(x)
        if self.shared is not None:
            shared = computed_again(self.shared, x) if self.recomputes_shared else self.shared(x)
            if self.coefficient is not None:
                of_experts, of_shared = self.coefficient(x).unbind(-1)
                return out * of_experts.unsqueeze(-1) + shared * of_shared.unsqueeze(-1)
            if self.shared_gate is not None:
                shared = shared * torch.sigmoid(F.linear(x, self.shared_gate))
            out = out + shared
        return out


class Coefficient(nn.Module):
    """The weights of a token's experts and of the MLP beside them: a softmax of two scores.

    Args:
        plan: The record of the mixture.
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
        """Map [s, b, h] to the weights of the experts and of the MLP, [s, b, 2], whose sum is 1."""
        scores = F.linear(x, self.weight, self.bias)
        return torch.softmax(scores.float(), dim=-1).to(x.dtype)


class Experts(nn.Module):
    """Many MLPs of one shape, each of which sees its own tokens.

    Args:
        plan: The record of one expert.
        experts: Number of experts.
        context: Device, kernels and number formats.
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
        self.activation = context.kernels.activation(plan.activation)
        self.recomputes_activation = "moe_act" in context.recomputed
        self._library = context.kernels.library
        self._exchange = ExpertExchange(context.layout, experts, self._library)

    def forward(self, tokens: Tensor, routing: Routing) -> Tensor:
        """Return the weighted sum of each token's experts: [T, h] -> [T, h].

        Collective over the processes that divide the experts.
        """
        arrived = self._exchange.send(tokens, *routing)
        grouping = Grouping.of(arrived.choices, self._exchange.local, arrived.rows)
        rows = spread(arrived.tokens, grouping, self._library)  # [n, h]
        before = self.up(rows, grouping)  # [n, f], or [n, 2 f] if gated
        inner = self.activation(before)  # [n, f]
        if self.recomputes_activation and torch.is_grad_enabled():
            kept = before.detach()
            with without_keeping(inner, lambda: self.activation(kept)):
                outputs = self.down(inner, grouping)  # [n, h]
        else:
            outputs = self.down(inner, grouping)
        outputs = collect(outputs, arrived.weights, grouping, self._library)  # [R, h]
        return self._exchange.bring_back(outputs, arrived)


class ExpertLinear(nn.Module):
    """A linear layer for each expert, y = x W^T + b on the expert's rows.

    If expert tensor ranks sum their outputs, each rank adds an equal share of the bias. The bias
    then has a gradient on every rank, and all ranks send their buckets in the same order.

    Args:
        shape: Shape of all weights: experts, outputs (or parts and outputs of a part), inputs.
        context: Layout, device, kernels and number formats.
        split_dim: The dimension that is split over expert tensor ranks.
        init: Distribution of the initial weights.
        bias: Whether each expert has a bias.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        context: BuildContext,
        *,
        split_dim: int,
        init: Init,
        bias: bool,
    ) -> None:
        """Allocate the weights and reserve their gradient's slot."""
        super().__init__()
        sums = split_dim == len(shape) - 1
        self.weight = context.new_parameter(shape, init=init, split_dim=split_dim, is_expert=True)
        local, *_, inputs = self.weight.shape
        self._shape = (local, -1, inputs)  # [experts, out, in]
        self.bias = None
        if bias:
            self.bias = context.new_parameter(
                shape[:-1],
                init=ZEROS,
                split_dim=None if sums else split_dim,
                partial_gradient=sums and context.layout.expert_tensor.size > 1,
                is_expert=True,
            )
        self._bias_share = 1 / context.layout.expert_tensor.size if sums else 1.0
        self._product = choose_grouped_product(
            context.device,
            context.compute_dtype,
            context.kernels.library,
            context.kernels.expert_casts,
        )
        context.registry.add_products(self.weight, self._product)
        self._gradient = context.registry.reserve_slot(self.weight)
        self._queue = context.weight_gradients

    def forward(self, rows: Tensor, grouping: Grouping) -> Tensor:
        """Multiply each expert's rows: [n, in] -> [n, out]."""
        weight, owner = self.weight.view(self._shape), None
        if self._queue is not None or self._gradient.slot is not None:
            owner = Owner(self.weight, self._queue, self._gradient.slot)
            weight = weight.detach()
            if not rows.requires_grad and torch.is_grad_enabled():
                rows = rows.detach().requires_grad_()  # backward must reach the product
        out: Tensor = _GroupedProduct.apply(rows, weight, grouping, self._product, owner)
        if self.bias is None:
            return out
        # Rows without an expert take a row of zeros, so their gradients, which may be any values,
        # are dropped.
        biases = F.pad(self.bias.view(self._shape[:-1]), (0, 0, 0, 1))
        if self._bias_share < 1:
            biases = biases * self._bias_share
        return out + biases[grouping.expert_of_row()]


class _GroupedProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        grouping: Grouping,
        product: GroupedProduct,
        owner: Owner | None,
    ) -> Tensor:
        out, factors = product.forward(rows, weight, grouping.ends)
        ctx.save_for_backward(rows, grouping.ends, *factors)
        ctx.product, ctx.owner, ctx.like = product, owner, (weight.shape, weight.dtype)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, ends, *factors = ctx.saved_tensors
        product: GroupedProduct = ctx.product
        shape, dtype = ctx.like
        owner: Owner | None = ctx.owner
        grad = grad.contiguous()
        input_grad = weight_grad = None
        if ctx.needs_input_grad[0]:
            input_grad = product.input_gradient(grad, tuple(factors), ends)
        if owner is not None and owner.weight.requires_grad:
            owner.take(_WeightGradient(product, grad, rows, ends, shape))
        elif ctx.needs_input_grad[1]:
            weight_grad = grad.new_empty(shape, dtype=dtype)
            product.weight_gradient(grad, rows, ends, weight_grad, accumulate=False)
        return input_grad, weight_grad, None, None, None


class _WeightGradient:
    """The product that gives all experts' weight gradients, still to be computed."""

    def __init__(
        self, product: GroupedProduct, grad: Tensor, rows: Tensor, ends: Tensor, shape: torch.Size
    ) -> None:
        self._product, self._factors, self._shape = product, (grad, rows, ends), shape

    def start(self) -> None:
        """Do nothing: both factors are here."""

    def compute(self, into: Tensor, *, accumulate: bool) -> None:
        """Write the gradient to `into` [experts out, in], or add it."""
        into = into.view(self._shape)
        self._product.weight_gradient(*self._factors, into, accumulate=accumulate)
