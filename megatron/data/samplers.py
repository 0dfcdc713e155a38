"""Which samples each data-parallel process takes next: pure functions of consumed samples.

A block is one micro-batch of every data-parallel process, `m * D` samples. Samples are consumed in
whole blocks, so the global batch may change at any step to another multiple of a block.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron.errors import DataError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class _Sampler:
    """What both samplers count with.

    Attributes:
        total_samples: samples in the dataset.
        consumed_samples: samples that all processes together have taken before.
        micro_batch: m, samples of one process at a time.
        rank: r, this process among the D data-parallel ones.
        size: D, data-parallel processes.
    """

    total_samples: int
    consumed_samples: int
    micro_batch: int
    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.size
        assert self.micro_batch > 0
        if self.total_samples < self.block:
            raise DataError(
                f"the dataset has {self.total_samples} samples, fewer than one micro-batch of "
                f"{self.micro_batch} on each of {self.size} data-parallel processes: give more "
                "data, or a smaller --micro-batch-size"
            )

    @property
    def block(self) -> int:
        """Samples of one micro-batch of every process."""
        return self.micro_batch * self.size


@dataclass(frozen=True)
class SingleSampler(_Sampler):
    """The dataset's samples in order, once: process r takes `[r * m, (r + 1) * m)` of each block.

    The samples of a step are those from the consumed count on, for any number of processes and any
    micro-batch. What does not fill a block at the end is dropped.
    """

    def __iter__(self) -> Iterator[list[int]]:
        """Micro-batches of this process, until the dataset ends."""
        last = self.total_samples - self.block
        for start in range(self.consumed_samples, last + 1, self.block):
            first = start + self.rank * self.micro_batch
            yield list(range(first, first + self.micro_batch))


@dataclass(frozen=True)
class CyclicSampler(_Sampler):
    """The dataset's samples in a new random order each epoch, without end.

    The order is drawn from the epoch's number alone, as in Megatron (not from --seed).

    Attributes:
        data_sharding: each process shuffles its own contiguous share; else the processes take
            turns in one order of all samples, and the samples of a step are those of its place in
            that order for any number of processes.
    """

    data_sharding: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        done = self.consumed_samples % self.epoch_samples
        if done % self.block:
            raise DataError(
                f"--dataloader-type cyclic: {self.consumed_samples} consumed samples are not whole "
                f"micro-batches of {self.micro_batch} on each of {self.size} data-parallel "
                "processes: resume with the sizes that the run began with, or use single"
            )

    @property
    def epoch_samples(self) -> int:
        """Samples of one epoch: whole blocks."""
        return self.total_samples - self.total_samples % self.block

    def __iter__(self) -> Iterator[list[int]]:
        """Micro-batches of this process, epoch after epoch."""
        epoch, done = divmod(self.consumed_samples, self.epoch_samples)
        while True:
            mine = self._epoch_order(epoch)
            for start in range(done // self.size, len(mine), self.micro_batch):
                yield mine[start : start + self.micro_batch].tolist()
            epoch, done = epoch + 1, 0

    def _epoch_order(self, epoch: int) -> torch.Tensor:
        """Samples of this process in one epoch, `[epoch_samples / D]`."""
        import torch

        generator = torch.Generator().manual_seed(epoch)
        if self.data_sharding:
            share = self.epoch_samples // self.size
            return self.rank * share + torch.randperm(share, generator=generator)
        whole = self.total_samples - self.total_samples % self.micro_batch
        order = torch.randperm(whole, generator=generator)
        # Megatron deals out the rest too, which gives some processes one micro-batch more.
        return order[: self.epoch_samples][self.rank :: self.size]
