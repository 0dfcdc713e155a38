"""The interface through which training runs the model, and its default implementation.

The other implementations are `recorded_passes.RecordedPasses` (CUDA graphs) and
`megatron.parallel.replicas.TorchDataParallel` (PyTorch's DistributedDataParallel).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torch import Tensor

from megatron.training.recipe import Batch

Losses = Mapping[str, Tensor]
PartForward = Callable[..., Tensor | Losses]
"""`Recipe.forward`: maps a part, a micro-batch and other arguments to hidden states or losses."""


class TrainingForward(Protocol):
    """An object that runs micro-batches through a part of the model in training."""

    may_run_ahead: bool
    """Whether a pass may begin before the previous update is known to have ended."""

    def begin_update(self) -> None:
        """Prepare for an update's first micro-batch."""

    def __call__(
        self, part: Any, batch: Batch, /, *arguments: Any, is_last: bool
    ) -> Tensor | Losses:
        """Return the result of `Recipe.forward`; `is_last` marks an update's last micro-batch."""

    def release(self) -> None:
        """Free memory that only training needs, after the last update."""


class DirectForward:
    """A `TrainingForward` that calls the recipe's forward without changes."""

    may_run_ahead = True

    def __init__(self, forward: PartForward) -> None:
        """Store the function."""
        self._forward = forward

    def begin_update(self) -> None:
        """Do nothing."""

    def __call__(
        self, part: Any, batch: Batch, /, *arguments: Any, is_last: bool
    ) -> Tensor | Losses:
        """Return hidden states or losses."""
        return self._forward(part, batch, *arguments)

    def release(self) -> None:
        """Do nothing."""
