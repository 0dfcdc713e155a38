"""An MLP from outside the package: a single square matrix and a nonlinearity."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron.models.costs import Flops, MicroBatch, WeightSplit
from megatron.models.plan import SublayerPlan
from megatron.parallel.build import BuildContext
from megatron.parallel.layers import Linear


@dataclass(frozen=True, kw_only=True)
class SquarePlan(SublayerPlan):
    """Sizes of a `Square`."""

    kind: str = "square"


class Square(nn.Module):
    """tanh of a linear layer."""

    bias_to_add = None

    def __init__(self, plan: SquarePlan, context: BuildContext) -> None:
        super().__init__()
        init = plan.init.weight(plan.hidden, plan.hidden, into_residual=True)
        self.dense = Linear(plan.hidden, plan.hidden, context, split="row", init=init)
        self.tensor = context.layout.tensor

    @staticmethod
    def matrices(plan: SquarePlan, split: WeightSplit) -> list[tuple[int, int]]:
        return [(plan.hidden, plan.hidden // split.tensor)]

    @staticmethod
    def vectors(plan: SquarePlan, split: WeightSplit) -> int:
        return plan.hidden

    @staticmethod
    def flops(plan: SquarePlan, length: int, encoder_length: int) -> Flops:
        return Flops(6 * length * plan.hidden * plan.hidden)

    @staticmethod
    def activation_bytes(plan: SquarePlan, batch: MicroBatch) -> int:
        return batch.width * batch.tokens * plan.hidden

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.dense(x.chunk(self.tensor.size, -1)[self.tensor.rank]))
