"""One transformer layer: attention, then MLP, each behind a normalization, each added back.

A decoder's layer has a third part between the two: attention to an encoder's output.
"""

from __future__ import annotations

from torch import Tensor, nn

from megatron.config.model import ModelConfig
from megatron.kernels.attention import Mask
from megatron.kernels.dropout import choose_bias_dropout_add
from megatron.kernels.rope import Rotation
from megatron.models.attention import SelfAttention
from megatron.models.cache import KeyValueCache
from megatron.models.cross_attention import CrossAttention, Memory
from megatron.models.mlp import MLP
from megatron.models.norm import Stream, new_norm
from megatron.parallel.build import BuildContext
from megatron.parallel.random import split_region


class Block(nn.Module):
    """A pre-norm layer.

    The residual is each part's input, or with --apply-residual-connection-post-layernorm the
    normalized input. What a half computes is added to it by the next normalization (see `Stream`),
    or by its dropout where it has one. An fp32 residual stream stays fp32: 16-bit outputs are added
    to it. With sequence parallelism all of it but the split layers runs on this rank's part of the
    sequence.

    Args:
        model: network flags.
        context: what it is built in.
        layer_number: from 1.
        causal: without a mask, tokens attend to those before them only.
        reads_memory: between the two halves it attends to an encoder's output too.
        recompute_core: compute the core again in backward instead of keeping its insides.
    """

    def __init__(
        self,
        model: ModelConfig,
        context: BuildContext,
        layer_number: int,
        *,
        causal: bool = True,
        reads_memory: bool = False,
        recompute_core: bool = False,
    ) -> None:
        super().__init__()
        self.residual_after_norm = model.apply_residual_connection_post_layernorm
        self.dropout = model.hidden_dropout
        self.bias_dropout_add = choose_bias_dropout_add(model, context.kernels.library)
        self.sequence = context.layout.sequence
        self.layer_number = layer_number
        self.attention_norm = new_norm(model, context)
        self.attention = SelfAttention(
            model,
            context,
            layer_number,
            causal=causal,
            recompute_core=recompute_core,
        )
        self.cross_norm = self.cross_attention = None
        if reads_memory:
            self.cross_norm = new_norm(model, context)
            self.cross_attention = CrossAttention(
                model, context, layer_number, recompute_core=recompute_core
            )
        self.mlp_norm = new_norm(model, context)
        self.mlp = MLP(model, context)

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
