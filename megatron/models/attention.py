"""Self-attention with any number of key-value heads."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron.config.model import ModelConfig
from megatron.kernels.attention import AttentionChoice
from megatron.kernels.rope import Rotation, rotate
from megatron.models.initial import weight_init
from megatron.models.norm import Stream, new_head_norm
from megatron.models.sizes import sizes_of
from megatron.parallel.collectives import gather_to
from megatron.parallel.layers import Linear
from megatron.parallel.layout import Axis, Layout
from megatron.parallel.random import split_region


class SelfAttention(nn.Module):
    """Queries, keys and values of one layer, the attention core, and the output projection.

    Rows of the QKV weight are ordered by group: the group's query heads, its key, its value. A
    tensor rank holds whole groups, so its part is contiguous. Where there are fewer groups than
    ranks, a rank still has an even part of the rows; it takes its query heads and their group from
    the product of all ranks.

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
        self.axis = layout.tensor
        self.groups = sizes.kv_heads
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
            bias=model.add_bias_linear or model.add_qkv_bias,
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
        self.query_norm = self.key_norm = None
        if model.qk_layernorm:
            self.query_norm = new_head_norm(model, layout, device=device, dtype=dtype)
            self.key_norm = new_head_norm(model, layout, device=device, dtype=dtype)

    def forward(self, x: Tensor, mask: Tensor | None, rotation: Rotation | None) -> Tensor:
        """[s, b, h] -> [s, b, h]; [s/t, b, h] with sequence parallelism."""
        query, key, value = self._split_heads(self.qkv(x))
        if self.query_norm is not None and self.key_norm is not None:
            _, query = self.query_norm(Stream(query))
            _, key = self.key_norm(Stream(key))
        if rotation is not None:
            query, key = rotate(query, rotation), rotate(key, rotation)
        if self.recompute_core and torch.is_grad_enabled():
            context = checkpoint(self._core, query, key, value, mask, use_reentrant=False)
        else:
            context = self._core(query, key, value, mask)
        return self.output(context)

    def _split_heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[s, b, (n + 2g) d / t] -> this rank's queries [s, b, n/t, d], keys and values
        [s, b, g/t (at least 1), d]."""
        ranks, per_group = self.axis.size, self.heads_per_group
        if self.groups >= ranks:
            by_group = qkv.unflatten(2, (self.groups // ranks, per_group + 2, self.head_size))
            return (
                by_group[:, :, :, :-2].flatten(2, 3),
                by_group[:, :, :, -2],
                by_group[:, :, :, -1],
            )
        by_group = gather_to(qkv, self.axis).unflatten(2, (self.groups, per_group + 2, -1))
        sharing = ranks // self.groups  # ranks a group
        mine = by_group[:, :, self.axis.rank // sharing]  # [s, b, n/g + 2, d]
        heads = mine[:, :, :-2].chunk(sharing, dim=2)
        return heads[self.axis.rank % sharing], mine[:, :, -2:-1], mine[:, :, -1:]

    def _core(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        dropout = self.dropout if self.training else 0.0
        drawn = self.axis if dropout > 0 else Axis()
        with split_region(drawn, query.device, self.layer_number, "attention"):
            return self.attend(
                query,
                key,
                value,
                mask=mask,
                causal=self.causal,
                dropout=dropout,
                layer_number=self.layer_number,
            )
