"""The residual stream, and the normalization in front of each half of a block.

What a half of a block computes is added to the stream by the normalization that reads it next: one
pass over memory does both.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn

from megatron.config.model import ModelConfig
from megatron.kernels.norm import AddNorm, add_norm, choose_add_norm
from megatron.models.sizes import sizes_of
from megatron.parallel.build import BuildContext
from megatron.parallel.parameter import ONES, ZEROS


class Stream(NamedTuple):
    """Hidden states between two halves of blocks: their sum, not taken yet.

    Attributes:
        residual: [s, b, h].
        update: what the last half has computed, [s, b, h]; None at the start of a part, and where
            dropout has added it already.
    """

    residual: Tensor
    update: Tensor | None = None

    def join(self) -> Tensor:
        """The hidden states."""
        return self.residual if self.update is None else self.residual + self.update


class LayerNorm(nn.Module):
    """LayerNorm over h. With `offset` the stored weight is the distance from one (LayerNorm-1p)."""

    def __init__(
        self,
        hidden: int,
        epsilon: float,
        context: BuildContext,
        *,
        offset: bool = False,
        form: AddNorm = add_norm,
        partial_gradient: bool = False,
    ) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.form = form
        self.offset = offset
        init = ZEROS if offset else ONES
        self.weight = context.new_parameter((hidden,), init=init, partial_gradient=partial_gradient)
        self.bias = context.new_parameter((hidden,), init=ZEROS, partial_gradient=partial_gradient)

    def forward(self, stream: Stream) -> tuple[Tensor, Tensor]:
        """The joined stream [s, b, h], and the same normalized, in the weight's type."""
        weight = self.weight + 1 if self.offset else self.weight
        return self.form(*stream, weight, self.bias, self.epsilon)


class RMSNorm(nn.Module):
    """RMSNorm over h."""

    def __init__(
        self,
        hidden: int,
        epsilon: float,
        context: BuildContext,
        *,
        form: AddNorm = add_norm,
        partial_gradient: bool = False,
    ) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.form = form
        self.weight = context.new_parameter((hidden,), init=ONES, partial_gradient=partial_gradient)

    def forward(self, stream: Stream) -> tuple[Tensor, Tensor]:
        """The joined stream [s, b, h], and the same normalized, in the weight's type."""
        return self.form(*stream, self.weight, None, self.epsilon)


def new_norm(model: ModelConfig, context: BuildContext) -> LayerNorm | RMSNorm:
    """Build the normalization of hidden states: of whole sequences, or of parts with sequence
    parallelism."""
    form = choose_add_norm(context.kernels.library, context.kernels.amaxes)
    is_partial = context.layout.sequence.size > 1
    return _norm(model, sizes_of(model).hidden, form, is_partial, context)


def new_head_norm(model: ModelConfig, context: BuildContext) -> LayerNorm | RMSNorm:
    """Build the normalization of the channels of a head; each tensor rank has it for its heads."""
    form = choose_add_norm(context.kernels.library)  # no product reads the result
    return _norm(model, sizes_of(model).head_size, form, context.layout.tensor.size > 1, context)


def _norm(
    model: ModelConfig, size: int, form: AddNorm, is_partial: bool, context: BuildContext
) -> LayerNorm | RMSNorm:
    options: dict[str, Any] = {"form": form, "partial_gradient": is_partial}
    if model.normalization == "RMSNorm":
        return RMSNorm(size, model.norm_epsilon, context, **options)
    return LayerNorm(size, model.norm_epsilon, context, offset=model.apply_layernorm_1p, **options)
