"""Micro-batches from a dataset and a sampler, loaded ahead by worker processes."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader

from megatron.data.document_ends import join_ends
from megatron.data.sample import SEGMENT_ENDS, Sample, SampleDataset
from megatron.errors import UserError

_PREFETCH = 4  # micro-batches a worker holds ready
_LOOK_EVERY = 1.0  # seconds between a worker's looks at whether its parent lives
_LOST = re.compile(r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\) (?:is )?([^.]+)")
_broken: list[object] = []  # loaders that lost a worker: see `build_loader`


def build_loader(
    dataset: SampleDataset,
    sampler: Iterable[list[int]],
    *,
    num_workers: int,
    seed: int,
    pin_memory: bool = False,
) -> Iterator[dict[str, Tensor]]:
    """Iterate over micro-batches: the parts of a sample by name, stacked, int64.

    The order is the sampler's alone, and no global random state is drawn from, so that a resumed
    run continues bit for bit.

    Args:
        sampler: yields the sample numbers of each micro-batch.
        num_workers: processes that load ahead; 0 loads in this one.
        seed: of the loader's private generator.
        pin_memory: copy batches to page-locked memory; only useful with a GPU.
    """
    loader: DataLoader[_ByValue] = DataLoader(
        dataset,  # type: ignore[arg-type]
        batch_sampler=sampler,
        num_workers=num_workers,
        collate_fn=_collate_by_value,
        generator=torch.Generator().manual_seed(seed),
        worker_init_fn=_leave_signals_to_parent if num_workers else None,
        prefetch_factor=_PREFETCH if num_workers else None,
        pin_memory=pin_memory,
    )
    others = set(multiprocessing.active_children())
    batches = iter(loader)
    workers = set(multiprocessing.active_children()) - others
    try:
        for batch in batches:
            yield batch.tensors
    finally:
        # PyTorch closes a loader that nobody holds, and waits then for the thread that pins. One
        # that has read half of a batch, whose worker was killed, waits for the rest for ever.
        if any(worker.exitcode for worker in workers):
            _broken.append(batches)


@contextmanager
def lost_workers() -> Iterator[None]:
    """Where a worker is killed, say so. PyTorch tells it wherever the main thread is just then.

    Raises:
        UserError: instead of PyTorch's RuntimeError.
    """
    try:
        yield
    except RuntimeError as error:
        lost = _LOST.search(str(error))
        if lost is None:
            raise
        raise UserError(
            f"a process that loads data (pid {lost[1]}) has gone: {lost[2]}. Most often memory was "
            "short (the system's log says so): use fewer --num-workers, or 0 to load in the "
            "training process itself"
        ) from error


class _ByValue:
    """A micro-batch as a worker sends it.

    Bare tensors would come as handles of shared memory, and for each one the training process
    would connect to the worker: half a millisecond for a micro-batch of two parts, 2 for one of
    seven, in which its other threads start no kernels. And containers have little shared memory.
    """

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors

    def __reduce__(self) -> tuple[Any, ...]:
        return _from_arrays, ({name: part.numpy() for name, part in self.tensors.items()},)

    def pin_memory(self) -> _ByValue:
        """In page-locked memory: what `DataLoader` calls in a thread of its own."""
        return _ByValue({name: part.pin_memory() for name, part in self.tensors.items()})


def _from_arrays(arrays: Mapping[str, NDArray[Any]]) -> _ByValue:
    return _ByValue({name: torch.from_numpy(array) for name, array in arrays.items()})


def _collate_by_value(samples: Sequence[Sample]) -> _ByValue:
    return _ByValue(collate(samples))


def collate(samples: Sequence[Sample]) -> dict[str, Tensor]:
    """Stack each part of the samples: `[b, ...]` where it is an array, `[b]` where it is a number;
    `SEGMENT_ENDS` are joined, see `join_ends`.

    All int64, but for labels that are numbers with a fraction: float64.
    """
    columns: dict[str, list[Any]]
    columns = {name: [sample[name] for sample in samples] for name in samples[0]}
    return {
        name: torch.from_numpy(join_ends(values) if name == SEGMENT_ENDS else np.stack(values))
        for name, values in columns.items()
    }


def _leave_signals_to_parent(worker: int) -> None:
    """Let a worker outlive the signals that tell the whole job to stop.

    The training process saves a checkpoint first and needs its data until then. Only a SIGTERM
    that the training process itself sends, when it closes the loader, or its end ends the worker.
    Where the system does not say who sent a signal (macOS), every SIGTERM ends it.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if not hasattr(signal, "sigtimedwait"):
        return
    # Blocked here and, by inheritance, in the thread that waits for it.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    parent = multiprocessing.parent_process()
    assert parent is not None and parent.pid is not None, "a worker has a parent"
    threading.Thread(target=_end_with_parent, args=(parent.pid,), daemon=True).start()


def _end_with_parent(parent: int) -> None:
    """A parent that was killed asks nothing, and reads nothing: a worker that has half a batch in
    the pipe, which all workers keep open, would wait at its own end for ever."""
    while os.getppid() == parent:
        received = signal.sigtimedwait({signal.SIGTERM}, _LOOK_EVERY)
        if received is not None and received.si_pid == parent:
            break
    os._exit(0)
