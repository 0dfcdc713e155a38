"""From the last hidden states to a score for every vocabulary entry, and to the loss."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron.config.model import ModelConfig
from megatron.config.precision import PrecisionConfig
from megatron.kernels.cross_entropy import CrossEntropy, choose_cross_entropy
from megatron.kernels.library import find_library
from megatron.models.initial import weight_init
from megatron.models.sizes import sizes_of
from megatron.parallel.cross_entropy import linear_cross_entropy, vocabulary_cross_entropy
from megatron.parallel.gradients import GradientSlot
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
    x: Tensor,
    weight: nn.Parameter,
    layout: Layout,
    *,
    overlap: bool = True,
    slot: GradientSlot | None = None,
) -> Tensor:
    """Scores of this rank's part of the vocabulary.

    Args:
        x: [s, b, h]; [s/t, b, h] with sequence parallelism.
        weight: [v/t, h], this rank's rows of an embedding or output matrix.
        layout: who this process is.
        overlap: communicate while computing; off: the same results.
        slot: where the weight's gradient goes; None: to autograd.

    Returns:
        [s, b, v/t].
    """
    communication = Communication(layout.tensor, layout.sequence_parallel, overlap)
    return parallel_linear(x, weight, None, communication, slot=slot)


@dataclass(frozen=True)
class TokenLoss:
    """How hidden states become the loss of each token: decided when a model is built.

    Attributes:
        form: of the cross entropy.
        is_chunked: never hold all logits.
    """

    form: CrossEntropy
    is_chunked: bool

    @classmethod
    def from_config(cls, precision: PrecisionConfig, device: torch.device) -> TokenLoss:
        """What the flags ask for, with kernels where they run."""
        fuses = precision.cross_entropy_loss_fusion
        library = find_library(device).library if fuses else None
        return cls(
            choose_cross_entropy(library, in_16_bits=precision.fp16_lm_cross_entropy),
            is_chunked=fuses and precision.cross_entropy_fusion_impl == "linear",
        )

    def __call__(
        self,
        x: Tensor,
        weight: nn.Parameter,
        labels: Tensor,
        layout: Layout,
        *,
        overlap: bool = True,
        slot: GradientSlot | None = None,
    ) -> Tensor:
        """[s, b, h] or [s/t, b, h], as `vocabulary_logits`; labels [s, b] -> fp32 [s, b]."""
        if self.is_chunked:
            communication = Communication(layout.tensor, layout.sequence_parallel, overlap)
            return linear_cross_entropy(x, weight, labels, communication, form=self.form, slot=slot)
        logits = vocabulary_logits(x, weight, layout, overlap=overlap, slot=slot)
        return vocabulary_cross_entropy(
            logits, labels, layout.tensor, form=self.form, reuse_logits=True
        )
