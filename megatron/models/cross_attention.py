"""Attention of a decoder to the output of an encoder."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn

from megatron.config.model import ModelConfig
from megatron.models.core import AttentionCore
from megatron.models.initial import weight_init
from megatron.models.residual import residual_linear
from megatron.models.sizes import sizes_of
from megatron.parallel.build import BuildContext
from megatron.parallel.layers import Linear


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
        model: network flags.
        context: what it is built in.
        layer_number: from 1.
        recompute_core: compute the core again in backward instead of keeping its insides.
    """

    def __init__(
        self,
        model: ModelConfig,
        context: BuildContext,
        layer_number: int,
        *,
        recompute_core: bool = False,
    ) -> None:
        super().__init__()
        sizes = sizes_of(model)
        self.head_size = sizes.head_size
        self.query = Linear(
            sizes.hidden,
            sizes.query,
            context,
            split="column",
            init=weight_init(model, sizes.hidden, sizes.query),
            bias=model.add_bias_linear,
        )
        self.key_value = Linear(
            sizes.hidden,
            2 * sizes.query,
            context,
            split="column",
            init=weight_init(model, sizes.hidden, 2 * sizes.query),
            bias=model.add_bias_linear,
        )
        self.core = AttentionCore(
            model,
            context,
            layer_number,
            causal=False,
            recompute=recompute_core,
            site="cross attention",
        )
        self.output = residual_linear(model, context, inputs=sizes.query)

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
