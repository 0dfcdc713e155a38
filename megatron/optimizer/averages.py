"""Averages of the weights over updates, in fp32. Each process averages the weights it updates.

Averaged weights often give a lower loss than the latest weights, especially while the learning rate
is high.

- An exponential moving average (EMA) moves toward the weights in each update. For the first
  1 / (1 - decay) updates it is the plain mean of the updated weights, so the initial weights have
  no influence.
- The latest weight average (LAWA; Kaddour, "Stop wasting my time!", 2022) is the mean of the latest
  few snapshots, which are taken at regular intervals.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from megatron.config.checkpoint import AVERAGES, SNAPSHOTS
from megatron.config.optimizer import OptimizerConfig
from megatron.optimizer.packed import PackedTensor, State, values_of


class WeightAverage(Protocol):
    """An average of the weights over updates.

    Attributes:
        kind: The kind of average, "ema" or "lawa".
        count: The number of updates (EMA) or snapshots (LAWA) that have been included.
    """

    kind: str
    count: int

    def update(self, updates: int) -> None:
        """Include the weights after an update; with LAWA, only if a snapshot is due.

        Args:
            updates: The number of updates so far, including this one.
        """

    def values(self, index: int) -> Tensor:
        """Return the average of the weight with this index, in fp32."""

    def tensor_sets(self) -> dict[str, list[Tensor]]:
        """Return the tensors to save, one for each weight, by name prefix.

        Tensors with the prefix `AVERAGES` may be copies. The result is empty while nothing has been
        included.
        """

    def prepare(self, is_saved: Callable[[str], bool], count: int) -> dict[str, list[Tensor]]:
        """Return the tensors into which to load a checkpoint, one for each weight, by name prefix.

        This sets `count`, to 0 if the checkpoint has no tensors to load.

        Args:
            is_saved: A function that returns whether the checkpoint contains tensors with a given
                name prefix.
            count: The value of `count` in the saved run.
        """


class MovingAverage:
    """An exponential moving average.

    Args:
        weights: The weights to average, in fp32 or packed.
        decay: The fraction of the average that each update keeps.
    """

    kind = "ema"

    def __init__(self, weights: Sequence[State], decay: float) -> None:
        """Allocate the average."""
        self.count = 0
        self._weights, self._decay = list(weights), decay
        self._averages = [new_like(weight) for weight in weights]
        self._in_one_call = not any(isinstance(weight, PackedTensor) for weight in weights)

    @torch.no_grad()
    def update(self, updates: int) -> None:
        """Move the average toward the weights."""
        self.count += 1
        step = 1 - min(self._decay, 1 - 1 / self.count)
        if self._in_one_call and self._weights:
            torch._foreach_lerp_(self._averages, list(map(values_of, self._weights)), step)
            return
        for average, weight in zip(self._averages, self._weights, strict=True):
            average.lerp_(values_of(weight), step)

    def values(self, index: int) -> Tensor:
        """Return the average of the weight with this index."""
        return self._averages[index]

    def tensor_sets(self) -> dict[str, list[Tensor]]:
        """Return the tensors to save."""
        return {AVERAGES: self._averages} if self.count else {}

    def prepare(self, is_saved: Callable[[str], bool], count: int) -> dict[str, list[Tensor]]:
        """Return the tensors to load."""
        self.count = count if is_saved(AVERAGES) else 0
        return self.tensor_sets()


class LatestAverage:
    """The mean of the latest snapshots.

    Args:
        weights: The weights to average, in fp32 or packed.
        interval: The number of updates between snapshots.
        window: The maximum number of snapshots in the mean.
    """

    kind = "lawa"

    def __init__(self, weights: Sequence[State], interval: int, window: int) -> None:
        """Create an average without snapshots."""
        self.count = 0
        self._weights, self._interval, self._window = list(weights), interval, window
        self._snapshots: list[list[Tensor]] = []  # the newest first

    @torch.no_grad()
    def update(self, updates: int) -> None:
        """Take a snapshot if one is due."""
        if updates % self._interval == 0:
            self.count += 1
            for snapshot, weight in zip(self._add(), self._weights, strict=True):
                snapshot.copy_(values_of(weight))

    def _add(self) -> list[Tensor]:
        """Add a snapshot, reusing the oldest one if the window is full, and return its tensors."""
        is_full = len(self._snapshots) == self._window
        new = self._snapshots.pop() if is_full else [new_like(weight) for weight in self._weights]
        self._snapshots.insert(0, new)
        return new

    def values(self, index: int) -> Tensor:
        """Return the mean of the weight with this index."""
        first, *remaining = [snapshot[index] for snapshot in self._snapshots]
        total = first.clone()
        for value in remaining:
            total += value
        return total / len(self._snapshots)

    def tensor_sets(self) -> dict[str, list[Tensor]]:
        """Return the tensors to save: the mean and the snapshots."""
        if not self._snapshots:
            return {}
        means = {AVERAGES: [self.values(index) for index in range(len(self._weights))]}
        return means | self._by_age()

    def prepare(self, is_saved: Callable[[str], bool], count: int) -> dict[str, list[Tensor]]:
        """Return the tensors to load: the newest saved snapshots, at most a full window."""
        self.count, self._snapshots = 0, []
        while len(self._snapshots) < self._window and is_saved(_snapshot(len(self._snapshots))):
            self._add()
            self.count = count
        return self._by_age()

    def _by_age(self) -> dict[str, list[Tensor]]:
        return {_snapshot(age): tensors for age, tensors in enumerate(self._snapshots)}


def new_average(config: OptimizerConfig, weights: Sequence[State]) -> WeightAverage | None:
    """Return the average that the flags request, or `None`.

    Args:
        config: The optimizer's options.
        weights: The weights that this process updates.
    """
    if config.ema_decay is not None:
        return MovingAverage(weights, config.ema_decay)
    if config.lawa_interval is not None:
        return LatestAverage(weights, config.lawa_interval, config.lawa_window)
    return None


def _snapshot(age: int) -> str:
    """Return the name prefix of a snapshot's tensors; the newest has age 0."""
    return f"{SNAPSHOTS}{age}."


def new_like(weight: State) -> Tensor:
    """Return fp32 zeros with the shape and device of a weight."""
    return torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
