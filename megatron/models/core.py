"""The core of attention, without weights: of self-attention, and of attention to an encoder."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron.config.model import ModelConfig
from megatron.kernels.attention import AttentionChoice
from megatron.kernels.segments import Mask
from megatron.parallel.layout import Axis, Layout
from megatron.parallel.random import split_region


class AttentionCore(nn.Module):
    """Queries, keys and values of this rank's heads to what they attend to, with dropout.

    Args:
        model: network flags.
        layout: who this process is.
        layer_number: from 1.
        attention: form of the core.
        causal: without a mask, attend to the past only.
        recompute: compute it again in backward instead of keeping its insides.
        site: tells it from the layer's other core, for dropout.
    """

    def __init__(
        self,
        model: ModelConfig,
        layout: Layout,
        layer_number: int,
        attention: AttentionChoice,
        *,
        causal: bool,
        recompute: bool,
        site: str,
    ) -> None:
        super().__init__()
        self.axis = layout.tensor
        self.dropout = model.attention_dropout
        self.layer_number = layer_number
        self.attend = attention.function
        self.causal = causal
        self.recompute = recompute
        self.site = site

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Mask | None) -> Tensor:
        """[s, b, n/t, d], keys and values [keys, b, g/t (at least 1), d] -> [s, b, (n/t) d].

        Args:
            mask: see `kernels.attention.AttentionFunction`.
        """
        if self.recompute and torch.is_grad_enabled():
            out: Tensor = checkpoint(self._attend, query, key, value, mask, use_reentrant=False)
            return out
        return self._attend(query, key, value, mask)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Mask | None) -> Tensor:
        dropout = self.dropout if self.training else 0.0
        drawn = self.axis if dropout > 0 else Axis()
        with split_region(drawn, query.device, self.layer_number, self.site):
            return self.attend(
                query,
                key,
                value,
                mask=mask,
                causal=self.causal,
                dropout=dropout,
                layer_number=self.layer_number,
            )
