"""The core of attention, without weights: of self-attention, and of attention to an encoder."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron.config.model import ModelConfig
from megatron.kernels.attention import AttentionOptions, Mask
from megatron.parallel.build import BuildContext
from megatron.parallel.layout import Axis
from megatron.parallel.random import split_region


class AttentionCore(nn.Module):
    """Queries, keys and values of this rank's heads to what they attend to, with dropout.

    Args:
        model: network flags.
        context: what it is built in.
        layer_number: from 1.
        causal: without a mask, attend to the past only.
        recompute: compute it again in backward instead of keeping its insides.
        site: tells it from the layer's other core, for dropout.
    """

    def __init__(
        self,
        model: ModelConfig,
        context: BuildContext,
        layer_number: int,
        *,
        causal: bool,
        recompute: bool,
        site: str,
    ) -> None:
        super().__init__()
        self.axis = context.layout.tensor
        self.dropout = model.attention_dropout
        self.scale = model.softmax_scale
        self.layer_number = layer_number
        self.attend = context.kernels.attention.function
        self.causal = causal
        self.recompute = recompute
        self.site = site

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Mask | None) -> Tensor:
        """[s, b, n/t, d], keys and values [keys, b, g/t (at least 1), d] -> [s, b, (n/t) d].

        Args:
            mask: see `kernels.attention.AttentionOptions`.
        """
        if self.recompute and torch.is_grad_enabled():
            out: Tensor = checkpoint(self._attend, query, key, value, mask, use_reentrant=False)
            return out
        return self._attend(query, key, value, mask)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Mask | None) -> Tensor:
        dropout = self.dropout if self.training else 0.0
        drawn = self.axis if dropout > 0 else Axis()
        options = AttentionOptions(mask, self.causal, dropout, self.layer_number, self.scale)
        with split_region(drawn, query.device, self.layer_number, self.site):
            return self.attend(query, key, value, options)
