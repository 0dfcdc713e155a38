"""A mixer from outside the package: a gated running mean of each channel over the tokens so far."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron.kernels.rope import Rotation
from megatron.kernels.segments import Mask
from megatron.models.attention import KeyValueCache
from megatron.models.costs import Flops, MicroBatch, WeightSplit
from megatron.models.plan import MixerPlan
from megatron.parallel.build import BuildContext
from megatron.parallel.layers import Linear, Projections
from megatron.parallel.parameter import ONES


@dataclass(frozen=True, kw_only=True)
class RunningMeanPlan(MixerPlan):
    """Sizes of a `RunningMean`."""

    kind: str = "running_mean"
    width: int


class RunningMean(nn.Module):
    """A gate and values, the running mean of the values, and an output projection."""

    bias_to_add = None

    def __init__(self, plan: RunningMeanPlan, context: BuildContext) -> None:
        super().__init__()
        self.up = Linear(
            plan.hidden,
            2 * plan.width,
            context,
            split="column",
            init=plan.init.weight(plan.hidden, 2 * plan.width),
            bias=False,
            projections=Projections(("gate", "value"), (plan.width, plan.width)),
        )
        self.scale = context.new_parameter((plan.width,), init=ONES, split_dim=0)
        self.down = Linear(
            plan.width,
            plan.hidden,
            context,
            split="row",
            init=plan.init.weight(plan.width, plan.hidden, into_residual=True),
            bias=False,
        )

    @staticmethod
    def matrices(plan: RunningMeanPlan, split: WeightSplit) -> list[tuple[int, int]]:
        width = plan.width // split.tensor
        return [(2 * width, plan.hidden), (plan.hidden, width)]

    @staticmethod
    def vectors(plan: RunningMeanPlan, split: WeightSplit) -> int:
        return plan.width // split.tensor

    @staticmethod
    def flops(plan: RunningMeanPlan, length: int, encoder_length: int) -> Flops:
        return Flops(6 * length * 3 * plan.width * plan.hidden)

    @staticmethod
    def activation_bytes(plan: RunningMeanPlan, batch: MicroBatch) -> int:
        return batch.width * batch.tokens * 3 * plan.width // batch.tensor

    def forward(
        self,
        x: Tensor,
        mask: Mask | None,
        rotation: Rotation | None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        gate, values = self.up(x).chunk(2, -1)
        counts = torch.arange(1, len(x) + 1, device=x.device)[:, None, None]
        mean = values.cumsum(0) / counts
        return self.down(torch.sigmoid(gate) * mean * self.scale)
