"""The load of the experts: how many tokens each received, relative to an even share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron.config.stages import parts_of_stage, plan_model, whole_model
from megatron.models.mixture_plan import MixturePlan
from megatron.models.multi_token import layers_of
from megatron.models.plan import ModelPlan

if TYPE_CHECKING:
    from megatron.training.run import Run

OVERLOADED = 4.0  # load, relative to an even share, above which an expert is named
_MAX_NAMED = 8  # experts of one layer in a log line
_PIXELS = 16  # side of an expert's square in the picture


def mixtures_of(plan: ModelPlan) -> dict[int, int]:
    """Return the number of experts of each mixture layer, by 0-based layer index.

    Layers of multi-token prediction follow the model's other layers.
    """
    return {
        index: layer.mlp.router.experts
        for index, layer in enumerate(layers_of(plan, whole_model(len(plan.layers))))
        if isinstance(layer.mlp, MixturePlan)
    }


def local_mixtures(run: Run) -> list[int]:
    """Return the mixture layers on this process, by layer index, in the order of its routers."""
    mixtures = mixtures_of(run.plan)
    if not mixtures:
        return []
    parts = plan_model(run.config.model, run.config.parallel)
    local_parts = parts_of_stage(parts, run.layout.pipeline.rank, run.layout.pipeline.size)
    first = len(run.plan.layers)
    multi_token = [index for index in mixtures if index >= first and local_parts[-1].head]
    return [
        *(index for part in local_parts for index in part.layers if index in mixtures),
        *multi_token,
    ]


def expert_load_part(run: Run) -> Tensor:
    """Return this rank's contribution to all experts' token counts since the last log line.

    The counts are reset to 0. At iterations without a log line the result is empty instead, and
    counting continues. The contributions of all ranks add up to the counts of the whole model:
    fp32, all experts of the first mixture layer, then those of the second, and so on.
    """
    device = run.device.torch_device
    if (run.progress.iteration + 1) % run.config.logging.log_interval:
        return torch.zeros(0, device=device)
    layout, mixtures = run.layout, mixtures_of(run.plan)
    loads = {index: torch.zeros(experts, device=device) for index, experts in mixtures.items()}
    router_loads = run.layers.routers.pop_loads()
    # Without sequence parallelism all tensor ranks count the same tokens.
    if layout.sequence_parallel or layout.tensor.is_first:
        loads |= zip(local_mixtures(run), router_loads, strict=True)
    return torch.cat((torch.zeros(0, device=device), *loads.values()))


@dataclass(frozen=True)
class ExpertLoad:
    """The load of every expert since the last log line.

    Attributes:
        layers: For each mixture layer, by 0-based index, the tokens of each expert divided by an
            even share, `[experts]`: 1 if all experts have the same number of tokens, 0 for an
            expert without tokens.
    """

    layers: dict[int, NDArray[np.float64]]

    @classmethod
    def of(cls, plan: ModelPlan, tokens: Sequence[float]) -> ExpertLoad:
        """Compute the load from the numbers of tokens.

        Args:
            plan: The plan of the network, which states the number of experts in each layer.
            tokens: The sum over ranks of `expert_load_part`.
        """
        mixtures = mixtures_of(plan)
        ends = np.cumsum([0, *mixtures.values()])
        layers = {}
        for index, start, end in zip(mixtures, ends, ends[1:], strict=False):
            counts = np.asarray(tokens[start:end], dtype=np.float64)
            layers[index] = counts / max(counts.mean(), 1 / len(counts))
        return cls(layers)

    def line(self) -> str:
        """Return the log line with the highest and lowest load of an expert in each layer."""
        fields = [
            f"layer {layer}: {load.max():.2f} to {load.min():.2f}"
            for layer, load in self.layers.items()
        ]
        return f" expert load (1.00: even) | {' | '.join(fields)} |"

    def warning(self) -> str | None:
        """Return a line that names idle and overloaded experts; `None` if there are none."""
        idle, overloaded = [], []
        for layer, load in self.layers.items():
            if not load.any():
                continue  # no update has counted tokens
            idle_experts = np.flatnonzero(load == 0)
            if len(idle_experts):
                names = [str(expert) for expert in idle_experts]
                idle.append(f"layer {layer}: {_first(names)}")
            overloaded_experts = np.flatnonzero(load > OVERLOADED)
            if len(overloaded_experts):
                names = [f"{expert} ({load[expert]:.1f})" for expert in overloaded_experts]
                overloaded.append(f"layer {layer}: {_first(names)}")
        warnings = []
        if idle:
            warnings.append(f"experts without tokens since the last log line: {'; '.join(idle)}")
        if overloaded:
            warnings.append(
                f"experts with more than {OVERLOADED:g} times an even share of the tokens: "
                f"{'; '.join(overloaded)}"
            )
        return f" {' | '.join(warnings)}" if warnings else None

    def scalars(self) -> dict[str, float]:
        """Return the highest and lowest load of an expert in each layer, by TensorBoard tag."""
        return {
            f"expert-load/layer {layer} {name}": float(value)
            for layer, load in self.layers.items()
            for name, value in (("busiest", load.max()), ("idlest", load.min()))
        }

    def compact(self) -> dict[str, list[float]]:
        """Return the load of each expert, rounded to three decimal places, by layer."""
        return {str(layer): load.round(3).tolist() for layer, load in self.layers.items()}

    def picture(self) -> NDArray[np.uint8]:
        """Return a heat map, RGB [height, width, 3]: a row per layer, a square per expert.

        White is an even share, or the absence of an expert in a smaller layer. Experts with fewer
        tokens are blue and those with more are red, on a logarithmic scale whose ends are
        `OVERLOADED` and its inverse.
        """
        widest = max(len(load) for load in self.layers.values())
        rows = np.ones((len(self.layers), widest))
        for row, load in zip(rows, self.layers.values(), strict=True):
            row[: len(load)] = load
        warmth = np.log(rows.clip(1 / OVERLOADED, OVERLOADED)) / np.log(OVERLOADED)
        warmth = warmth[:, :, np.newaxis]
        fade = np.where(warmth > 0, [0.0, 1.0, 1.0], [1.0, 1.0, 0.0])  # red: no green, no blue
        colors = (255 * (1 - np.abs(warmth) * fade)).round().astype(np.uint8)
        return colors.repeat(_PIXELS, axis=0).repeat(_PIXELS, axis=1)


def _first(names: Sequence[str]) -> str:
    """Return the first few names and the number of omitted ones, as text."""
    omitted = len(names) - _MAX_NAMED
    suffix = [f"and {omitted} more"] if omitted > 0 else []
    return ", ".join([*names[:_MAX_NAMED], *suffix])
