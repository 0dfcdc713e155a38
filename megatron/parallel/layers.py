"""Layers whose weights may be split over tensor ranks. The constructor says how; models do not."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.kernels.weight_gradient import EmbeddingGradient, choose_embedding_gradient
from megatron.parallel.build import BuildContext
from megatron.parallel.collectives import reduce_from, reduce_scatter_from
from megatron.parallel.communication import ALONE, Communication
from megatron.parallel.exchange import Exchange
from megatron.parallel.fp8_products import Fp8Products
from megatron.parallel.gradients import GradientBuffer, GradientSlot
from megatron.parallel.layout import Layout
from megatron.parallel.linear import WorkQueue, parallel_linear
from megatron.parallel.overlapped_fp8 import overlapped_fp8_linear
from megatron.parallel.overlapped_products import overlapped_linear
from megatron.parallel.parameter import ZEROS, Init
from megatron.parallel.products import Plain

Split = Literal["column", "row"]


class Linear(nn.Module):
    """y = x W^T + b, whole or split over the tensor axis.

    split="column" splits the output features: the input is whole on every rank, the output a part.
    split="row" splits the input features: the input is a part, the output whole on every rank.
    With sequence parallelism "whole" means this rank's part of the sequence, dimension 0: the
    input of a column is gathered, the output of a row scattered; a layer that is not split runs on
    that part, and its gradients must be added over the ranks (`partial_gradients`).

    Args:
        in_features: of the whole layer.
        out_features: of the whole layer.
        split: how the weight is split over tensor ranks; None keeps all of it on every rank.
        context: what it is built in; `kernels.new_products` makes what it multiplies with.
        bias: whether it has one.
        adds_bias: False leaves it to the caller, who adds `bias_to_add`.
        parts: the output is so many vectors of equal length (gate and up, for example), each of
            them split by itself. The weight's global shape is then [parts, out / parts, in].
        init: of the weight; biases start at zero.

    Attributes:
        communication: what its products do around themselves.
        weight_gradients: where backward leaves the weight's gradient for later; None: it is
            computed at once.
        slot: where the weight's gradient goes; None: to autograd.
        exchange: what a split layer's products send each other's rows through, part by part; None:
            collectives stand before and after them.
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
        parts: int = 1,
    ) -> None:
        super().__init__()
        self.split = split
        self.layout = context.layout
        self.communication = ALONE
        if split == "column":
            self.communication = Communication(
                self.layout.tensor, self.layout.sequence_parallel, context.overlap
            )
        self.weight_gradients: WorkQueue | None = context.weight_gradients
        self.slot: GradientSlot | None = None
        self.products = context.kernels.new_products()
        self.exchange: Exchange | None = context.exchange if split and self.can_be_cut else None
        self.adds_bias = adds_bias
        is_divided = self.layout.sequence.size > 1
        out = (out_features,) if parts == 1 else (parts, out_features // parts)
        out_dim = len(out) - 1
        self.weight = context.new_parameter(
            (*out, in_features),
            init=init,
            split_dim={"column": out_dim, "row": out_dim + 1, None: None}[split],
            partial_gradient=split is None and is_divided,
        )
        self.bias = None
        if bias:
            self.bias = context.new_parameter(
                out,
                init=ZEROS,
                split_dim=out_dim if split == "column" else None,
                partial_gradient=split != "column" and is_divided,
            )

    @property
    def bias_to_add(self) -> Tensor | None:
        """[out] for the caller to add to the result; None where there is nothing to add."""
        return None if self.bias is None or self.adds_bias else self.bias.flatten()

    @property
    def can_be_cut(self) -> bool:
        """Whether its products may be made part by part."""
        if isinstance(self.products, Fp8Products):
            return self.products.can_be_cut
        return type(self.products) is Plain

    def take_slots(self, gradients: GradientBuffer) -> None:
        """See `every_layer.attach_slots`."""
        self.slot = gradients.slot(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """[s, b, in] -> [s, b, out]; the split side is divided by t, the other side's s by t too
        with sequence parallelism."""
        if self.exchange is not None and self._fits(x, self.exchange):
            return self._overlapped(x, self.exchange)
        bias = self.bias if self.adds_bias else None
        if self.split != "row" or self.layout.tensor.size == 1:
            return self._product(x, bias)
        out = sum_over_ranks(self._product(x, None), self.layout)
        return out if bias is None else out + bias.flatten()

    def _fits(self, x: Tensor, exchange: Exchange) -> bool:
        """Whether what the ranks send each other, forward and backward, can be sent."""
        if self.split == "column":
            return exchange.fits(x.numel(), x.dtype)
        elements = x.shape[:-1].numel() // exchange.axis.size * self.weight.shape[:-1].numel()
        return exchange.fits(elements, x.dtype)

    def _overlapped(self, x: Tensor, exchange: Exchange) -> Tensor:
        """`forward`, part by part."""
        is_row, bias = self.split == "row", self.bias if self.adds_bias else None
        inside = None if is_row else bias
        where: dict[str, Any] = {"queue": self.weight_gradients, "slot": self.slot}
        if isinstance(self.products, Fp8Products):
            out = overlapped_fp8_linear(
                x,
                self.weight,
                inside,
                self.products,
                exchange,
                scatters=is_row,
                training=self.training,
                **where,
            )
        else:
            out = overlapped_linear(x, self.weight, inside, exchange, scatters=is_row, **where)
        return out + bias.flatten() if is_row and bias is not None else out

    def _product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return parallel_linear(
            x,
            self.weight,
            bias,
            self.communication,
            self.weight_gradients,
            self.slot,
            self.products,
            training=self.training,
        )


def sum_over_ranks(x: Tensor, layout: Layout) -> Tensor:
    """Leave the split part of the network: [s, ...], partial on each tensor rank, to the sum.

    Every rank gets all of it, or with sequence parallelism its part of the sequence.
    """
    if layout.sequence_parallel:
        return reduce_scatter_from(x, layout.tensor)
    return reduce_from(x, layout.tensor)


class VocabularyEmbedding(nn.Module):
    """A vector for every vocabulary entry; rows are split over tensor ranks.

    Args:
        vocab_size: padded, of the whole table.
        lookup_in_fp32: look up in an fp32 copy of the weight, so that the gradients of an entry
            that occurs often are summed in fp32.
        context: what it is built in.
        init: of the table.

    Attributes:
        slot: where the weight's gradient goes, summed in its format; None: to autograd.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden: int,
        context: BuildContext,
        *,
        init: Init,
        lookup_in_fp32: bool = False,
    ) -> None:
        super().__init__()
        self.layout = context.layout
        self.lookup_in_fp32 = lookup_in_fp32
        self.slot: GradientSlot | None = None
        self.gradient_form = choose_embedding_gradient(context.kernels.library, hidden)
        self.weight = context.new_parameter(
            (vocab_size, hidden), init=init, split_dim=0, is_vocabulary=True
        )

    def forward(self, tokens: Tensor) -> Tensor:
        """Entries [s, ...] -> vectors [s, ..., h] in the weight's type, whole on every rank, or
        with sequence parallelism this rank's part of the sequence."""
        axis = self.layout.tensor
        if self.slot is not None:
            local = tokens - axis.rank * self.weight.shape[0]
            vectors = _lookup(local, self.weight.detach(), self.slot, self.gradient_form)
            return vectors if axis.size == 1 else sum_over_ranks(vectors, self.layout)
        weight = self.weight.float() if self.lookup_in_fp32 else self.weight
        if axis.size == 1:
            return F.embedding(tokens, weight).to(self.weight.dtype)
        local = tokens - axis.rank * weight.shape[0]
        mine = (local >= 0) & (local < weight.shape[0])
        vectors = F.embedding(torch.where(mine, local, 0), weight) * mine.unsqueeze(-1)
        return sum_over_ranks(vectors.to(self.weight.dtype), self.layout)


def _lookup(entries: Tensor, weight: Tensor, slot: GradientSlot, form: EmbeddingGradient) -> Tensor:
    """Rows of the weight [v, h], zeros for entries outside of it; the gradient goes to the slot."""
    anchor = weight.new_empty(0).requires_grad_()  # so that backward comes here
    return _Lookup.apply(anchor, entries, weight, slot, form)


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        entries: Tensor,
        weight: Tensor,
        slot: GradientSlot,
        form: EmbeddingGradient,
    ) -> Tensor:
        ctx.save_for_backward(entries)
        ctx.slot, ctx.form = slot, form
        inside = (entries >= 0) & (entries < weight.shape[0])
        return F.embedding(torch.where(inside, entries, 0), weight) * inside.unsqueeze(-1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, ...]:
        (entries,) = ctx.saved_tensors
        with ctx.slot.open() as (into, accumulate):
            if not accumulate:
                into.zero_()
            ctx.form(entries.flatten(), grad.flatten(0, -2), into)
        return None, None, None, None, None
