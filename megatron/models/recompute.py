"""Recomputation of activations in the backward pass: the plan and its execution."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from megatron.config.training import TrainingOptions
from megatron.models.costs import MicroBatch
from megatron.parallel.collectives import all_gather
from megatron.parallel.layout import Axis


@dataclass(frozen=True)
class LayerGroup:
    """Consecutive layers that run together.

    Attributes:
        layers: Indices of the layers.
        recomputed: Whether the backward pass recomputes the layers, so that only the group's input
            is kept.
    """

    layers: range
    recomputed: bool


@dataclass(frozen=True)
class RecomputePlan:
    """The activations to recompute in the backward pass, trading time for memory.

    Attributes:
        granularity: "full" recomputes whole layers; "selective" recomputes the `modules` of each
            layer.
        method: For "full": "uniform" recomputes all layers in groups of `num_layers`; "block"
            recomputes the first `num_layers` layers, one by one.
        num_layers: With "uniform", layers per group; with "block", number of recomputed layers.
        split_inputs: For "full": whether each tensor rank keeps only its part of a group's input.
            The ranks gather the whole input for the recomputation.
        modules: For "selective": the names given in --recompute-modules.
    """

    granularity: str
    method: str = "uniform"
    num_layers: int = 1
    split_inputs: bool = False
    modules: tuple[str, ...] = ("core_attn",)

    @property
    def parts(self) -> frozenset[str]:
        """The parts of a layer that are recomputed; empty if whole layers are recomputed."""
        return frozenset(self.modules if self.granularity == "selective" else ())

    @classmethod
    def from_config(
        cls, training: TrainingOptions, *, split_inputs: bool = False
    ) -> RecomputePlan | None:
        """Return the plan that the flags describe, or `None` if nothing is recomputed.

        Args:
            training: The training flags.
            split_inputs: Whether each tensor rank keeps only its part of a group's input.
        """
        if training.recompute_granularity is None:
            return None
        method, count = training.recompute_method or "uniform", training.recompute_num_layers or 1
        modules = training.recompute_modules
        return cls(training.recompute_granularity, method, count, split_inputs, modules)

    def bytes_kept(self, per_layer: list[int], boundary: int, batch: MicroBatch) -> int:
        """Count the bytes that layers keep for the backward pass of a micro-batch.

        Args:
            per_layer: Bytes that each layer keeps if whole layers are not recomputed.
            boundary: Bytes of the hidden states between two layers.
            batch: The micro-batch.
        """
        if self.granularity != "full":
            return sum(per_layer)
        if self.split_inputs and batch.sequence == 1:
            boundary //= batch.tensor
        count, largest = len(per_layer), max(per_layer, default=0)
        if self.method == "uniform":
            groups = -(-count // self.num_layers)
            return groups * boundary + min(self.num_layers, count) * largest
        kept = per_layer[self.num_layers :]
        return (count - len(kept)) * boundary + max(sum(kept), largest)


def layer_groups(plan: RecomputePlan | None, layers: range) -> list[LayerGroup]:
    """Split a stage's layers (global indices) into groups that are kept or recomputed together."""
    if plan is None or plan.granularity != "full":
        return [LayerGroup(layers, False)]
    if plan.method == "uniform":
        step = plan.num_layers
        return [LayerGroup(layers[i : i + step], True) for i in range(0, len(layers), step)]
    groups = [LayerGroup(layers[i : i + 1], True) for i in range(len(layers[: plan.num_layers]))]
    kept = layers[plan.num_layers :]
    return [*groups, LayerGroup(kept, False)] if kept else groups


def recompute(
    function: Callable[..., Tensor],
    layers: range,
    x: Tensor,
    *others: Any,
    split_over: Axis,
    recompute_context: Callable[[], AbstractContextManager[None]] = nullcontext,
    stops_early: bool = True,
) -> Tensor:
    """Return function(layers, x, *others), keeping only the arguments for the backward pass.

    Args:
        function: The function to compute, and to recompute in the backward pass.
        layers: The first argument of the function.
        x: The second argument of the function, [s, b, h].
        *others: The other arguments of the function.
        split_over: The ranks that hold the same x, each of which keeps an equal part of it. A
            single process keeps it whole.
        recompute_context: A function that returns a context manager for recomputing `function`.
        stops_early: Whether to stop recomputing once the backward pass has what it needs, which may
            be in the middle of a module's forward pass.
    """
    if split_over.size == 1 or not torch.is_grad_enabled():
        return checkpointed(
            function,
            layers,
            x,
            *others,
            recompute_context=recompute_context,
            stops_early=stops_early,
        )
    shape, has_gradient = x.shape, x.requires_grad
    # A copy, because a view would keep the whole tensor alive.
    part = x.detach().reshape(-1).chunk(split_over.size)[split_over.rank].clone()
    inputs = [x]  # kept until the forward pass has used it

    def run(*others: Any) -> Tensor:
        if inputs:
            return function(layers, inputs.pop(), *others)
        gathered = all_gather(part, split_over).view(shape)
        return function(layers, gathered.requires_grad_(has_gradient), *others)

    return checkpointed(run, *others, recompute_context=recompute_context, stops_early=stops_early)


def checkpointed(
    function: Callable[..., Tensor],
    *inputs: Any,
    recompute_context: Callable[[], AbstractContextManager[None]] = nullcontext,
    stops_early: bool = True,
) -> Tensor:
    """Return function(*inputs), keeping only the inputs; the backward pass recomputes the rest.

    Args:
        function: The function to compute, and to recompute in the backward pass.
        *inputs: Its arguments.
        recompute_context: A function that returns a context manager for the recomputation.
        stops_early: Whether the backward pass stops recomputing once it has what it needs.
    """
    with set_checkpoint_early_stop(stops_early):
        out: Tensor = checkpoint(
            function,
            *inputs,
            use_reentrant=False,
            context_fn=lambda: (nullcontext(), recompute_context()),
        )
    return out


def discarding_output(
    result: Tensor, compute: Callable[[], Tensor]
) -> AbstractContextManager[None]:
    """Return a context manager that keeps operations from saving `result` for the backward pass.

    The backward pass recomputes the tensor instead.

    Args:
        result: The tensor. It may be freed after the block.
        compute: A function that computes the tensor again. It should use only tensors that are kept
            anyway.
    """
    return discarding_outputs((result,), lambda: (compute(),))


def discarding_outputs(
    results: Sequence[Tensor], compute: Callable[[], Sequence[Tensor]]
) -> AbstractContextManager[None]:
    """Return a context manager like `discarding_output`'s for tensors recomputed together.

    Args:
        results: The tensors. They may be freed after the block.
        compute: A function that computes all of them again.
    """
    recomputed = _Recomputed(results, compute)
    return torch.autograd.graph.saved_tensors_hooks(recomputed.pack, recomputed.unpack)


class _View(NamedTuple):
    """The number of a discarded tensor, and the shape and strides with which it was used."""

    number: int
    shape: torch.Size
    stride: tuple[int, ...]


class _Recomputed:
    """Tensors that are recomputed once, when the first backward operation needs one of them."""

    def __init__(self, results: Sequence[Tensor], compute: Callable[[], Sequence[Tensor]]) -> None:
        self._indices = {
            (result.data_ptr(), result.numel()): index
            for index, result in enumerate(results)
            if result.numel()
        }
        self._compute = compute
        self._values: Sequence[Tensor] = ()
        self._pending = 0  # backward operations that have not unpacked a tensor yet

    def pack(self, x: Tensor) -> Tensor | _View:
        index = self._indices.get((x.data_ptr(), x.numel()))
        if index is None:
            return x.detach()  # keeping its own result would create a reference cycle
        self._pending += 1
        return _View(index, x.shape, x.stride())

    def unpack(self, saved: Tensor | _View) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        if not self._values:
            with torch.no_grad():
                self._values = self._compute()
        value = self._values[saved.number]
        self._pending -= 1
        if self._pending <= 0:
            self._values = ()
        return value.as_strided(saved.shape, saved.stride)
