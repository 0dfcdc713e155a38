"""Samplers, which choose the samples of each data-parallel process, and the batch loader.

The samplers are pure functions of the number of consumed samples. A block consists of one
micro-batch of every data-parallel process, `m * D` samples. Samples are consumed in whole blocks,
so the global batch can change at any step to another multiple of a block. Worker processes load
batches in advance.
"""

from __future__ import annotations

import errno
import multiprocessing
import os
import re
import signal
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import context
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from megatron.data.sample import (
    COUNTED,
    LONGEST_SEGMENT,
    ROW_POSITION,
    SEGMENT_ENDS,
    Sample,
    SampleDataset,
)
from megatron.errors import DataError, ShortageError, shortage_of

_TILE = 128  # queries per thread block of the flash kernel
_PREFETCH = 4  # micro-batches that a worker loads in advance
_PARENT_CHECK_SECONDS = 1.0  # seconds between a worker's checks that its parent is alive
_LOST = re.compile(r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\) (?:is )?([^.]+)")
# Loaders that lost a worker; `build_loader` says why they are kept.
_failed_loaders: list[object] = []


@dataclass(frozen=True)
class _Sampler:
    """The base of both samplers: the position in the dataset and the data-parallel layout.

    Attributes:
        total_samples: The number of samples in the dataset.
        consumed_samples: The number of samples that all processes together have consumed.
        micro_batch: The number of samples in a micro-batch of one process, m.
        rank: The data-parallel rank of this process, r.
        size: The number of data-parallel processes, D.
    """

    total_samples: int
    consumed_samples: int
    micro_batch: int
    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.size and self.micro_batch > 0
        if self.total_samples < self.block:
            raise DataError(
                f"the dataset has {self.total_samples} samples, fewer than one micro-batch of "
                f"{self.micro_batch} on each of {self.size} data-parallel processes: give more "
                "data or a smaller --micro-batch-size"
            )

    @property
    def block(self) -> int:
        """The number of samples in a block: one micro-batch of every process."""
        return self.micro_batch * self.size


@dataclass(frozen=True)
class SingleSampler(_Sampler):
    """One pass over the samples in order: process r takes `[r * m, (r + 1) * m)` of each block.

    The samples of a step start at the number of consumed samples, regardless of the number of
    processes and the micro-batch size. Samples at the end that do not fill a block are dropped.

    Raises:
        DataError: The dataset is smaller than a block.
    """

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the micro-batches of this process until the dataset ends."""
        for start in range(self.consumed_samples, self.total_samples - self.block + 1, self.block):
            first = start + self.rank * self.micro_batch
            yield list(range(first, first + self.micro_batch))


@dataclass(frozen=True)
class CyclicSampler(_Sampler):
    """Endless passes over the samples, in a new random order each epoch.

    As in Megatron, the order depends only on the epoch's index and not on --seed.

    Attributes:
        data_sharding: Whether each process shuffles its own contiguous share. If not, the
            processes take turns in a single order of all samples. With the same micro-batch size,
            the samples of a step are then the same for any number of processes, except at the end
            of an epoch, where an incomplete block is dropped.

    Raises:
        DataError: The dataset is smaller than a block, or the consumed samples do not fill whole
            blocks of the current epoch.
    """

    data_sharding: bool = True

    def __post_init__(self) -> None:
        """Check that the consumed samples fill whole blocks."""
        super().__post_init__()
        if self.consumed_samples % self.epoch_samples % self.block:
            raise DataError(
                f"--dataloader-type cyclic: {self.consumed_samples} consumed samples are not a "
                f"whole number of micro-batches of {self.micro_batch} on {self.size} processes: "
                "resume with the original sizes, or use --dataloader-type single"
            )

    @property
    def epoch_samples(self) -> int:
        """The number of samples in one epoch, a multiple of a block."""
        return self.total_samples - self.total_samples % self.block

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the micro-batches of this process, epoch after epoch."""
        epoch, consumed = divmod(self.consumed_samples, self.epoch_samples)
        while True:
            order = self._epoch_order(epoch)
            for start in range(consumed // self.size, len(order), self.micro_batch):
                yield order[start : start + self.micro_batch].tolist()
            epoch, consumed = epoch + 1, 0

    def _epoch_order(self, epoch: int) -> Tensor:
        """Return the samples of this process in one epoch, `[epoch_samples / D]`."""
        generator = torch.Generator().manual_seed(epoch)
        if self.data_sharding:
            share = self.epoch_samples // self.size
            return self.rank * share + torch.randperm(share, generator=generator)
        whole = self.total_samples - self.total_samples % self.micro_batch
        order = torch.randperm(whole, generator=generator)
        # Megatron distributes the remainder too, which gives some processes one more micro-batch.
        return order[: self.epoch_samples][self.rank :: self.size]


@dataclass(eq=False)
class FilledDataset:
    """Every sample of a dataset once, then filler samples that complete the last micro-batches.

    Samples have an additional field, `COUNTED`, which is 0 in filler samples.

    Attributes:
        dataset: The dataset, which is not empty.
        block: The number of samples in one micro-batch of every process.
    """

    dataset: SampleDataset
    block: int

    def __len__(self) -> int:
        """Return the number of samples, a multiple of a block."""
        return -(-len(self.dataset) // self.block) * self.block

    def __getitem__(self, i: int) -> Sample:
        """Return sample `i`. Beyond the end of the dataset, its first samples are repeated."""
        count = len(self.dataset)
        return {**self.dataset[i % count], COUNTED: int(i < count)}


def build_loader(
    dataset: SampleDataset,
    sampler: Iterable[list[int]],
    *,
    num_workers: int,
    seed: int,
    pin_memory: bool = False,
) -> Iterator[dict[str, Tensor]]:
    """Yield micro-batches, which map the name of each field to its stacked values.

    The order depends only on the sampler, and no global random state is used, so a resumed run
    continues bit for bit.

    Args:
        dataset: The dataset to load from.
        sampler: An iterable of the sample indices of each micro-batch.
        num_workers: The number of processes that load in advance. 0 loads in this process.
        seed: The seed of the loader's private generator.
        pin_memory: Whether to copy batches to page-locked memory, which is only useful with a GPU.

    Raises:
        DataError: A sample cannot be read.
        ShortageError: There is too little shared memory.
    """
    loader: DataLoader[_ByValue] = DataLoader(
        dataset,  # type: ignore[arg-type]
        batch_sampler=sampler,
        num_workers=num_workers,
        collate_fn=_ByValue.collate,
        generator=torch.Generator().manual_seed(seed),
        worker_init_fn=_leave_signals_to_parent if num_workers else None,
        multiprocessing_context=_LoadingContext() if num_workers else None,
        prefetch_factor=_PREFETCH if num_workers else None,
        pin_memory=pin_memory,
    )
    existing = set(multiprocessing.active_children())
    try:
        batches = iter(loader)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise ShortageError(
            "there is too little shared memory for the locks of the data loading processes: "
            "enlarge /dev/shm (docker run --shm-size 1g), or use --num-workers 0 to load data in "
            "the training process"
        ) from error
    workers = set(multiprocessing.active_children()) - existing
    try:
        for batch in batches:
            yield batch.tensors
    except DataError as error:
        # For an error in a worker, PyTorch gives a traceback whose last line is the message.
        name = f"{DataError.__module__}.{DataError.__qualname__}: "
        raise DataError(str(error).rpartition(name)[2].strip()) from None
    finally:
        # When nothing refers to a loader, PyTorch closes it and waits for the thread that pins
        # memory. If that thread has read half a batch from a worker that was killed, it waits for
        # the rest forever. So keep a reference.
        if any(worker.exitcode for worker in workers):
            _failed_loaders.append(batches)


@contextmanager
def lost_workers() -> Iterator[None]:
    """Report a killed worker as a `ShortageError`.

    PyTorch raises its error in the main thread, wherever that thread happens to be. After any error
    in the body, the ends of further workers are ignored.

    Raises:
        ShortageError: A worker ended unexpectedly. This replaces PyTorch's RuntimeError.
    """
    try:
        yield
    except BaseException as error:
        # Otherwise PyTorch would raise an error for each loading process that ends from now on,
        # even while this process exits.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        lost = _LOST.search(str(error)) if isinstance(error, RuntimeError) else None
        if lost is None:
            raise
        raise ShortageError(
            f"a data loading process (pid {lost[1]}) ended unexpectedly: {lost[2]}. The usual "
            "cause is a lack of memory (check the system log): use fewer --num-workers, or 0 to "
            "load data in the training process"
        ) from error


class _LoadingProcess(context.ForkProcess):
    """A data loading process that exits on request, and silently if it runs out of memory."""

    def start(self) -> None:
        """Fork with SIGTERM blocked, so that `_leave_signals_to_parent` can wait for the signal.

        Otherwise a signal that arrives earlier would run the handler inherited from the training
        process. That handler only records the signal, so the training process would wait forever
        for this one to end.
        """
        if not hasattr(signal, "sigtimedwait"):
            super().start()
            return
        previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        try:
            super().start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)

    def run(self) -> None:
        """Load until the training process ends this worker.

        `lost_workers` reports any other end of a worker.
        """
        try:
            super().run()
        except Exception as error:
            if shortage_of(error) is None:
                raise
            os._exit(ShortageError.exit_code)


class _LoadingContext(context.ForkContext):
    Process = _LoadingProcess


class _ByValue:
    """A micro-batch that a worker sends by value.

    Plain tensors would be sent as handles of shared memory, and the training process would have to
    connect to the worker for each one. This takes 0.5 ms for a micro-batch of two fields and 2 ms
    for one of seven, and no other thread starts kernels during this time. In addition, containers
    often have little shared memory.
    """

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors

    @classmethod
    def collate(cls, samples: Sequence[Sample]) -> _ByValue:
        return cls(collate(samples))

    def __getstate__(self) -> dict[str, Any]:
        return {name: part.numpy() for name, part in self.tensors.items()}

    def __setstate__(self, arrays: dict[str, Any]) -> None:
        self.tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}

    def pin_memory(self) -> _ByValue:
        """Copy to page-locked memory; `DataLoader` calls this in a separate thread."""
        return _ByValue({name: part.pin_memory() for name, part in self.tensors.items()})


def collate(samples: Sequence[Sample]) -> dict[str, Tensor]:
    """Stack each field of the samples: `[b, ...]` for arrays, `[b]` for scalars.

    Each field keeps its type: int64, float64 for fractional labels and the reference model's
    log-probabilities, or int32 and float32 for a teacher's logits. The samples' `SEGMENT_ENDS`
    `[k]` become a single array: 0, the ends of the segments in the concatenated samples, and then
    empty segments. `LONGEST_SEGMENT` is added. `ROW_POSITION` `[7]` becomes `[p, 7]` for the p
    samples that have it.
    """
    batch = {}
    for name in {name: None for sample in samples for name in sample}:
        holders = [sample for sample in samples if name != ROW_POSITION or ROW_POSITION in sample]
        parts: list[Any] = [sample[name] for sample in holders]
        if name == SEGMENT_ENDS:
            starts = np.cumsum([0, *(int(ends[-1]) for ends in parts)])
            shifted = [ends + start for ends, start in zip(parts, starts, strict=False)]
            ends = np.concatenate([[0], *shifted])
            # Round up to the flash kernel's tiles. For a length of 1, it has a separate variant.
            tiles = -(-int(np.diff(ends).max()) // _TILE)
            batch[LONGEST_SEGMENT] = torch.empty((tiles * _TILE, 0), dtype=torch.int64)
            # Add empty segments up to a power of two, at least 16, so that micro-batches have few
            # shapes, because a CUDA graph is recorded for each. Runs without CUDA graphs do the
            # same, because the flash kernel's dropout depends on the number of segments.
            segments = 2 ** (max(len(ends) - 1, 16) - 1).bit_length()
            num_padding = segments + 1 - len(ends)
            batch[name] = torch.from_numpy(np.pad(ends, (0, num_padding), mode="edge"))
        else:
            batch[name] = torch.from_numpy(np.stack(parts))
    return batch


def _leave_signals_to_parent(worker: int) -> None:
    """Make a worker ignore signals that are sent to stop the whole job.

    The training process saves a checkpoint first and needs its data until then. A worker ends only
    when the training process closes the loader, which sends a SIGTERM, or when that process ends.
    On systems that do not report the sender of a signal (macOS), any SIGTERM ends the worker.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if not hasattr(signal, "sigtimedwait"):
        return
    # `_LoadingProcess.start` has blocked the signal here and, by inheritance, in the thread below.
    process = multiprocessing.parent_process()
    assert process is not None, "a worker has a parent"
    parent = process.pid

    def end_with_parent() -> None:
        # A parent that was killed sends no signal and reads no data. All workers keep the pipe
        # open, so a worker with half a batch in it would wait forever when it exits.
        while os.getppid() == parent:
            received = signal.sigtimedwait({signal.SIGTERM}, _PARENT_CHECK_SECONDS)
            if received is not None and received.si_pid == parent:
                break
        os._exit(0)

    threading.Thread(target=end_with_parent, daemon=True).start()
