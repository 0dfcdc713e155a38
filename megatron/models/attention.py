"""Self-attention with any number of key-value heads."""

from __future__ import annotations

from torch import Tensor, nn

from megatron.config.model import ModelConfig
from megatron.kernels.attention import Mask
from megatron.kernels.rope import Rotation, choose_split_rotate, rotate
from megatron.models.cache import KeyValueCache
from megatron.models.core import AttentionCore
from megatron.models.initial import weight_init
from megatron.models.norm import Stream, new_head_norm
from megatron.models.residual import residual_linear
from megatron.models.sizes import sizes_of
from megatron.parallel.build import BuildContext
from megatron.parallel.collectives import gather_to
from megatron.parallel.layers import Linear


class SelfAttention(nn.Module):
    """Queries, keys and values of one layer, the attention core, and the output projection.

    Rows of the QKV weight are ordered by group: the group's query heads, its key, its value. A
    tensor rank holds whole groups, so its part is contiguous. Where there are fewer groups than
    ranks, a rank still has an even part of the rows; it takes its query heads and their group from
    the product of all ranks.

    Args:
        model: network flags.
        context: what it is built in.
        layer_number: from 1.
        causal: without a mask, attend to the past only.
        recompute_core: compute the core again in backward instead of keeping its insides.
    """

    def __init__(
        self,
        model: ModelConfig,
        context: BuildContext,
        layer_number: int,
        *,
        causal: bool = True,
        recompute_core: bool = False,
    ) -> None:
        super().__init__()
        sizes = sizes_of(model)
        self.head_size = sizes.head_size
        self.axis = context.layout.tensor
        self.groups = sizes.kv_heads
        self.heads_per_group = sizes.heads // sizes.kv_heads
        self.layer_number = layer_number
        kernels = context.kernels
        self.split_rotate = choose_split_rotate(model, kernels.library, kernels.amaxes)
        self.qkv = Linear(
            sizes.hidden,
            sizes.qkv,
            context,
            split="column",
            init=weight_init(model, sizes.hidden, sizes.qkv),
            bias=model.add_bias_linear or model.add_qkv_bias,
        )
        self.core = AttentionCore(
            model,
            context,
            layer_number,
            causal=causal,
            recompute=recompute_core,
            site="attention",
        )
        self.output = residual_linear(model, context, inputs=sizes.query)
        self.query_norm = self.key_norm = None
        if model.qk_layernorm:
            self.query_norm = new_head_norm(model, context)
            self.key_norm = new_head_norm(model, context)

    def forward(
        self,
        x: Tensor,
        mask: Mask | None,
        rotation: Rotation | None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        """[s, b, h] -> [s, b, h], to which `bias_to_add` remains to be added; [s/t, b, h] with
        sequence parallelism."""
        if self.query_norm is None or self.key_norm is None:
            query, key, value = self._split_heads(self.qkv(x), rotation)
        else:
            query, key, value = self._split_heads(self.qkv(x), None)
            _, query = self.query_norm(Stream(query))
            _, key = self.key_norm(Stream(key))
            if rotation is not None:
                query, key = rotate(query, rotation), rotate(key, rotation)
        if cache is not None:
            context = cache.attend(query, key, value, self.layer_number)
        else:
            context = self.core(query, key, value, mask)
        return self.output(context)

    @property
    def bias_to_add(self) -> Tensor | None:
        """[h]; see `Linear`."""
        return self.output.bias_to_add

    def _split_heads(self, qkv: Tensor, rotation: Rotation | None) -> tuple[Tensor, Tensor, Tensor]:
        """[s, b, (n + 2g) d / t] -> this rank's queries [s, b, n/t, d], keys and values
        [s, b, g/t (at least 1), d]; queries and keys rotated."""
        ranks = self.axis.size
        if self.groups >= ranks:
            return self.split_rotate(qkv, self.groups // ranks, self.head_size, rotation)
        per_group = self.heads_per_group + 2
        by_group = gather_to(qkv, self.axis).unflatten(2, (self.groups, per_group, -1))
        sharing = ranks // self.groups  # ranks a group
        mine = by_group[:, :, self.axis.rank // sharing]  # [s, b, n/g + 2, d]
        query = mine[:, :, :-2].chunk(sharing, dim=2)[self.axis.rank % sharing]
        key, value = mine[:, :, -2:-1], mine[:, :, -1:]
        if rotation is None:
            return query, key, value
        return rotate(query, rotation), rotate(key, rotation), value
