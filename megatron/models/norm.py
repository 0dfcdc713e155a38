"""The residual stream, and the normalization before each sublayer.

The next normalization adds a sublayer's output to the stream: one pass over memory does both.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn

from megatron.kernels.amax import Handover, Handovers
from megatron.kernels.norm import AddNorm, add_norm, choose_add_norm
from megatron.models.plan import NormPlan
from megatron.parallel.build import BuildContext
from megatron.parallel.parameter import ONES, ZEROS


class Stream(NamedTuple):
    """Hidden states between two sublayers, as a sum that is not computed yet.

    Attributes:
        residual: [s, b, h].
        update: Output of the last sublayer, [s, b, h]; `None` at the start of a part of the model,
            and if dropout has added it already.
        handover: For the amax of the update's gradient, which the layer that computed the update
            takes in backward; `None` if that layer does not ask for it.
    """

    residual: Tensor
    update: Tensor | None = None
    handover: Handover | None = None

    def join(self) -> Tensor:
        """Return the hidden states."""
        return self.residual if self.update is None else self.residual + self.update


class LayerNorm(nn.Module):
    """LayerNorm over h. With an offset, the stored weight is the distance from one."""

    def __init__(
        self,
        plan: NormPlan,
        width: int,
        context: BuildContext,
        *,
        form: AddNorm = add_norm,
        partial_gradient: bool = False,
    ) -> None:
        """Allocate weight and bias."""
        super().__init__()
        self.epsilon = plan.epsilon
        self.form = form
        self.offset = plan.offset
        options: dict[str, Any] = {"partial_gradient": partial_gradient}
        start = ZEROS if plan.offset else ONES
        self.weight = context.new_parameter((width,), init=start, **options)
        self.bias = context.new_parameter((width,), init=ZEROS, **options)

    @staticmethod
    def parameters_of(width: int) -> int:
        """Count weight and bias."""
        return 2 * width

    def forward(self, stream: Stream, handover: Handover | None = None) -> tuple[Tensor, Tensor]:
        """Return the joined stream [s, b, h] and its normalization in the weight's type.

        Args:
            stream: The stream.
            handover: For the amax of the normalization; `None` if the next layer does not ask.
        """
        weight = self.weight + 1 if self.offset else self.weight
        handovers = Handovers(handover, stream.handover)
        return self.form(*stream[:2], weight, self.bias, self.epsilon, handovers)


class RMSNorm(nn.Module):
    """RMSNorm over h."""

    def __init__(
        self,
        plan: NormPlan,
        width: int,
        context: BuildContext,
        *,
        form: AddNorm = add_norm,
        partial_gradient: bool = False,
    ) -> None:
        """Allocate the weight."""
        super().__init__()
        self.epsilon = plan.epsilon
        self.form = form
        self.weight = context.new_parameter((width,), init=ONES, partial_gradient=partial_gradient)

    @staticmethod
    def parameters_of(width: int) -> int:
        """Count the weight."""
        return width

    def forward(self, stream: Stream, handover: Handover | None = None) -> tuple[Tensor, Tensor]:
        """Return the joined stream [s, b, h] and its normalization in the weight's type.

        Args:
            stream: The stream.
            handover: For the amax of the normalization; `None` if the next layer does not ask.
        """
        handovers = Handovers(handover, stream.handover)
        return self.form(*stream[:2], self.weight, None, self.epsilon, handovers)


NORMS: dict[str, type[LayerNorm | RMSNorm]] = {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}


def new_norm(plan: NormPlan, hidden: int, context: BuildContext) -> LayerNorm | RMSNorm:
    """Build a normalization of hidden states (with sequence parallelism, of this rank's part)."""
    form = choose_add_norm(context.kernels.library)
    is_partial = context.layout.sequence.size > 1
    return NORMS[plan.kind](plan, hidden, context, form=form, partial_gradient=is_partial)


def new_head_norm(plan: NormPlan, head_size: int, context: BuildContext) -> LayerNorm | RMSNorm:
    """Build a normalization of a head's channels. Each tensor rank applies it to its own heads."""
    form = choose_add_norm(context.kernels.library)
    is_partial = context.layout.tensor.size > 1
    return NORMS[plan.kind](plan, head_size, context, form=form, partial_gradient=is_partial)


def norm_parameters(plan: NormPlan, width: int) -> int:
    """Count the parameters of a normalization over `width` channels."""
    return NORMS[plan.kind].parameters_of(width)
