"""Norms and counts over all gradients or parameters of a model, however it is split.

Each process sums over the tensors assigned to it, and the results are summed over the tensor and
pipeline axes, so every element of the model counts once. A tensor that is not split over the tensor
ranks (`split_dim` is `None`) is assigned to the first rank. A parameter with two uses (tied
embeddings) is one tensor with one gradient and counts once. After the reduction, data and context
ranks hold equal gradients, so results are not summed over these axes, unless gradients are sharded
and each rank holds its own shard.

If experts are divided among processes, expert weights have different replicas than other weights.
The first replica of each weight then counts it, and the results are summed over all processes.

Results stay on the device. Only `parameters_norm` and `state_sizes` wait for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.kernels.tensor_sums import sum_of_squares
from megatron.parallel.collectives import all_reduce
from megatron.parallel.layout import Layout


def is_counted_here(parameter: nn.Parameter, layout: Layout, *, is_sharded: bool = False) -> bool:
    """Return whether this process counts the parameter in sums over the whole model.

    Args:
        parameter: A parameter of this process.
        layout: The grid of processes as this process sees it.
        is_sharded: Whether each replica counts its own shard of the parameter.
    """
    spec = getattr(parameter, "spec", None)
    if spec is None:
        return layout.tensor.is_first
    is_expert = spec.is_expert and layout.divides_experts
    if layout.divides_experts and not is_sharded:
        replicas = layout.expert_replica if is_expert else layout.replica
        if not replicas.is_first:
            return False
    parts = layout.expert_tensor if is_expert else layout.tensor
    is_split = spec.split_dim is not None
    return not spec.is_copy and (is_split or parts.is_first)


def sum_over_model(values: Tensor, layout: Layout, *, over_replicas: bool = False) -> Tensor:
    """Sum `values` in place over the processes with different parts of the model; return them.

    Collective over the summed axes, or over the world if experts are divided among processes.

    Args:
        values: The sums of this process.
        layout: The grid of processes as this process sees it.
        over_replicas: Whether to also sum over the replica axis, because tensors are sharded.
    """
    axes = [layout.tensor, layout.pipeline, *([layout.replica] if over_replicas else [])]
    if layout.divides_experts:
        axes = [layout.world]
    for axis in axes:
        all_reduce(values, axis)
    return values


@torch.no_grad()
def parameters_norm(
    parameters: Iterable[nn.Parameter],
    layout: Layout,
    *,
    shard: Callable[[nn.Parameter], Tensor] | None = None,
) -> float:
    """Return the L2 norm of all parameters of the model. Collective; waits for the device.

    Args:
        parameters: The parameters of this process.
        layout: The grid of processes as this process sees it.
        shard: A function that returns this process's shard of a parameter; `None` if parameters are
            not sharded.
    """
    all_parameters = list(parameters)
    counted = [
        p if shard is None else shard(p)
        for p in all_parameters
        if is_counted_here(p, layout, is_sharded=shard is not None)
    ]
    square = sum_of_squares(counted, all_parameters[0].device)
    return sum_over_model(square, layout, over_replicas=shard is not None).sqrt().item()


@torch.no_grad()
def state_sizes(
    tensors: Mapping[str, Iterable[Tensor]],
    layout: Layout,
    device: torch.device,
    *,
    over_replicas: bool,
) -> dict[str, float]:
    """Return norms of sets of tensors over the whole model. Collective; waits for the device.

    Args:
        tensors: The tensors that this process counts, by the name of the set. All processes have
            the same names.
        layout: The grid of processes as this process sees it.
        device: The device on which the sums are communicated.
        over_replicas: Whether to also sum over the replica axis, because tensors are sharded.

    Returns:
        The L1 norm, L2 norm and largest magnitude of each set, as `name_l1`, `name_l2` and
        `name_abs_max`.
    """
    sums = torch.zeros(len(tensors), 2, dtype=torch.float64, device=device)
    peaks = torch.zeros(len(tensors), dtype=torch.float64, device=device)
    for i, parts in enumerate(tensors.values()):
        for part in (part for part in parts if part.numel()):
            one, two, peak = (
                torch.linalg.vector_norm(part, order, dtype=torch.float64).to(device)
                for order in (1, 2, torch.inf)
            )
            sums[i] += torch.stack((one, two.square()))
            peaks[i] = torch.maximum(peaks[i], peak)
    sum_over_model(sums, layout, over_replicas=over_replicas)
    all_reduce(peaks, layout.world, dist.ReduceOp.MAX)
    sizes: dict[str, float] = {}
    for name, (one, square), peak in zip(tensors, sums.tolist(), peaks.tolist(), strict=True):
        sizes |= {f"{name}_l1": one, f"{name}_l2": square**0.5, f"{name}_abs_max": peak}
    return sizes
