"""One transformer layer: attention, then MLP, each behind a normalization, each added back.

A decoder's layer has a third part between the two: attention to an encoder's output.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron.config.model import ModelConfig
from megatron.kernels.attention import AttentionChoice
from megatron.kernels.dropout import choose_bias_dropout_add
from megatron.kernels.rope import Rotation
from megatron.kernels.segments import Mask
from megatron.models.attention import SelfAttention
from megatron.models.cache import KeyValueCache
from megatron.models.cross_attention import CrossAttention, Memory
from megatron.models.kernels import PLAIN_KERNELS, Kernels
from megatron.models.mlp import MLP
from megatron.models.norm import Stream, new_norm
from megatron.parallel.layout import Layout
from megatron.parallel.random import split_region


class Block(nn.Module):
    """A pre-norm layer.

    The residual is each part's input, or with --apply-residual-connection-post-layernorm the
    normalized input. What a half computes is added to it by the next normalization (see `Stream`),
    or by its dropout where it has one. An fp32 residual stream stays fp32: 16-bit outputs are added
    to it. With sequence parallelism all of it but the split layers runs on this rank's part of the
    sequence.

    Args:
        layer_number: from 1.
        attention: form of the core.
        causal: without a mask, tokens attend to those before them only.
        reads_memory: between the two halves it attends to an encoder's output too.
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
        causal: bool = True,
        reads_memory: bool = False,
        recompute_core: bool = False,
        kernels: Kernels = PLAIN_KERNELS,
        device: torch.device | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.residual_after_norm = model.apply_residual_connection_post_layernorm
        self.dropout = model.hidden_dropout
        self.bias_dropout_add = choose_bias_dropout_add(model, kernels.library)
        self.sequence = layout.sequence
        self.layer_number = layer_number
        self.attention_norm = new_norm(model, layout, kernels, device=device, dtype=dtype)
        self.attention = SelfAttention(
            model,
            layout,
            layer_number,
            attention,
            causal=causal,
            recompute_core=recompute_core,
            kernels=kernels,
            device=device,
            dtype=dtype,
        )
        self.cross_norm = self.cross_attention = None
        if reads_memory:
            self.cross_norm = new_norm(model, layout, kernels, device=device, dtype=dtype)
            self.cross_attention = CrossAttention(
                model,
                layout,
                layer_number,
                attention,
                recompute_core=recompute_core,
                kernels=kernels,
                device=device,
                dtype=dtype,
            )
        self.mlp_norm = new_norm(model, layout, kernels, device=device, dtype=dtype)
        self.mlp = MLP(model, layout, kernels=kernels, device=device, dtype=dtype)

    def forward(
        self,
        stream: Stream,
        mask: Mask | None,
        rotation: Rotation | None,
        cache: KeyValueCache | None = None,
        memory: Memory | None = None,
    ) -> Stream:
        """[s, b, h] -> [s, b, h]; [s/t, b, h] with sequence parallelism."""
        x, normal = self.attention_norm(stream)
        residual = normal if self.residual_after_norm else x
        update = self.attention(normal, mask, rotation, cache)
        stream = self._add(residual, update, self.attention.bias_to_add, "attention output")
        if self.cross_norm is not None and self.cross_attention is not None:
            assert memory is not None, "a decoder's layer reads what the encoder has made"
            x, normal = self.cross_norm(stream)
            residual = normal if self.residual_after_norm else x
            update = self.cross_attention(normal, memory)
            stream = self._add(residual, update, self.cross_attention.bias_to_add, "cross output")
        x, normal = self.mlp_norm(stream)
        residual = normal if self.residual_after_norm else x
        return self._add(residual, self.mlp(normal), self.mlp.bias_to_add, "mlp output")

    def _add(self, residual: Tensor, update: Tensor, bias: Tensor | None, site: str) -> Stream:
        """residual + dropout(update + bias), or without dropout the sum still to be taken."""
        if not self.training or self.dropout == 0:
            return Stream(residual, update if bias is None else update + bias)
        with split_region(self.sequence, update.device, self.layer_number, site):
            return Stream(self.bias_dropout_add(update, bias, residual, self.dropout))
