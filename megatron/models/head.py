"""From the last hidden states to a score for every vocabulary entry."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.config.model import ModelConfig
from megatron.models.initial import weight_init
from megatron.models.sizes import sizes_of
from megatron.parallel.collectives import copy_to
from megatron.parallel.layout import Axis, Layout
from megatron.parallel.parameter import new_parameter


class OutputWeight(nn.Module):
    """The output matrix [v, h] of a model that does not share its word embeddings."""

    def __init__(
        self,
        model: ModelConfig,
        layout: Layout,
        *,
        padded_vocab_size: int,
        device: torch.device | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        hidden = sizes_of(model).hidden
        self.weight = new_parameter(
            (padded_vocab_size, hidden),
            init=weight_init(model, hidden, padded_vocab_size),
            axis=layout.tensor,
            split_dim=0,
            device=device,
            dtype=dtype,
        )


def vocabulary_logits(x: Tensor, weight: Tensor, axis: Axis) -> Tensor:
    """[s, b, h] times this rank's rows [v/t, h] of an embedding or output matrix: [s, b, v/t]."""
    return F.linear(copy_to(x, axis), weight)
