"""Low-rank adapters for linear layers with frozen weights (LoRA, Hu et al., 2021).

    y = x W^T + scale (dropout(x) A^T) B^T        A [rank, in], B [out, rank]

With DoRA (Liu et al., 2024), every row of W + scale B A is divided by its norm and multiplied by a
trained magnitude. The backward pass treats the norm as a constant, as in PEFT.

The weight of a layer may contain several projections (queries, keys and values). Each projection
has its own A and B, as in PEFT, but projections that are a single module in Hugging Face models
share one A and one B. All projections are computed together: the A matrices are stacked, and the B
matrices are blocks of a matrix with as many rows as the weight.

With tensor parallelism, a column-parallel layer has whole A matrices and splits its B matrices like
its weight; low-rank products are gathered along the sequence. A row-parallel layer splits its A
matrices like its weight and has whole B matrices; low-rank products are summed over the ranks.
Ranks therefore exchange only vectors of `rank` elements, and all products equal those of a single
process.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron.parallel.buckets import row_shards
from megatron.parallel.build import BuildContext
from megatron.parallel.collectives import all_reduce, copy_to, gather_rows_to
from megatron.parallel.layers import Projections, Split, sum_over_ranks
from megatron.parallel.parameter import ONES, ZEROS, Init, Matrices
from megatron.parallel.quantized import unpacked
from megatron.parallel.random import split_region

if TYPE_CHECKING:
    from megatron.parallel.adapter_stack import AdapterStack

WHOLE = "weight"  # the name of the projection in layers with a single projection


@dataclass(frozen=True)
class AdapterPlan:
    """The settings of an adapter.

    Attributes:
        rank: The rank of the product B A.
        scale: The factor by which the adapter's output is multiplied.
        dropout: The dropout probability of the adapter's input.
        is_dora: Whether the magnitude of each row of the weight is trained separately (DoRA).
    """

    rank: int
    scale: float
    dropout: float = 0.0
    is_dora: bool = False


class AdaptedLayer(Protocol):
    """The attributes of a layer that its adapter needs, as in `Linear`."""

    in_features: int
    out_features: int
    split: Split | None
    adapted_as: Projections | None
    adapter: Adapter | AdapterStack | None


class AdapterWeights(nn.Module):
    """The weights of one projection's adapter: a [rank, in], b [out, rank], magnitude [out].

    Args:
        linear: The layer to adapt.
        out_features: The number of output features of the whole projection.
        plan: The settings of the adapter.
        context: The layer's build context.
    """

    def __init__(
        self, linear: AdaptedLayer, out_features: int, plan: AdapterPlan, context: BuildContext
    ) -> None:
        """Allocate the weights. B starts at zero, so the adapter's output is zero at first."""
        super().__init__()
        is_divided = context.layout.sequence.size > 1
        is_row, is_column = linear.split == "row", linear.split == "column"
        # Kaiming's uniform distribution with a = sqrt(5), as in PEFT.
        self.a = context.new_parameter(
            (plan.rank, linear.in_features),
            init=Init("uniform", 1 / math.sqrt(linear.in_features)),
            split_dim=1 if is_row else None,
            partial_gradient=not is_row and is_divided,
            matrices=Matrices(),
        )
        self.b = context.new_parameter(
            (out_features, plan.rank),
            init=ZEROS,
            split_dim=0 if is_column else None,
            partial_gradient=not is_column and is_divided,
            matrices=Matrices(),
        )
        self.magnitude = None
        if plan.is_dora:
            self.magnitude = context.new_parameter(
                (out_features,),
                init=ONES,  # replaced by `start` once the frozen weights are known
                split_dim=0 if is_column else None,
                partial_gradient=not is_column and is_divided,
            )


class Adapter(nn.ModuleDict):
    """The adapter of a linear layer: the weights of each adapted projection, by name.

    Args:
        linear: The layer to adapt.
        names: The names of the projections to adapt; `WHOLE` if the layer has only one.
        plan: The settings of the adapter.
        context: The layer's build context.
        site: The name of the layer, from which the adapter's dropout mask is derived.
    """

    def __init__(
        self,
        linear: AdaptedLayer,
        names: Sequence[str],
        plan: AdapterPlan,
        context: BuildContext,
        site: str,
    ) -> None:
        """Allocate the weights of the projections."""
        projections = linear.adapted_as or Projections((WHOLE,), (linear.out_features,))
        super().__init__(
            {
                name: AdapterWeights(linear, width, plan, context)
                for name, width in zip(projections.names, projections.widths, strict=True)
                if name in names
            }
        )
        self.plan, self.site, self.split = plan, site, linear.split
        self.layout = layout = context.layout
        self.dtype = context.compute_dtype
        # The structure of the weight's rows on this rank: the number of groups, and the number of
        # rows per group of each projection.
        ranks = layout.tensor.size if linear.split == "column" else 1
        self.groups = max(1, (projections.groups or 1) // ranks)
        self.rows = {
            name: width // ranks // self.groups
            for name, width in zip(projections.names, projections.widths, strict=True)
        }

    def product(self, x: Tensor, weight: Tensor) -> Tensor | None:
        """Return the layer's output [s, b, out] without a bias, on a single tensor rank.

        In training with dropout, this returns `None`: dropout applies only to the adapter's input,
        so its products must be computed separately from the product with the frozen weight.

        Args:
            x: The layer's input [s, b, in].
            weight: The frozen weight [..., out, in].
        """
        if self.plan.dropout > 0 and self.training:
            return None
        a, b = self._joined_a(), self._joined_b()
        out: Tensor = _AdaptedProduct.apply(x, weight.flatten(0, -2), a, b, self.plan.scale)
        return self._with_magnitudes(out, weight, b)

    def project_down(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Multiply the layer's input by the A matrices.

        Args:
            x: The layer's input [s, b, in], as in `Linear.forward`.

        Returns:
            The input for the product with the frozen weight, and the low-rank product for
            `add_product`, [s, b, ranks], where ranks is the sum of the adapters' ranks.
        """
        plan, tensor = self.plan, self.layout.tensor
        a = self._joined_a()
        if plan.dropout > 0 and self.training:
            # Each rank's shard of x gets its own dropout mask, unless every rank has the whole x.
            axis = tensor if self.split == "row" else self.layout.sequence
            with split_region(axis, x.device, self.site):
                low = F.linear(F.dropout(x, plan.dropout), a)
        else:
            x, low = _DownProduct.apply(x, a)
        low = low * plan.scale
        if self.split == "row" and tensor.size > 1:
            low = sum_over_ranks(low, self.layout)
        elif self.split == "column":
            gather = gather_rows_to if self.layout.sequence_parallel else copy_to
            low = gather(low, tensor)
        return x, low

    def add_product(self, low: Tensor, out: Tensor, weight: Tensor) -> Tensor:
        """Add the adapter's output to the frozen weight's output; with DoRA, also scale the sum.

        Args:
            low: The low-rank product that `project_down` returned.
            out: The product with the frozen weight, without a bias, [s, b, out]. It may be changed
                in place.
            weight: The frozen weight [..., out, in].
        """
        b = self._joined_b()
        return self._with_magnitudes(_AddProduct.apply(out, low, b), weight, b)

    def _with_magnitudes(self, out: Tensor, weight: Tensor, b: Tensor) -> Tensor:
        """Scale `out`, for DoRA, as if the rows of W + scale B A had the trained magnitudes."""
        if not self.plan.is_dora:
            return out
        with torch.no_grad():
            norms = self._row_norms(weight, self._joined_a(), b)
        return out * (self._magnitudes(norms) / norms).to(out.dtype)

    @torch.no_grad()
    def start(self, weight: Tensor) -> None:
        """Set the trained magnitudes to the norms of the frozen weight's rows. Collective.

        Args:
            weight: The frozen weight. In ZeRO stage 3, the weight and the magnitudes are sharded.
        """
        from torch.distributed.tensor import DTensor  # takes 0.5 s; not needed without adapters

        if isinstance(weight, DTensor):
            weight = weight.full_tensor().to(self.dtype)
        matrix = weight.flatten(0, -2)
        squares = torch.linalg.vector_norm(matrix, dim=1, dtype=torch.float32).square_()
        norms = self._over_inputs(squares).sqrt_()
        for name, part in self.by_projection(norms).items():
            magnitude = self._weights_of(name).magnitude if name in self else None
            if isinstance(magnitude, DTensor):
                mesh, rows = magnitude.device_mesh, part.numel()
                own = row_shards(rows, rows, mesh.size())[mesh.get_local_rank()]
                magnitude.to_local().copy_(own.of(part.flatten()))
            elif magnitude is not None:
                magnitude.copy_(part.flatten())

    def delta_weight(self, dtype: torch.dtype) -> Tensor:
        """Return the matrix [out, in] that the adapter adds to the weight, ignoring DoRA.

        Args:
            dtype: The data type in which to compute the matrix.
        """
        return self.plan.scale * (self._joined_b().to(dtype) @ self._joined_a().to(dtype))

    @torch.no_grad()
    def merged(self, weight: Tensor) -> Tensor:
        """Return the frozen weight merged with the adapter, in fp32 and in the weight's shape.

        Collective with DoRA.

        Args:
            weight: The frozen weight.
        """
        whole, a, b = weight.float(), self._joined_a().float(), self._joined_b().float()
        matrix = whole.flatten(0, -2) + self.plan.scale * (b @ a)
        if self.plan.is_dora:
            norms = self._row_norms(whole, a, b)
            matrix *= (self._magnitudes(norms) / norms)[:, None]
        return matrix.view(weight.shape)

    @torch.no_grad()
    def inference_matrices(self, weight: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the matrices of all projections together, for inference. Collective with DoRA.

        Args:
            weight: The frozen weight.

        Returns:
            A [ranks, in], the scaled B [out, ranks], and the factor by which DoRA multiplies each
            row of the weight, fp32 [out], or `None` without DoRA.
        """
        a, b = self._joined_a(), self._joined_b()
        ratio = None
        if self.plan.is_dora:
            norms = self._row_norms(weight, a, b)
            ratio = self._magnitudes(norms) / norms
        return a, (self.plan.scale * b.float()).to(b.dtype), ratio

    def _weights_of(self, name: str) -> AdapterWeights:
        weights = self[name]
        assert isinstance(weights, AdapterWeights)
        return weights

    def _joined_a(self) -> Tensor:
        """Return the A matrices, stacked: [ranks, in]."""
        adapted: list[Tensor] = [self._weights_of(name).a for name in self]
        return adapted[0] if len(adapted) == 1 else torch.cat(adapted)

    def _joined_b(self) -> Tensor:
        """Return the B matrices as the blocks of a matrix [out, ranks]."""
        adapted = [self._weights_of(name) for name in self]
        if len(self.rows) == 1:
            return adapted[0].b
        rank, blocks = self.plan.rank, []
        for name, rows in self.rows.items():
            if name not in self:
                blocks.append(adapted[0].b.new_zeros(self.groups, rows, len(adapted) * rank))
                continue
            before = list(self).index(name) * rank
            after = (len(adapted) - 1) * rank - before
            by_group = self._weights_of(name).b.unflatten(0, (self.groups, rows))
            blocks.append(F.pad(by_group, (before, after)))
        return torch.cat(blocks, dim=1).flatten(0, 1)

    def by_projection(self, rows: Tensor) -> dict[str, Tensor]:
        """Split a vector, which has one element for each row of the weight, by projection.

        Args:
            rows: The vector [out].

        Returns:
            A view [groups, rows per group] for each projection, by name.
        """
        parts = rows.view(self.groups, -1).split(list(self.rows.values()), dim=1)
        return dict(zip(self.rows, parts, strict=True))

    def _magnitudes(self, norms: Tensor) -> Tensor:
        """Return the trained magnitude of each row, [out]; its norm if the row has no adapter."""
        parts = []
        for name, part in self.by_projection(norms).items():
            if name in self:
                magnitude = self._weights_of(name).magnitude
                assert magnitude is not None
                parts.append(magnitude.float().view(part.shape))
            else:
                parts.append(part)
        return torch.cat(parts, dim=1).flatten()

    def _row_norms(self, weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """Return the norms of the rows of W + scale B A in fp32, [out]. Collective.

        The norms are computed from |w + s b A|^2 = |w|^2 + 2 s b . (A w) + s^2 b (A A^T) b, which
        needs no second matrix of W's size.
        """
        matrix, scaled = unpacked(weight).flatten(0, -2), self.plan.scale * b.float()
        squares = torch.linalg.vector_norm(matrix, dim=1, dtype=torch.float32).square_()
        cross = self._over_inputs(F.linear(matrix, a).float())
        gram = self._over_inputs(F.linear(a.float(), a.float()))
        squares = self._over_inputs(squares)
        squares += (scaled * (2 * cross + scaled @ gram)).sum(1)
        return squares.clamp_(min=0).sqrt_()

    def _over_inputs(self, x: Tensor) -> Tensor:
        """Sum `x` over the ranks that split the input features, if any."""
        return all_reduce(x, self.layout.tensor) if self.split == "row" else x


def projections_of(linear: object) -> tuple[str, ...]:
    """Return the names of a layer's projections; `WHOLE` for a single one or for experts."""
    projections: Projections | None = getattr(linear, "adapted_as", None)
    return (WHOLE,) if projections is None else projections.names


class _AdaptedProduct(torch.autograd.Function):
    """The product x W^T + scale (x A^T) B^T for a frozen W.

    In both passes the low-rank product is written first, and the product with W is added to it. The
    opposite order would take another memory-bound pass over the result.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
        rows = x.flatten(0, -2)
        low = (rows @ a.t()).mul_(scale)
        out = (low @ b.t()).addmm_(rows, weight.t())
        ctx.save_for_backward(x, weight, a, b, low)
        ctx.scale = scale
        return out.view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, a, b, low = ctx.saved_tensors
        needs_x, _, needs_a, needs_b, _ = ctx.needs_input_grad
        rows = grad.flatten(0, -2)
        low_grad = (rows @ b).mul_(ctx.scale)
        x_grad = None
        if needs_x:
            x_grad = (low_grad @ a).addmm_(rows, weight).view(x.shape)
        a_grad = low_grad.t() @ x.flatten(0, -2) if needs_a else None
        b_grad = rows.t() @ low if needs_b else None
        return x_grad, None, a_grad, b_grad, None


class _DownProduct(torch.autograd.Function):
    """The product x A^T, returned together with x for the product with the frozen weight.

    When the backward pass reaches this function, the gradient of x is complete except for the term
    from x A^T. A single pass over memory computes this term and adds it.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, a)
        return x, F.linear(x, a)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, low_grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, a = ctx.saved_tensors
        needs_x, needs_a = ctx.needs_input_grad
        rows = low_grad.flatten(0, -2)
        x_grad = grad.flatten(0, -2).addmm_(rows, a).view(grad.shape) if needs_x else None
        return x_grad, rows.t() @ x.flatten(0, -2) if needs_a else None


class _AddProduct(torch.autograd.Function):
    """The sum out + low B^T, computed in place and in one pass over memory."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, low: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(low, b)
        ctx.mark_dirty(out)
        out.view(-1, out.shape[-1]).addmm_(low.flatten(0, -2), b.t())
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        low, b = ctx.saved_tensors
        rows = grad.flatten(0, -2)
        _, needs_low, needs_b = ctx.needs_input_grad
        low_grad = (rows @ b).view(low.shape) if needs_low else None
        b_grad = rows.t() @ low.flatten(0, -2) if needs_b else None
        return grad, low_grad, b_grad
