"""The position-wise half of a block."""

from __future__ import annotations

from torch import Tensor, nn

from megatron.config.model import ModelConfig
from megatron.kernels.activation import choose_activation
from megatron.models.initial import weight_init
from megatron.models.residual import residual_linear
from megatron.models.sizes import sizes_of
from megatron.parallel.build import BuildContext
from megatron.parallel.layers import Linear


class MLP(nn.Module):
    """h -> f -> h with a non-linearity; a gated one's up projection holds gate and up."""

    def __init__(
        self,
        model: ModelConfig,
        context: BuildContext,
    ) -> None:
        super().__init__()
        kernels = context.kernels
        sizes = sizes_of(model)
        self.activation = choose_activation(model, kernels.library, kernels.amaxes)
        self.up = Linear(
            sizes.hidden,
            sizes.up,
            context,
            split="column",
            init=weight_init(model, sizes.hidden, sizes.up),
            bias=model.add_bias_linear,
            adds_bias=False,  # the activation does
            parts=sizes.up_parts,
        )
        self.down = residual_linear(model, context, inputs=sizes.ffn)

    def forward(self, x: Tensor) -> Tensor:
        """[s, b, h] -> [s, b, h], to which `bias_to_add` remains to be added."""
        return self.down(self.activation(self.up(x), self.up.bias_to_add))

    @property
    def bias_to_add(self) -> Tensor | None:
        """[h]; see `Linear`."""
        return self.down.bias_to_add
