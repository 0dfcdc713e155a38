"""Linear layers of the experts in a mixture, and their low-rank adapters (LoRA).

The weights of all experts are one tensor [experts, out, in]. Rows are grouped by expert, and each
group is multiplied by its expert's matrix.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.kernels.grouped import (
    GroupedProduct,
    Grouping,
    LibraryGroupedProduct,
    choose_grouped_product,
)
from megatron.parallel.adapter import WHOLE, AdapterPlan
from megatron.parallel.build import BuildContext
from megatron.parallel.linear import DetachedWeight
from megatron.parallel.parameter import ZEROS, Init, Matrices

if TYPE_CHECKING:
    from megatron.parallel.adapter_stack import ExpertAdapterStack

_ALIGNED = 8  # PyTorch's grouped products need rows whose size is a multiple of 16 bytes


class ExpertLinear(nn.Module):
    """A linear layer for each expert, y = x W^T + b, applied to the expert's rows.

    If expert tensor ranks sum their outputs, each rank adds an equal share of the bias. Every rank
    then has a gradient for the bias, and all ranks send their buckets in the same order.

    Args:
        shape: The shape of the weights of all experts, [experts, out, in] or [experts,
            projections, out per projection, in].
        context: The build context.
        split_dim: The dimension that is split over expert tensor ranks.
        init: The distribution of the initial weights.
        bias: Whether each expert has a bias.

    Attributes:
        adapter: An adapter that adds to the output of frozen weights, or a stack of adapters, one
            of which is used for each token; `None` for none.
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
        """Allocate the weights and reserve a slot for their gradient."""
        super().__init__()
        self.adapter: ExpertAdapter | ExpertAdapterStack | None = None
        self.shape, self.split_dim = shape, split_dim
        sums = split_dim == len(shape) - 1
        self.weight = context.new_parameter(
            shape,
            init=init,
            split_dim=split_dim,
            is_expert=True,
            is_matrix=True,
            matrices=Matrices(),
        )
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
        uses = 2 if context.halves_experts else 1
        self._gradient = context.registry.reserve_slot(self.weight, uses=uses)
        self._queue = context.weight_gradients

    def forward(
        self, rows: Tensor, grouping: Grouping, later: list[Callable[[], None]] | None = None
    ) -> Tensor:
        """Multiply each expert's rows: [n, in] -> [n, out].

        Args:
            rows: The rows of all experts.
            grouping: How the rows are grouped by expert.
            later: A list of functions that will be called after this layer's backward pass, to
                which the layer adds the computation of its weight gradient, unless the queue defers
                it or autograd computes it. With `None`, the layer's backward pass computes it,
                unless the queue defers it.
        """
        weight, detached = self.weight.view(self._shape), None
        if self._queue is not None or self._gradient.slot is not None:
            detached = DetachedWeight(self.weight, self._queue, self._gradient.slot)
            weight = weight.detach()
            if not rows.requires_grad and torch.is_grad_enabled():
                rows = rows.detach().requires_grad_()  # backward must reach the product
        out: Tensor = _GroupedProduct.apply(rows, weight, grouping, self._product, detached, later)
        added = None if self.adapter is None else self.adapter(rows, grouping)
        if added is not None:
            out = out + added
        if self.bias is None:
            return out
        # Rows without an expert read a row of zeros, which drops their arbitrary gradients.
        biases = F.pad(self.bias.view(self._shape[:-1]), (0, 0, 0, 1))
        if self._bias_share < 1:
            biases = biases * self._bias_share
        return out + biases[grouping.expert_of_row()]


class ExpertAdapterWeights(nn.Module):
    """The weights of all experts' adapters: a [experts, rank, in], b [experts, out, rank].

    If expert tensor ranks split the input features, each rank multiplies its shard of the input by
    its shard of A, and the result by the whole B. The sum over ranks after the layer then includes
    the adapters.

    Args:
        linear: The layer to adapt.
        plan: The settings of the adapters.
        context: The layer's build context.
    """

    def __init__(self, linear: ExpertLinear, plan: AdapterPlan, context: BuildContext) -> None:
        """Allocate the weights. B starts at zero, so the adapters' outputs are zero at first."""
        super().__init__()
        experts, *outputs, inputs = linear.shape
        is_row = linear.split_dim == len(linear.shape) - 1
        is_divided = context.layout.expert_tensor.size > 1
        self.a = context.new_parameter(
            (experts, plan.rank, inputs),
            init=Init("uniform", 1 / math.sqrt(inputs)),  # as in PEFT and `AdapterWeights`
            split_dim=2 if is_row else None,
            partial_gradient=not is_row and is_divided,
            is_expert=True,
            matrices=Matrices(),
        )
        self.b = context.new_parameter(
            (experts, *outputs, plan.rank),
            init=ZEROS,
            split_dim=None if is_row else linear.split_dim,
            partial_gradient=is_row and is_divided,
            is_expert=True,
            matrices=Matrices(),
        )


class ExpertAdapter(nn.ModuleDict):
    """The adapters of the experts in an `ExpertLinear`.

    Each expert has its own A and B, as in PEFT. The gate and up projections share them.

    Args:
        linear: The layer to adapt.
        plan: The settings of the adapters. Dropout and DoRA are not supported.
        context: The layer's build context.
    """

    def __init__(self, linear: ExpertLinear, plan: AdapterPlan, context: BuildContext) -> None:
        """Allocate the weights."""
        super().__init__({WHOLE: ExpertAdapterWeights(linear, plan, context)})
        self.plan = plan
        self._experts = len(linear.weight)
        self._product = choose_grouped_product(
            context.device, context.compute_dtype, context.kernels.library
        )
        # Zeros pad the rank to a multiple that the product supports.
        is_library = isinstance(self._product, LibraryGroupedProduct)
        self._padding = -plan.rank % _ALIGNED if is_library else 0

    def forward(self, rows: Tensor, grouping: Grouping) -> Tensor:
        """Return the outputs of the adapters for each expert's rows: [n, in] -> [n, out].

        Args:
            rows: The rows of all experts.
            grouping: How the rows are grouped by expert.
        """
        a, b = self._matrices()
        if self._padding:
            a, b = F.pad(a, (0, 0, 0, self._padding)), F.pad(b, (0, self._padding))
        low: Tensor = _GroupedProduct.apply(rows, a, grouping, self._product, None, None)
        scaled = low * self.plan.scale
        out: Tensor = _GroupedProduct.apply(scaled, b, grouping, self._product, None, None)
        return out

    @torch.no_grad()
    def merged(self, weight: Tensor) -> Tensor:
        """Return the frozen weight merged with the adapters, in fp32 and in the weight's shape.

        Args:
            weight: The frozen weight.
        """
        a, b = self._matrices()
        return weight.float() + self.plan.scale * (b.float() @ a.float()).view(weight.shape)

    @torch.no_grad()
    def inference_matrices(self, weight: Tensor) -> tuple[Tensor, Tensor, None]:
        """Return A [experts, rank, in] and the scaled B [experts, out, rank], for inference.

        Args:
            weight: The frozen weight.
        """
        a, b = self._matrices()
        return a, (self.plan.scale * b.float()).to(b.dtype), None

    def _matrices(self) -> tuple[Tensor, Tensor]:
        """Return A [experts, rank, in] and B [experts, out, rank]."""
        weights = self[WHOLE]
        assert isinstance(weights, ExpertAdapterWeights)
        # ZeRO stage 3 stores the weights as matrices.
        a = weights.a.view(self._experts, self.plan.rank, -1)
        return a, weights.b.view(self._experts, -1, self.plan.rank)


class _GroupedProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        grouping: Grouping,
        product: GroupedProduct,
        detached: DetachedWeight | None,
        later: list[Callable[[], None]] | None,
    ) -> Tensor:
        out, operand = product.forward(rows, weight, grouping.ends)
        ctx.save_for_backward(rows, grouping.ends, *operand)
        ctx.product, ctx.detached, ctx.later = product, detached, later
        ctx.like = weight.shape, weight.dtype
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, ends, *operand = ctx.saved_tensors
        product: GroupedProduct = ctx.product
        shape, dtype = ctx.like
        detached: DetachedWeight | None = ctx.detached
        grad = grad.contiguous()
        input_grad = weight_grad = None
        if ctx.needs_input_grad[0]:
            input_grad = product.input_gradient(grad, tuple(operand), ends)
        if detached is not None and detached.weight.requires_grad:
            detached.accept(_WeightGradient(product, grad, rows, ends, shape), ctx.later)
        elif ctx.needs_input_grad[1]:
            weight_grad = grad.new_empty(shape, dtype=dtype)
            product.weight_gradient(grad, rows, ends, weight_grad, accumulate=False)
        return input_grad, weight_grad, None, None, None, None


class _WeightGradient:
    """The product for the weight gradients of all experts, which has not been computed yet."""

    def __init__(
        self, product: GroupedProduct, grad: Tensor, rows: Tensor, ends: Tensor, shape: torch.Size
    ) -> None:
        self._product, self._operands, self._shape = product, (grad, rows, ends), shape

    def start(self) -> None:
        """Do nothing, because both operands are on this process."""

    def compute(self, into: Tensor, *, accumulate: bool) -> None:
        """Write the gradient to `into` [experts * out, in], or add it if `accumulate`."""
        into = into.view(self._shape)
        self._product.weight_gradient(*self._operands, into, accumulate=accumulate)
