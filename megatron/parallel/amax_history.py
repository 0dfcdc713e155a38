"""Delayed scaling: largest magnitudes of earlier updates, by which fp8 casts scale.

A cast that scales by its own tensor's largest magnitude (amax) reads the tensor twice. Scaled by
what the tensors of earlier updates held, it reads once, and finds this update's amax on the way
(Micikevicius et al., "FP8 Formats for Deep Learning", 2022; Transformer Engine's DelayedScaling).

A layer's input, weight and gradient have a slot each. Within an update its `held` is constant and
its `found` only rises, so neither the number nor the order of micro-batches matters, nor whether
one is computed again. Once an update, all slots of a process are moved on together, after one
maximum over every process that holds a part or a replica of the same layers: tensor, context and
data-parallel ranks. They then all have the same scales, which follow from global batches and not
from how these were divided, but that a process divides its losses by the number of its
micro-batches, and so gradients. Nothing of it waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.config.precision import PrecisionConfig
from megatron.parallel.collectives import all_reduce
from megatron.parallel.layout import Layout

ROLES = ("input", "weight", "gradient")


@dataclass(frozen=True)
class DelayedScaling:
    """How scales follow from the history.

    Attributes:
        length: updates that are remembered.
        takes_max: of all of them, else of the last alone.
        margin: scales are so many powers of 2 smaller than the amax would allow.
        interval: updates from one choice of scales to the next.
    """

    length: int = 1
    takes_max: bool = False
    margin: int = 0
    interval: int = 1

    @classmethod
    def from_config(cls, precision: PrecisionConfig) -> DelayedScaling:
        return cls(
            length=precision.fp8_amax_history_len,
            takes_max=precision.fp8_amax_compute_algo == "max",
            margin=precision.fp8_margin,
            interval=precision.fp8_interval,
        )


@dataclass(frozen=True)
class Slot:
    """What casts of one tensor read and write.

    Attributes:
        held: the amax to scale by, fp32 [].
        found: the largest magnitude in this update so far, fp32 [].
        has_begun: whether `held` means something: not before the first update of a history, in
            which casts scale by what they hold, as `--fp8-recipe tensorwise` does.
    """

    held: Tensor
    found: Tensor
    has_begun: Callable[[], bool]


@dataclass(frozen=True)
class LayerSlots:
    """Those of one layer; None: its casts scale by what they hold."""

    input: Slot | None = None
    weight: Slot | None = None
    gradient: Slot | None = None


class AmaxHistory:
    """The slots of all layers of this process, in three buffers.

    Args:
        layers: their names, which no other process gives to another layer.
        largest: number that the fp8 format of each role ends at, in the order of `ROLES`.
        scaling: see there.
        layout: whose tensor ranks have parts of these layers, whose replicas have copies.
        device: of the layers' tensors.
    """

    def __init__(
        self,
        layers: Sequence[str],
        largest: Sequence[float],
        scaling: DelayedScaling,
        layout: Layout,
        device: torch.device,
    ) -> None:
        self._layers = {name: place for place, name in enumerate(layers)}
        self._scaling = scaling
        self._layout = layout
        self._has_begun = False
        shape = (len(layers), len(ROLES))
        self._largest = torch.tensor(largest, dtype=torch.float32, device=device)
        self._held = torch.zeros(shape, device=device)
        self._found = torch.zeros(shape, device=device)
        self._history = torch.zeros(*shape, scaling.length, device=device)  # the last one first

    def slots(self, layer: str) -> LayerSlots:
        """Of a layer."""
        place = self._layers[layer]
        return LayerSlots(
            *(
                Slot(held, found, lambda: self._has_begun)
                for held, found in zip(self._held[place], self._found[place], strict=True)
            )
        )

    @torch.no_grad()
    def update(self, iteration: int) -> None:
        """Move on: what was found becomes the newest of the history. Collective.

        What is not finite leaves no trace, and where a gradient is not, none of the gradients
        does: a loss scale that is too high, and will be lowered, has made them large. A tensor
        that was zero keeps its scale.

        Args:
            iteration: updates of the run so far, this one included.
        """
        scaling, found = self._scaling, self._found_by_all()
        older = self._history[..., :-1]
        self._history.copy_(torch.cat((found.unsqueeze(-1), older), dim=-1))
        if iteration % scaling.interval == 0 or not self._has_begun:
            chosen = self._history.amax(dim=-1) if scaling.takes_max else found
            kept = torch.where(self._held > 0, self._held, self._largest)  # a scale of 1
            self._held.copy_(torch.where(chosen > 0, chosen * 2.0**scaling.margin, kept))
        self._found.zero_()
        self._has_begun = True

    def _found_by_all(self) -> Tensor:
        """What was found here and on the other processes, [layers, 3], 0 for what is dropped."""
        finite = self._found.isfinite()
        overflow = ~finite[:, ROLES.index("gradient")].all()
        # Without nan: no backend says what a maximum makes of it.
        clean = self._found.where(finite, 0.0)
        packed = torch.cat((clean.flatten(), overflow.float().unsqueeze(0)))
        for axis in (self._layout.tensor, self._layout.replica):
            all_reduce(packed, axis, dist.ReduceOp.MAX)
        found = packed[:-1].view_as(clean)
        found[:, ROLES.index("gradient")] *= 1 - packed[-1]
        return found

    def named_tensors(self) -> dict[str, Tensor]:
        """What a checkpoint holds: for each layer `NAME.held` [3], all zero before the first
        update, and `NAME.history` [3, length], the newest first. The same on every process that
        has the layer."""
        tensors = {}
        for name, place in self._layers.items():
            tensors[f"{name}.held"] = self._held[place]
            tensors[f"{name}.history"] = self._history[place]
        return tensors

    def after_loading(self) -> None:
        """Call when the named tensors have been filled. Waits for the device."""
        self._has_begun = bool((self._held > 0).any())
