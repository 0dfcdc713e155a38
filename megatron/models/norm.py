"""The residual stream, and the normalization before each sublayer.

The next normalization adds a sublayer's output to the stream: one pass over memory does both.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from torch import Tensor, nn

from megatron.kernels.amax import Handover, Handovers
from megatron.kernels.norm import choose_add_norm
from megatron.models.plan import NormPlan
from megatron.parallel.build import BuildContext
from megatron.parallel.parameter import ONES, ZEROS


class Stream(NamedTuple):
    """Hidden states between two sublayers, as a sum that is not computed yet.

    Attributes:
        residual: The hidden states before the last sublayer, [s, b, h].
        update: The output of the last sublayer, [s, b, h]; `None` at the start of a part of the
            model, and if dropout has added it already.
        handover: The place for the amax of the update's gradient, which the layer that computed the
            update takes in backward; `None` if that layer does not need it.
    """

    residual: Tensor
    update: Tensor | None = None
    handover: Handover | None = None

    def join(self) -> Tensor:
        """Return the hidden states."""
        return self.residual if self.update is None else self.residual + self.update


class Norm(nn.Module):
    """A normalization over the last dimension: LayerNorm or RMSNorm, by its plan.

    Args:
        plan: The record of the normalization.
        width: The size of the last dimension.
        context: Layout, device, kernels and number formats.
        partial_gradient: Whether tensor ranks normalize different tensors, so that the weights'
            gradients must be added over the ranks.
    """

    def __init__(
        self, plan: NormPlan, width: int, context: BuildContext, *, partial_gradient: bool
    ) -> None:
        """Allocate the weight, and for a LayerNorm the bias."""
        super().__init__()
        self.form = choose_add_norm(context.kernels.library)
        self.epsilon, self.offset = plan.epsilon, plan.offset
        new_vector = partial(context.new_parameter, (width,), partial_gradient=partial_gradient)
        self.weight = new_vector(init=ZEROS if plan.offset else ONES)
        self.bias = new_vector(init=ZEROS) if plan.kind == "LayerNorm" else None

    @staticmethod
    def parameter_count(plan: NormPlan, width: int) -> int:
        """Count the parameters of a normalization over `width` channels."""
        return 2 * width if plan.kind == "LayerNorm" else width

    def forward(self, stream: Stream, handover: Handover | None = None) -> tuple[Tensor, Tensor]:
        """Return the joined stream [s, b, h] and its normalization in the weight's type.

        Args:
            stream: The residual stream.
            handover: The place for the amax of the result; `None` if the next layer does not need
                it.
        """
        weight = self.weight + 1 if self.offset else self.weight
        handovers = Handovers(handover, stream.handover)
        return self.form(*stream[:2], weight, self.bias, self.epsilon, handovers)


def new_norm(plan: NormPlan, hidden: int, context: BuildContext) -> Norm:
    """Build a normalization of hidden states (with sequence parallelism, of this rank's part)."""
    return Norm(plan, hidden, context, partial_gradient=context.layout.sequence.size > 1)


def new_head_norm(plan: NormPlan, head_size: int, context: BuildContext) -> Norm:
    """Build a normalization of a head's channels. Each tensor rank applies it to its own heads."""
    return Norm(plan, head_size, context, partial_gradient=context.layout.tensor.size > 1)
