"""The parts of PEFT's adapters that correspond to our adapters.

PEFT gives a single adapter to a module of `transformers`. If the module computes several of our
projections at once (Phi-3's `qkv_proj`), its adapter combines the adapters of those projections: A
stacks their A's, B has their B's as blocks, and the rank is the sum of their ranks. A module's rows
may also be in a different order from ours (GPT-J's queries, GPT-OSS's experts).
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
    """The part of a module's adapter that corresponds to the adapter of a projection.

    Attributes:
        module: The name of the module.
        rows: For each row of the projection, the corresponding row of the module, int64 [out].
        weight_rows: For each row of the module, the corresponding row of our layer, int64 [outputs
            of the module].
        index: The index of the projection among the module's adapted projections.
        adapted: The number of the module's adapted projections.
        projections: The number of all projections of the module, with or without an adapter.
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
    """Return the part of a module's adapter that corresponds to each adapted projection of a layer.

    Args:
        adapter: The layer's adapter, in a single process.
        outputs: The shape of the layer's weight without the input dimension, for one expert.
        modules: The modules that make up the layer.
        conversion: The conversion of the layer's weight to the weights of the modules; `None` if
            the layer is a single module with our rows.

    Raises:
        CheckpointError: A projection is split over several modules.
    """
    rows = torch.arange(math.prod(outputs))
    # The rows of a weight with a single column.
    parts = [rows.view(-1, 1)] if conversion is None else conversion.split(rows.view(*outputs, 1))
    projections = {WHOLE: rows}
    if isinstance(adapter, Adapter):
        projections = {
            name: own_rows.flatten() for name, own_rows in adapter.by_projection(rows).items()
        }
    slices: dict[str, AdapterSlice] = {}
    for module, part in zip(modules, parts, strict=True):
        module_rows = part.flatten()
        position = torch.full_like(rows, -1)  # the index in the module of each of our rows
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
    """Return a tensor of a module's adapter, made from the tensors of its projections.

    Args:
        kind: "a", "b" or "magnitude".
        parts: The tensors of all adapted projections, in order: A [rank, in], B [out, rank] or
            magnitudes [out].
        lengths: The norms of the rows of our layer's weight, [rows], which are the magnitudes of
            rows without an adapter; `None` if all rows have one, and for other kinds.
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
