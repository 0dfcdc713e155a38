"""How weights start, by the flags."""

from __future__ import annotations

import math

from megatron.config.model import ModelConfig
from megatron.models.sizes import sizes_of
from megatron.parallel.parameter import Init


def weight_init(
    model: ModelConfig, fan_in: int, fan_out: int, *, ends_in_residual: bool = False
) -> Init:
    """First values of one weight matrix.

    Args:
        model: network flags.
        fan_in: inputs of the whole matrix.
        fan_out: outputs of the whole matrix.
        ends_in_residual: its output is added to the residual stream. 2 x layers such outputs add
            up, so their standard deviation is divided by the root of that (GPT-2).
    """
    if model.init_method_xavier_uniform:
        return Init("uniform", math.sqrt(6 / (fan_in + fan_out)))
    if not ends_in_residual:
        return Init("normal", model.init_method_std)
    return Init("normal", model.init_method_std / math.sqrt(2 * sizes_of(model).layers))
