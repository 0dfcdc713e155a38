"""What is computed again in backward instead of being kept: a plan, as data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron.config.training import TrainingOptions
from megatron.parallel.collectives import all_gather
from megatron.parallel.layout import Axis


@dataclass(frozen=True)
class LayerGroup:
    """Consecutive layers that run together; recomputed ones keep only the group's input."""

    layers: range
    recomputed: bool


@dataclass(frozen=True)
class RecomputePlan:
    """Trade time for memory.

    Attributes:
        granularity: "full" recomputes whole layers, "selective" the attention core of each.
        method: with full, "uniform" recomputes every group of `num_layers` layers, "block" the
            first `num_layers` layers, one by one.
        num_layers: see `method`.
        split_inputs: with full, each tensor rank keeps its part of a group's input only, and the
            ranks gather it when it is needed.
    """

    granularity: str
    method: str = "uniform"
    num_layers: int = 1
    split_inputs: bool = False

    @classmethod
    def from_config(
        cls, training: TrainingOptions, *, split_inputs: bool = False
    ) -> RecomputePlan | None:
        """The plan that resolved flags ask for; None: keep everything."""
        if training.recompute_granularity is None:
            return None
        method, count = training.recompute_method or "uniform", training.recompute_num_layers or 1
        return cls(training.recompute_granularity, method, count, split_inputs)


def layer_groups(plan: RecomputePlan | None, layers: range) -> list[LayerGroup]:
    """Cut `layers` (global indices of one stage) into the groups that `plan` asks for."""
    if plan is None or plan.granularity != "full":
        return [LayerGroup(layers, False)]
    if plan.method == "uniform":
        step = plan.num_layers
        return [LayerGroup(layers[i : i + step], True) for i in range(0, len(layers), step)]
    groups = [LayerGroup(layers[i : i + 1], True) for i in range(len(layers[: plan.num_layers]))]
    kept = layers[plan.num_layers :]
    return [*groups, LayerGroup(kept, False)] if kept else groups


def recompute(
    function: Callable[..., Tensor], layers: range, x: Tensor, *others: Any, split_over: Axis
) -> Tensor:
    """function(layers, x, *others), of which backward keeps nothing but the arguments.

    Args:
        split_over: ranks that hold the same x and keep an even part of it each; of one process:
            x is kept whole.
    """

    def run() -> Tensor:
        return checkpoint(function, layers, x, *others, use_reentrant=False)

    if split_over.size == 1:
        return run()
    shape, place = x.shape, x.data_ptr()

    def keep_part(saved: Tensor) -> tuple[Tensor, bool]:
        if saved.shape != shape or saved.data_ptr() != place:
            return saved, False
        # A copy: a view would keep the whole alive.
        return saved.reshape(-1).chunk(split_over.size)[split_over.rank].clone(), True

    def join(kept: tuple[Tensor, bool]) -> Tensor:
        tensor, is_part = kept
        return all_gather(tensor, split_over).view(shape) if is_part else tensor

    with torch.autograd.graph.saved_tensors_hooks(keep_part, join):
        return run()
