"""The layers whose output the residual stream takes up."""

from __future__ import annotations

from megatron.config.model import ModelConfig
from megatron.models.initial import weight_init
from megatron.models.sizes import sizes_of
from megatron.parallel.build import BuildContext
from megatron.parallel.layers import Linear


def residual_linear(
    model: ModelConfig,
    context: BuildContext,
    *,
    inputs: int,
) -> Linear:
    """The last layer of an attention or an MLP, [s, b, inputs/t] -> [s, b, h].

    Its bias is `bias_to_add` where dropout follows, whose kernel adds it.
    """
    hidden = sizes_of(model).hidden
    return Linear(
        inputs,
        hidden,
        context,
        split="row",
        init=weight_init(model, inputs, hidden, ends_in_residual=True),
        bias=model.add_bias_linear,
        adds_bias=model.hidden_dropout == 0,
    )
