"""From the last hidden states to a score for every vocabulary entry."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron.config.model import ModelConfig
from megatron.models.initial import weight_init
from megatron.models.sizes import sizes_of
from megatron.parallel.layout import Layout
from megatron.parallel.linear import Communication, parallel_linear
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


def vocabulary_logits(
    x: Tensor, weight: nn.Parameter, layout: Layout, *, overlap: bool = True
) -> Tensor:
    """Scores of this rank's part of the vocabulary.

    Args:
        x: [s, b, h]; [s/t, b, h] with sequence parallelism.
        weight: [v/t, h], this rank's rows of an embedding or output matrix.
        layout: who this process is.
        overlap: communicate while computing; off: the same results.

    Returns:
        [s, b, v/t].
    """
    communication = Communication(layout.tensor, layout.sequence_parallel, overlap)
    return parallel_linear(x, weight, None, communication)
