"""Fill a state from a checkpoint: everything is checked before anything is changed."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from megatron.checkpoint.entries import State, flatten
from megatron.checkpoint.manifest import describe
from megatron.checkpoint.reader import Reader
from megatron.checkpoint.shard import PIECE, THREADS, bytes_of
from megatron.device import Device, Ferries
from megatron.errors import CheckpointError

_SHOWN = 10  # problems listed in a message


def restore(
    reader: Reader,
    entries: State,
    *,
    prefixes: Iterable[str] = (),
    cast: bool = False,
) -> None:
    """Copy the checkpoint's values into the entries' tensors, in place.

    Args:
        reader: an opened checkpoint.
        entries: what to fill; each rank passes its own.
        prefixes: the checkpoint may hold nothing under these ("model.") that no entry asks for.
            Only for ranks that hold all of it: not with pipeline parallelism.
        cast: allow another number type in the checkpoint.

    Raises:
        CheckpointError: lists all tensors that are missing, left over, or of another shape or
            type. Nothing has been changed then.
    """
    problems = find_problems(reader, entries, prefixes=prefixes, cast=cast)
    if problems:
        more = f" and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise CheckpointError(
            f"{reader.path} does not fit this run: " + "; ".join(problems[:_SHOWN]) + more
        )
    # A native checkpoint's values come from the disk when they are copied: several at a time.
    copying: deque[Future[None]] = deque()
    ferries = Ferries(PIECE)
    with ThreadPoolExecutor(THREADS) as pool:
        for name, entry in flatten(entries):
            values = reader.read(name, entry.box, global_shape=entry.global_shape)
            copying.append(pool.submit(_copy, entry.tensor, values, ferries))
            if len(copying) > THREADS:  # so that not all values wait in memory
                copying.popleft().result()
        for future in copying:
            future.result()


@torch.no_grad()  # each thread has its own switch
def _copy(tensor: Tensor, values: Tensor, ferries: Ferries) -> None:
    is_plain = tensor.is_contiguous() and values.is_contiguous() and tensor.numel() > 0
    if tensor.device.type == "cpu" or tensor.dtype != values.dtype or not is_plain:
        with Device(tensor.device).as_current():  # a thread starts with the first GPU
            tensor.copy_(values)
    else:
        ferries.to(tensor.device).bring(bytes_of(values), bytes_of(tensor))


def find_problems(
    reader: Reader,
    entries: State,
    *,
    prefixes: Iterable[str] = (),
    cast: bool = False,
) -> list[str]:
    """What keeps the checkpoint from filling the entries, a line each; reads no tensor."""
    held = set(reader.names())
    problems = [f"{name} is missing" for name in sorted(set(entries) - held)]
    under = tuple(prefixes)
    problems += [
        f"{name} has no place in this network"
        for name in sorted(held - set(entries))
        if name.startswith(under)
    ]
    for name, entry in sorted(flatten(entries), key=lambda pair: pair[0]):
        if name not in held:
            continue
        here = (str(entry.tensor.dtype), tuple(entry.global_shape))
        there = (str(reader.dtype(name)), reader.global_shape(name))
        if here[1] != there[1] or (here[0] != there[0] and not cast):
            problems.append(f"{name} is {describe(*there)}, not {describe(*here)}")
    return list(dict.fromkeys(problems))
