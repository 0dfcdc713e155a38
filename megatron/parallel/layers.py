"""Layers whose weights may be split over tensor ranks. The constructor says how; models do not."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.parallel.collectives import copy_to, reduce_from
from megatron.parallel.layout import Layout
from megatron.parallel.parameter import ZEROS, Init, new_parameter

Split = Literal["column", "row"]


class Linear(nn.Module):
    """y = x W^T + b, whole or split over the tensor axis.

    split="column" splits the output features: the input is whole on every rank, the output a part.
    split="row" splits the input features: the input is a part, the output whole on every rank.

    Args:
        in_features: of the whole layer.
        out_features: of the whole layer.
        split: how the weight is split over tensor ranks; None keeps all of it on every rank.
        parts: the output is so many vectors of equal length (gate and up, for example), each of
            them split by itself. The weight's global shape is then [parts, out / parts, in].
        init: of the weight; biases start at zero.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        split: Split | None,
        layout: Layout,
        init: Init,
        bias: bool = True,
        parts: int = 1,
        device: torch.device | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.split = split
        self.axis = layout.tensor
        out = (out_features,) if parts == 1 else (parts, out_features // parts)
        out_dim = len(out) - 1
        self.weight = new_parameter(
            (*out, in_features),
            init=init,
            axis=self.axis,
            split_dim={"column": out_dim, "row": out_dim + 1, None: None}[split],
            device=device,
            dtype=dtype,
        )
        self.bias = None
        if bias:
            self.bias = new_parameter(
                out,
                init=ZEROS,
                axis=self.axis,
                split_dim=out_dim if split == "column" else None,
                device=device,
                dtype=dtype,
            )

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]; the split side is divided by t."""
        weight = self.weight.flatten(0, -2)
        bias = None if self.bias is None else self.bias.flatten()
        if self.split == "row" and self.axis.size > 1:
            out = reduce_from(F.linear(x, weight), self.axis)
            return out if bias is None else out + bias
        if self.split == "column":
            x = copy_to(x, self.axis)
        return F.linear(x, weight, bias)


class VocabularyEmbedding(nn.Module):
    """A vector for every vocabulary entry; rows are split over tensor ranks.

    Args:
        vocab_size: padded, of the whole table.
        lookup_in_fp32: look up in an fp32 copy of the weight, so that the gradients of an entry
            that occurs often are summed in fp32.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden: int,
        *,
        layout: Layout,
        init: Init,
        lookup_in_fp32: bool = False,
        device: torch.device | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.axis = layout.tensor
        self.lookup_in_fp32 = lookup_in_fp32
        self.weight = new_parameter(
            (vocab_size, hidden),
            init=init,
            axis=self.axis,
            split_dim=0,
            device=device,
            dtype=dtype,
        )

    def forward(self, tokens: Tensor) -> Tensor:
        """Entries [...] -> vectors [..., h] in the weight's type, whole on every rank."""
        weight = self.weight.float() if self.lookup_in_fp32 else self.weight
        if self.axis.size == 1:
            return F.embedding(tokens, weight).to(self.weight.dtype)
        local = tokens - self.axis.rank * weight.shape[0]
        mine = (local >= 0) & (local < weight.shape[0])
        vectors = F.embedding(torch.where(mine, local, 0), weight) * mine.unsqueeze(-1)
        return reduce_from(vectors.to(self.weight.dtype), self.axis)
