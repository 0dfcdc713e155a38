"""Parameters that know which part of the whole tensor they hold and how they start.

A parameter's first values, its checkpoint entry and its share of the gradient norm follow from
its `ParameterSpec` alone, so none of them depends on how the model is split.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

from megatron.parallel.layout import Axis


@dataclass(frozen=True)
class Init:
    """First values: kind is "normal" (std `scale`), "uniform" (+-`scale`), "zeros" or "ones"."""

    kind: str
    scale: float = 0.0


ZEROS = Init("zeros")
ONES = Init("ones")


@dataclass(frozen=True)
class ParameterSpec:
    """Where a local tensor stands in the whole one.

    Attributes:
        global_shape: shape of the whole tensor.
        offset: index of this part's first element, per dimension.
        init: how the whole tensor starts.
        split_dim: the dimension split over tensor ranks; None where every rank holds all of it.
        partial_gradient: every tensor rank holds all of it but sees a part of the sequence, or
            some heads, only: gradients must be added over them.
        is_copy: another pipeline stage holds the original, see `tied`.
        is_vocabulary: a row for each vocabulary entry, where a model begins (word vectors) or ends
            (output layer): what --decoupled-lr is for.
    """

    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    init: Init
    split_dim: int | None = None
    partial_gradient: bool = False
    is_copy: bool = False
    is_vocabulary: bool = False


def new_parameter(
    global_shape: tuple[int, ...],
    *,
    init: Init,
    axis: Axis | None = None,
    split_dim: int | None = None,
    partial_gradient: bool = False,
    is_vocabulary: bool = False,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> nn.Parameter:
    """An uninitialized parameter: this rank's even part of `global_shape` along `split_dim`.

    Raises:
        ValueError: the dimension does not divide evenly over the axis.
    """
    shape, offset = list(global_shape), [0] * len(global_shape)
    if split_dim is not None:
        assert axis is not None
        if shape[split_dim] % axis.size:
            raise ValueError(
                f"dimension {split_dim} of {global_shape} does not divide over {axis.size} ranks"
            )
        shape[split_dim] //= axis.size
        offset[split_dim] = axis.rank * shape[split_dim]
    parameter = nn.Parameter(torch.empty(shape, dtype=dtype, device=device))
    spec = ParameterSpec(
        tuple(global_shape),
        tuple(offset),
        init,
        split_dim,
        partial_gradient,
        is_vocabulary=is_vocabulary,
    )
    parameter.spec = spec  # type: ignore[attr-defined]
    return parameter


def spec_of(parameter: nn.Parameter) -> ParameterSpec:
    """The spec that `new_parameter` attached."""
    spec: ParameterSpec = parameter.spec  # type: ignore[attr-defined]
    return spec


def part_shape(parameter: nn.Parameter) -> tuple[int, ...]:
    """Shape of this rank's part in the whole tensor's dimensions; the tensor may be flatter."""
    spec = spec_of(parameter)
    if spec.split_dim is None:
        return spec.global_shape
    shape = list(spec.global_shape)
    shape[spec.split_dim] = 1
    shape[spec.split_dim] = parameter.numel() // math.prod(shape)
    return tuple(shape)
