"""The parts of PEFT's adapters that correspond to our adapters.

PEFT adds one adapter to each module of `transformers`. If the module computes several of our
projections at once (Phi-3's `qkv_proj`), its adapter combines the adapters of those projections:
its A stacks their A matrices, its B contains their B matrices as blocks, and its rank is the sum of
their ranks. The rows of a module may also be in a different order from ours (GPT-J's queries,
GPT-OSS's experts).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from megatron.checkpoint.huggingface.rules import TensorConversion
from megatron.errors import CheckpointError
from megatron.parallel.adapter import WHOLE, Adapter
from megatron.parallel.expert_linear import ExpertAdapter


@dataclass(frozen=True, eq=False)
class AdapterSlice:
    """The part of a PEFT module's adapter that corresponds to our adapter of a projection.

    Attributes:
        module: The name of the module.
        rows: For each row of the projection, the corresponding row of the module, int64 [out].
        weight_rows: For each row of the module, the corresponding row of our layer, int64 [outputs
            of the module].
        index: The index of the projection among the module's adapted projections.
        adapted: The number of adapted projections in the module.
        projections: The number of projections in the module, with or without an adapter.
        is_transposed: Whether the module's weight is [in, out], as in GPT-2.
    """

    module: str
    rows: Tensor
    weight_rows: Tensor
    index: int
    adapted: int
    projections: int
    is_transposed: bool

    @cached_property
    def is_rearranged(self) -> bool:
        """Whether the module has more rows than the projection, or orders them differently."""
        same = torch.arange(len(self.weight_rows))
        return len(self.rows) < len(same) or not self.rows.equal(same)

    def block(self, width: int) -> slice:
        """Return the rows of A, or the columns of B, that belong to this projection.

        Args:
            width: The rank of each projection's adapter.
        """
        return slice(self.index * width, (self.index + 1) * width)


def adapter_slices(
    adapter: Adapter | ExpertAdapter,
    outputs: tuple[int, ...],
    modules: Sequence[str],
    conversion: TensorConversion | None,
) -> dict[str, AdapterSlice]:
    """Return the slice of a PEFT adapter for each adapted projection of a layer, by projection.

    Args:
        adapter: The layer's adapter, in a single process.
        outputs: The shape of the layer's weight without the input dimension; for experts, that of
            one expert's weight.
        modules: The Hugging Face modules that correspond to the layer.
        conversion: The conversion between the weights of the modules and the layer's weight. `None`
            means that the layer is a single module with our order of rows.

    Raises:
        CheckpointError: A projection is split over several modules.
    """
    rows = torch.arange(math.prod(outputs))
    # Convert a weight with a single column that contains the row indices.
    parts = [rows.view(-1, 1)] if conversion is None else conversion.split(rows.view(*outputs, 1))
    projections = {WHOLE: rows}
    if isinstance(adapter, Adapter):
        projections = {
            name: own_rows.flatten() for name, own_rows in adapter.by_projection(rows).items()
        }
    slices: dict[str, AdapterSlice] = {}
    for module, part in zip(modules, parts, strict=True):
        module_rows = part.flatten()
        position = torch.full_like(rows, -1)  # for each of our rows, its index in the module
        position[module_rows] = torch.arange(len(module_rows))
        positions = {name: position[own_rows] for name, own_rows in projections.items()}
        positions = {
            name: module_positions
            for name, module_positions in positions.items()
            if (module_positions >= 0).any()
        }
        adapted = {
            name: module_positions
            for name, module_positions in positions.items()
            if name in adapter
        }
        for index, (name, module_positions) in enumerate(adapted.items()):
            if module_positions.min() < 0:
                raise CheckpointError(
                    f"{module} contains only a part of {name}, which has one adapter here: "
                    "convert the merged weights with --saver hf"
                )
            is_transposed = part.dim() == 2 and part.shape[0] == 1 < part.numel()
            sizes = len(adapted), len(positions)
            slices[name] = AdapterSlice(
                module, module_positions, module_rows, index, *sizes, is_transposed
            )
    return slices


def join(kind: str, parts: Mapping[AdapterSlice, Tensor], lengths: Tensor | None) -> Tensor:
    """Combine the tensors of several projections into a tensor of their module's adapter.

    Args:
        kind: "a", "b" or "magnitude".
        parts: The tensors of all adapted projections, in order: A [rank, in], B [out, rank] or
            magnitudes [out].
        lengths: The norms of the rows of our layer's weight, [rows], which are the magnitudes of
            rows without an adapter. `None` if all rows have an adapter, or `kind` is "a" or "b".

    Returns:
        A [rank * adapted, in], B [outputs of the module, rank * adapted] or magnitudes [outputs of
        the module].
    """
    if kind == "a":
        return torch.cat(list(parts.values()))
    adapter_slice, first = next(iter(parts.items()))
    outputs = len(adapter_slice.weight_rows)
    if kind == "b":
        width = first.shape[1]
        whole = first.new_zeros(outputs, width * adapter_slice.adapted)
        for adapter_slice, part in parts.items():
            whole[adapter_slice.rows, adapter_slice.block(width)] = part
        return whole
    whole = first.new_empty(outputs)
    if lengths is not None:
        whole.copy_(lengths[adapter_slice.weight_rows])
    for adapter_slice, part in parts.items():
        whole[adapter_slice.rows] = part
    return whole
