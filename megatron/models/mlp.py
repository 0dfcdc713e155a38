"""The position-wise half of a block."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron.config.model import ModelConfig
from megatron.kernels.activation import choose_activation
from megatron.models.initial import weight_init
from megatron.models.kernels import PLAIN_KERNELS, Kernels
from megatron.models.residual import residual_linear
from megatron.models.sizes import sizes_of
from megatron.parallel.layers import Linear
from megatron.parallel.layout import Layout


class MLP(nn.Module):
    """h -> f -> h with a non-linearity; a gated one's up projection holds gate and up."""

    def __init__(
        self,
        model: ModelConfig,
        layout: Layout,
        *,
        kernels: Kernels = PLAIN_KERNELS,
        device: torch.device | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        sizes = sizes_of(model)
        self.activation = choose_activation(model, kernels.library, kernels.amaxes)
        self.up = Linear(
            sizes.hidden,
            sizes.up,
            split="column",
            layout=layout,
            init=weight_init(model, sizes.hidden, sizes.up),
            bias=model.add_bias_linear,
            adds_bias=False,  # the activation does
            parts=sizes.up_parts,
            products=kernels.new_products(),
            device=device,
            dtype=dtype,
        )
        self.down = residual_linear(
            model, layout, kernels, inputs=sizes.ffn, device=device, dtype=dtype
        )

    def forward(self, x: Tensor) -> Tensor:
        """[s, b, h] -> [s, b, h], to which `bias_to_add` remains to be added."""
        return self.down(self.activation(self.up(x), self.up.bias_to_add))

    @property
    def bias_to_add(self) -> Tensor | None:
        """[h]; see `Linear`."""
        return self.down.bias_to_add
