"""What is computed again in backward instead of being kept: a plan, as data."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.training import TrainingConfig


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
    """

    granularity: str
    method: str = "uniform"
    num_layers: int = 1

    @classmethod
    def from_config(cls, training: TrainingConfig) -> RecomputePlan | None:
        """The plan that the flags ask for; None: keep everything."""
        granularity = training.recompute_granularity
        if granularity is None and training.recompute_activations:
            granularity = "selective"
        if granularity is None:
            return None
        method = training.recompute_method or "uniform"
        return cls(granularity, method, training.recompute_num_layers or 1)


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
