"""Linear layers and embeddings whose weights may be split over tensor ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.kernels.weight_gradient import EmbeddingGradient, choose_embedding_gradient
from megatron.parallel import linear
from megatron.parallel.build import BuildContext
from megatron.parallel.collectives import Communication, reduce_from, reduce_scatter_from
from megatron.parallel.layout import Layout
from megatron.parallel.linear import OverlappedColumn, OverlappedRow, Transport, WeightSlot
from megatron.parallel.parameter import ZEROS, Init, Matrices
from megatron.parallel.products import LinearCall

if TYPE_CHECKING:
    from megatron.parallel.adapter import Adapter
    from megatron.parallel.adapter_stack import AdapterStack

Split = Literal["column", "row"]


@dataclass(frozen=True)
class Projections:
    """Several projections of one input, computed with a single weight.

    Attributes:
        names: The names of the projections.
        widths: The number of output features of each projection.
        groups: The number of groups into which the weight's rows are divided. Each group has an
            equal share of every projection, and tensor ranks hold whole groups. `None` stacks the
            projections, which must have equal widths: the weight's global shape is
            [projections, width, in], and each projection is split separately.
    """

    names: tuple[str, ...]
    widths: tuple[int, ...]
    groups: int | None = None

    @property
    def matrices(self) -> Matrices:
        """The matrices in the weight: one for each projection."""
        if self.groups is None:
            return Matrices()
        return Matrices(tuple(width // self.groups for width in self.widths))


class Linear(nn.Module):
    """A linear layer y = x W^T + b, whole or split over the tensor axis.

    split="column" splits the output features: every rank has the whole input and a shard of the
    output. split="row" splits the input features: every rank has a shard of the input and the whole
    output. With sequence parallelism, a column layer gathers its input from the ranks' shards of
    the sequence (dimension 0), and a row layer scatters its output to them. A layer that is not
    split processes this rank's shard of the sequence, and its gradients must be summed over the
    ranks.

    Args:
        in_features: The number of input features of the whole layer.
        out_features: The number of output features of the whole layer.
        context: The build context; `kernels.new_products` makes the layer's products.
        split: How the weight is split over tensor ranks; `None` keeps the whole weight on every
            rank.
        init: The initialization of the weight; biases start at zero.
        bias: Whether the layer has a bias.
        adds_bias: Whether the layer adds the bias. Otherwise the caller adds `bias_to_add`.
        projections: The projections that make up the output, if there are several.
        adapted_as: The slices of the output that have separate adapters, if these differ from
            `projections`. A slice consists of adjacent projections that are a single module in
            Hugging Face models.

    Attributes:
        adapter: An adapter that adds to the frozen weight's output, or a stack of adapters, one of
            which is used for each token; `None` for none.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        context: BuildContext,
        *,
        split: Split | None,
        init: Init,
        bias: bool = True,
        adds_bias: bool = True,
        projections: Projections | None = None,
        adapted_as: Projections | None = None,
    ) -> None:
        """Allocate this rank's shard and record it in the context's registry."""
        super().__init__()
        self.adds_bias = adds_bias
        self.in_features, self.out_features = in_features, out_features
        self.split, self.projections = split, projections
        self.adapted_as = projections if adapted_as is None else adapted_as
        self.adapter: Adapter | AdapterStack | None = None
        layout = context.layout
        is_divided = layout.sequence.size > 1
        out: tuple[int, ...] = (out_features,)
        if projections is not None and projections.groups is None:
            out = (len(projections.widths), projections.widths[0])
        out_dim = len(out) - 1
        self.weight = context.new_parameter(
            (*out, in_features),
            init=init,
            split_dim={"column": out_dim, "row": out_dim + 1, None: None}[split],
            partial_gradient=split is None and is_divided,
            is_matrix=True,
            matrices=Matrices() if projections is None else projections.matrices,
        )
        self.bias = None
        if bias:
            self.bias = context.new_parameter(
                out,
                init=ZEROS,
                split_dim=out_dim if split == "column" else None,
                partial_gradient=split != "column" and is_divided,
            )
        self.products = context.kernels.new_products()
        context.registry.add_products(self.weight, self.products)
        self._gradient = context.registry.reserve_slot(self.weight)
        self._queue = context.weight_gradients
        self._sums_over = layout if split == "row" and layout.tensor.size > 1 else None
        self._transport: Transport | None = None
        if split == "column":
            gathered = Communication(layout.tensor, layout.sequence_parallel, context.overlap)
            self._transport = linear.collective_transport(gathered)
        self._overlapped: OverlappedColumn | OverlappedRow | None = None
        if context.exchange is not None and split and self.products.can_be_split:
            transport = OverlappedRow if split == "row" else OverlappedColumn
            self._overlapped = transport(context.exchange)

    @property
    def bias_to_add(self) -> Tensor | None:
        """The bias [out] that the caller must add to the result; `None` if there is none."""
        return None if self.bias is None or self.adds_bias else self.bias.flatten()

    def forward(self, x: Tensor) -> Tensor:
        """Multiply the input by the weight: [s, b, in] -> [s, b, out].

        The split features are divided by t. With sequence parallelism, s is divided by t in the
        tensor whose features are not split.
        """
        bias = self.bias if self.adds_bias else None
        if self.adapter is not None:
            out = self._adapted_product(x, self.adapter)
        elif self._sums_over is not None:
            out = self._product(x)
        else:
            return self._product(x, bias)
        return out if bias is None else out + bias.flatten()

    def _overlapped_for(self, x: Tensor) -> OverlappedColumn | OverlappedRow | None:
        """Return the transport that overlaps messages with the product, if this input fits."""
        overlapped = self._overlapped
        return None if overlapped is None or not overlapped.fits(x, self.weight) else overlapped

    def _product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return x W^T + b, summed over the ranks if each has a part of the input features."""
        overlapped = self._overlapped_for(x)
        queue = self._queue if self.weight.requires_grad else None
        out = linear.parallel_linear(
            LinearCall(x, self.weight, bias, self.training),
            overlapped or self._transport,
            queue,
            self._gradient.slot,
            self.products,
        )
        if self._sums_over is not None and overlapped is None:
            out = sum_over_ranks(out, self._sums_over)
        return out

    def _adapted_product(self, x: Tensor, adapter: Adapter | AdapterStack) -> Tensor:
        """Return the output of the weight and its adapter, without the bias."""
        is_local = self._transport is None and self._sums_over is None
        if is_local and self.products.matches_autograd and not self.weight.requires_grad:
            out = adapter.product(x, self.weight)
            if out is not None:
                return out
        x, low = adapter.project_down(x)
        out = self._product(x)
        if low is None:
            return out
        # The adapter adds in place, which autograd does not allow on a custom function's view.
        out = out if self._overlapped_for(x) is None else out.clone()
        return adapter.add_product(low, out, self.weight)


def sum_over_ranks(x: Tensor, layout: Layout) -> Tensor:
    """Sum the ranks' partial results `x` [s, ...] at the end of a tensor-parallel region.

    Every rank gets the whole sum [s, ...] or, with sequence parallelism, its shard [s/t, ...].
    """
    if layout.sequence_parallel:
        return reduce_scatter_from(x, layout.tensor)
    return reduce_from(x, layout.tensor)


class VocabularyEmbedding(nn.Module):
    """A table with one vector per vocabulary entry, split by rows over tensor ranks.

    Args:
        vocab_size: The padded size of the whole table.
        hidden: The number of elements of a vector.
        context: The build context.
        init: The initialization of the table.
        lookup_in_fp32: Whether to look up vectors in an fp32 copy of the weight, so that the
            gradient of a frequent entry is summed in fp32. This has no effect if the gradient goes
            to a slot, which is in fp32.
        calls: How many times the layer is called in a forward pass.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden: int,
        context: BuildContext,
        *,
        init: Init,
        lookup_in_fp32: bool = False,
        calls: int = 1,
    ) -> None:
        """Allocate this rank's rows and reserve a gradient slot."""
        super().__init__()
        self.layout = context.layout
        self.lookup_in_fp32 = lookup_in_fp32
        self.add_gradient = choose_embedding_gradient(context.kernels.library, hidden)
        self.weight = context.new_parameter(
            (vocab_size, hidden), init=init, split_dim=0, is_vocabulary=True
        )
        self._gradient = context.registry.reserve_slot(self.weight, uses=calls)

    def forward(self, tokens: Tensor) -> Tensor:
        """Look up the vectors of tokens: [s, ...] -> [s, ..., h], in the weight's dtype.

        With sequence parallelism, the result is this rank's shard of the sequence, [s/t, ..., h].
        """
        axis, slot = self.layout.tensor, self._gradient.slot
        if slot is not None:
            # Entries of other ranks give zeros. The gradient goes to the slot.
            local = tokens - axis.rank * self.weight.shape[0]
            anchor = self.weight.new_empty(0).requires_grad_()  # so that backward runs
            vectors = _Lookup.apply(anchor, local, self.weight.detach(), slot, self.add_gradient)
            return vectors if axis.size == 1 else sum_over_ranks(vectors, self.layout)
        weight = self.weight.float() if self.lookup_in_fp32 else self.weight
        if axis.size == 1:
            return F.embedding(tokens, weight).to(self.weight.dtype)
        local = tokens - axis.rank * weight.shape[0]
        is_local = (local >= 0) & (local < weight.shape[0])
        vectors = F.embedding(torch.where(is_local, local, 0), weight) * is_local.unsqueeze(-1)
        return sum_over_ranks(vectors.to(self.weight.dtype), self.layout)


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        entries: Tensor,
        weight: Tensor,
        slot: WeightSlot,
        add_gradient: EmbeddingGradient,
    ) -> Tensor:
        ctx.save_for_backward(entries)
        ctx.slot, ctx.add_gradient = slot, add_gradient
        inside = (entries >= 0) & (entries < weight.shape[0])
        return F.embedding(torch.where(inside, entries, 0), weight) * inside.unsqueeze(-1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, ...]:
        (entries,) = ctx.saved_tensors
        with ctx.slot() as (into, accumulate):
            if not accumulate:
                into.zero_()
            ctx.add_gradient(entries.flatten(), grad.flatten(0, -2), into)
        return None, None, None, None, None
