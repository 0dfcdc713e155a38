"""Self-attention with any number of key-value heads."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron.config.model import ModelConfig
from megatron.kernels.attention import AttentionChoice
from megatron.kernels.rope import Rotation, rotate
from megatron.models.initial import weight_init
from megatron.models.sizes import sizes_of
from megatron.parallel.layers import Linear
from megatron.parallel.layout import Layout


class SelfAttention(nn.Module):
    """Queries, keys and values of one layer, the attention core, and the output projection.

    Rows of the QKV weight are ordered by group: the group's query heads, its key, its value. A
    tensor rank holds whole groups, so its part is contiguous.

    Args:
        layer_number: from 1.
        attention: form of the core.
        causal: without a mask, attend to the past only.
        recompute_core: compute the core again in backward instead of keeping its insides.
    """

    def __init__(
        self,
        model: ModelConfig,
        layout: Layout,
        layer_number: int,
        attention: AttentionChoice,
        *,
        causal: bool = True,
        recompute_core: bool = False,
        device: torch.device | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        sizes = sizes_of(model)
        self.head_size = sizes.head_size
        self.groups = sizes.kv_heads // layout.tensor.size
        self.heads_per_group = sizes.heads // sizes.kv_heads
        self.dropout = model.attention_dropout
        self.layer_number = layer_number
        self.attend = attention.function
        self.causal = causal
        self.recompute_core = recompute_core
        self.qkv = Linear(
            sizes.hidden,
            sizes.qkv,
            split="column",
            layout=layout,
            init=weight_init(model, sizes.hidden, sizes.qkv),
            bias=model.add_bias_linear,
            device=device,
            dtype=dtype,
        )
        self.output = Linear(
            sizes.query,
            sizes.hidden,
            split="row",
            layout=layout,
            init=weight_init(model, sizes.query, sizes.hidden, ends_in_residual=True),
            bias=model.add_bias_linear,
            device=device,
            dtype=dtype,
        )

    def forward(self, x: Tensor, mask: Tensor | None, rotation: Rotation | None) -> Tensor:
        """[s, b, h] -> [s, b, h]."""
        by_group = self.qkv(x).unflatten(2, (self.groups, self.heads_per_group + 2, self.head_size))
        query = by_group[:, :, :, :-2].flatten(2, 3)  # [s, b, n/t, d]
        key, value = by_group[:, :, :, -2], by_group[:, :, :, -1]  # [s, b, g/t, d]
        if rotation is not None:
            query, key = rotate(query, rotation), rotate(key, rotation)
        if self.recompute_core and torch.is_grad_enabled():
            context = checkpoint(self._core, query, key, value, mask, use_reentrant=False)
        else:
            context = self._core(query, key, value, mask)
        return self.output(context)

    def _core(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        return self.attend(
            query,
            key,
            value,
            mask=mask,
            causal=self.causal,
            dropout=self.dropout if self.training else 0.0,
            layer_number=self.layer_number,
        )
