"""Layers whose weights may be split over tensor ranks. The constructor says how; models do not."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.kernels.weight_gradient import EmbeddingGradient, choose_embedding_gradient
from megatron.parallel.build import BuildContext
from megatron.parallel.collectives import Communication, reduce_from, reduce_scatter_from
from megatron.parallel.exchange import Exchange
from megatron.parallel.layout import Layout
from megatron.parallel.linear import (
    CutColumn,
    CutRow,
    Transport,
    WeightSlot,
    around,
    parallel_linear,
)
from megatron.parallel.parameter import ZEROS, Init

Split = Literal["column", "row"]


class Linear(nn.Module):
    """y = x W^T + b, whole or split over the tensor axis.

    split="column" splits the output features: the input is whole on every rank, the output a part.
    split="row" splits the input features: the input is a part, the output whole on every rank.
    With sequence parallelism "whole" means this rank's part of the sequence, dimension 0: the
    input of a column is gathered, the output of a row scattered. A layer that is not split runs on
    that part, and its gradients must be added over the ranks.

    Args:
        in_features: of the whole layer.
        out_features: of the whole layer.
        context: what it is built in; `kernels.new_products` makes what it multiplies with.
        split: how the weight is split over tensor ranks; `None` keeps all of it on every rank.
        init: of the weight; biases start at zero.
        bias: whether it has one.
        adds_bias: whether it adds the bias. Otherwise the caller adds `bias_to_add`.
        parts: the output consists of this many vectors of equal length (gate and up, for example),
            each of them split by itself. The weight's global shape is then [parts, out / parts,
            in].
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
        """Allocate this rank's part, and announce it to the context's registry."""
        super().__init__()
        self.adds_bias = adds_bias
        layout = context.layout
        is_divided = layout.sequence.size > 1
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
        self.products = context.kernels.new_products()
        context.registry.add_products(self.weight, self.products)
        self._gradient = context.registry.reserve_slot(self.weight)
        self._queue = context.weight_gradients
        self._sums_over = layout if split == "row" and layout.tensor.size > 1 else None
        self._transport: Transport | None = None
        if split == "column":
            self._transport = around(
                Communication(layout.tensor, layout.sequence_parallel, context.overlap)
            )
        self._exchange = context.exchange if split and self.products.can_be_cut else None
        self._cut: Transport | None = None
        if self._exchange is not None:
            self._cut = (CutRow if split == "row" else CutColumn)(self._exchange)

    @property
    def bias_to_add(self) -> Tensor | None:
        """[out] for the caller to add to the result; `None` if there is nothing to add."""
        return None if self.bias is None or self.adds_bias else self.bias.flatten()

    def forward(self, x: Tensor) -> Tensor:
        """Multiply [s, b, in] -> [s, b, out].

        The split side is divided by t; with sequence parallelism the other side's s is, too.
        """
        cut = self._cut if self._exchange is not None and self._fits(x, self._exchange) else None
        bias = self.bias if self.adds_bias else None
        out = parallel_linear(
            x,
            self.weight,
            bias if self._sums_over is None else None,
            cut or self._transport,
            self._queue,
            self._gradient.slot,
            self.products,
            training=self.training,
        )
        if self._sums_over is None:
            return out
        if cut is None:
            out = sum_over_ranks(out, self._sums_over)
        return out if bias is None else out + bias.flatten()

    def _fits(self, x: Tensor, exchange: Exchange) -> bool:
        """Return whether what the ranks send each other, forward and backward, can be sent."""
        if self._sums_over is None:
            return exchange.fits(x.numel(), x.dtype)
        elements = x.shape[:-1].numel() // exchange.axis.size * self.weight.shape[:-1].numel()
        return exchange.fits(elements, x.dtype)


def sum_over_ranks(x: Tensor, layout: Layout) -> Tensor:
    """Sum [s, ...], which is partial on each tensor rank, at the end of the split part.

    Every rank gets all of it, or with sequence parallelism its part of the sequence.
    """
    if layout.sequence_parallel:
        return reduce_scatter_from(x, layout.tensor)
    return reduce_from(x, layout.tensor)


class VocabularyEmbedding(nn.Module):
    """A vector for every vocabulary entry; rows are split over tensor ranks.

    Args:
        vocab_size: padded, of the whole table.
        hidden: size of a vector.
        context: what it is built in.
        init: of the table.
        lookup_in_fp32: look up in an fp32 copy of the weight, so that the gradients of an entry
            that occurs often are summed in fp32.
        calls: how often it is called in a forward pass.
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
        """Allocate this rank's rows, and reserve a gradient slot."""
        super().__init__()
        self.layout = context.layout
        self.lookup_in_fp32 = lookup_in_fp32
        self.gradient_form = choose_embedding_gradient(context.kernels.library, hidden)
        self.weight = context.new_parameter(
            (vocab_size, hidden), init=init, split_dim=0, is_vocabulary=True
        )
        self._gradient = context.registry.reserve_slot(self.weight, uses=calls)

    def forward(self, tokens: Tensor) -> Tensor:
        """Look up entries [s, ...] -> vectors [s, ..., h] in the weight's type.

        They are whole on every rank, or with sequence parallelism this rank's part of the sequence.
        """
        axis, slot = self.layout.tensor, self._gradient.slot
        if slot is not None:
            # Rows of the weight, zeros for entries outside of it; the gradient goes to the slot.
            local = tokens - axis.rank * self.weight.shape[0]
            anchor = self.weight.new_empty(0).requires_grad_()  # so that backward comes here
            vectors = _Lookup.apply(anchor, local, self.weight.detach(), slot, self.gradient_form)
            return vectors if axis.size == 1 else sum_over_ranks(vectors, self.layout)
        weight = self.weight.float() if self.lookup_in_fp32 else self.weight
        if axis.size == 1:
            return F.embedding(tokens, weight).to(self.weight.dtype)
        local = tokens - axis.rank * weight.shape[0]
        mine = (local >= 0) & (local < weight.shape[0])
        vectors = F.embedding(torch.where(mine, local, 0), weight) * mine.unsqueeze(-1)
        return sum_over_ranks(vectors.to(self.weight.dtype), self.layout)


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        entries: Tensor,
        weight: Tensor,
        slot: WeightSlot,
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
