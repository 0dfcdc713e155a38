"""Attention of a decoder to the output of an encoder."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from megatron.config.model import ModelConfig
from megatron.kernels.attention import AttentionChoice
from megatron.models.core import AttentionCore
from megatron.models.initial import weight_init
from megatron.models.kernels import PLAIN_KERNELS, Kernels
from megatron.models.residual import residual_linear
from megatron.models.sizes import sizes_of
from megatron.parallel.layers import Linear
from megatron.parallel.layout import Layout


class Memory(NamedTuple):
    """What a decoder reads of the encoder. e counts the encoder's tokens.

    Attributes:
        states: normalized hidden states [e, b, h]; [e/t, b, h] with sequence parallelism.
        mask: bool [b, 1, 1, e], True where there is a token and not only padding.
    """

    states: Tensor
    mask: Tensor


class CrossAttention(nn.Module):
    """Queries of the decoder's tokens, keys and values of the encoder's.

    Rows of the key-value weight are ordered by head: its key, its value. A tensor rank holds whole
    heads.

    Args:
        layer_number: from 1.
        attention: form of the core.
        recompute_core: compute the core again in backward instead of keeping its insides.
        kernels: what to compute with.
    """

    def __init__(
        self,
        model: ModelConfig,
        layout: Layout,
        layer_number: int,
        attention: AttentionChoice,
        *,
        recompute_core: bool = False,
        kernels: Kernels = PLAIN_KERNELS,
        device: torch.device | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        sizes = sizes_of(model)
        self.head_size = sizes.head_size
        self.query = Linear(
            sizes.hidden,
            sizes.query,
            split="column",
            layout=layout,
            init=weight_init(model, sizes.hidden, sizes.query),
            bias=model.add_bias_linear,
            products=kernels.new_products(),
            device=device,
            dtype=dtype,
        )
        self.key_value = Linear(
            sizes.hidden,
            2 * sizes.query,
            split="column",
            layout=layout,
            init=weight_init(model, sizes.hidden, 2 * sizes.query),
            bias=model.add_bias_linear,
            products=kernels.new_products(),
            device=device,
            dtype=dtype,
        )
        self.core = AttentionCore(
            model,
            layout,
            layer_number,
            attention,
            causal=False,
            recompute=recompute_core,
            site="cross attention",
        )
        self.output = residual_linear(
            model, layout, kernels, inputs=sizes.query, device=device, dtype=dtype
        )

    def forward(self, x: Tensor, memory: Memory) -> Tensor:
        """[s, b, h] -> [s, b, h], to which `bias_to_add` remains to be added; [s/t, b, h] with
        sequence parallelism."""
        query = self.query(x).unflatten(2, (-1, self.head_size))  # [s, b, n/t, d]
        states = memory.states.to(x.dtype)  # an fp32 residual stream carries them in fp32
        both = self.key_value(states).unflatten(2, (-1, 2, self.head_size))  # [e, b, n/t, 2, d]
        key, value = both.unbind(3)
        return self.output(self.core(query, key, value, memory.mask))

    @property
    def bias_to_add(self) -> Tensor | None:
        """[h]; see `Linear`."""
        return self.output.bias_to_add
