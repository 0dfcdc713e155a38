"""The layers whose output the residual stream takes up."""

from __future__ import annotations

import torch

from megatron.config.model import ModelConfig
from megatron.models.initial import weight_init
from megatron.models.kernels import Kernels
from megatron.models.sizes import sizes_of
from megatron.parallel.layers import Linear
from megatron.parallel.layout import Layout


def residual_linear(
    model: ModelConfig,
    layout: Layout,
    kernels: Kernels,
    *,
    inputs: int,
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float32,
) -> Linear:
    """The last layer of an attention or an MLP, [s, b, inputs/t] -> [s, b, h].

    Its bias is `bias_to_add` where dropout follows, whose kernel adds it.
    """
    hidden = sizes_of(model).hidden
    return Linear(
        inputs,
        hidden,
        split="row",
        layout=layout,
        init=weight_init(model, inputs, hidden, ends_in_residual=True),
        bias=model.add_bias_linear,
        adds_bias=model.hidden_dropout == 0,
        products=kernels.new_products(),
        device=device,
        dtype=dtype,
    )
