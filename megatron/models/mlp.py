"""The position-wise MLP of a layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron.kernels.amax import FusedAmaxes
from megatron.models.costs import Flops, MicroBatch, WeightSplit
from megatron.models.norm import outer_amaxes, output_projection
from megatron.models.plan import MLPPlan
from megatron.parallel.build import BuildContext
from megatron.parallel.layers import Linear, Projections


class MLP(nn.Module):
    """A dense MLP from width h to `plan.inner` and back.

    In a gated MLP, the first projection computes gate and up.

    Args:
        plan: The plan of this layer.
        context: Layout, device, kernels and number formats.
    """

    def __init__(self, plan: MLPPlan, context: BuildContext) -> None:
        """Allocate both matrices."""
        super().__init__()
        self.up = Linear(
            plan.hidden,
            plan.up,
            context,
            split="column",
            init=plan.init.weight(plan.hidden, plan.up),
            bias=plan.bias,
            adds_bias=False,  # the activation adds it
            projections=Projections(("gate", "up"), (plan.inner,) * 2) if plan.gated else None,
        )
        self.down = output_projection(plan, plan.inner, context)
        up, down = self.up.products.fused_amaxes, self.down.products.fused_amaxes
        self.activation = context.kernels.activation(
            plan.activation,
            fused_amaxes=FusedAmaxes(down.forward, up.backward),
            clamp=plan.clamp,
            offset=plan.offset,
        )
        self.fused_amaxes = outer_amaxes(self.up, self.down)
        self.output_factor, input_factors = plan.factor, None
        if plan.gate_factor != 1:  # one factor each for gate and up
            input_factors = torch.tensor([[plan.gate_factor], [1.0]], device=context.device)
        self.register_buffer("input_factors", input_factors, persistent=False)
        self.input_factors: Tensor | None

    @staticmethod
    def matrices(plan: MLPPlan, split: WeightSplit) -> list[tuple[int, int]]:
        """Return (outputs, inputs) of each weight matrix on one process."""
        tensor = split.tensor
        return [(plan.up // tensor, plan.hidden), (plan.hidden, plan.inner // tensor)]

    @staticmethod
    def vectors(plan: MLPPlan, split: WeightSplit) -> int:
        """Count the elements of the MLP's biases on one process."""
        return plan.up // split.tensor + plan.hidden if plan.bias else 0

    @staticmethod
    def flops(plan: MLPPlan, length: int, encoder_length: int) -> Flops:
        """Count the FLOPs of the forward and backward passes."""
        return Flops(6 * length * plan.hidden * (plan.up + plan.inner))

    @staticmethod
    def activation_bytes(plan: MLPPlan, batch: MicroBatch) -> int:
        """Count the bytes of the activation's input and output."""
        return batch.width * batch.tokens * ((plan.up + plan.inner) // batch.tensor)

    def forward(self, x: Tensor) -> Tensor:
        """Map [s, b, h] to [s, b, h]. The caller adds `bias_to_add`."""
        pre_activation = self.up(x)
        if self.input_factors is not None:
            scaled = pre_activation.unflatten(-1, (2, -1)) * self.input_factors
            pre_activation = scaled.flatten(-2).to(pre_activation.dtype)
        out: Tensor = self.down(self.activation(pre_activation, self.up.bias_to_add))
        return out if self.output_factor == 1 else out * self.output_factor

    @property
    def bias_to_add(self) -> Tensor | None:
        """Bias [h] to be added in the residual sum; `None` if there is none."""
        return self.down.bias_to_add
