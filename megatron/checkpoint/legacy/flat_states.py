"""`distrib_optim.pt`: optimizer states as the distributed optimizer of 23.06 and 23.08 keeps them.

For every virtual stage and gradient type three flat fp32 tensors, `param`, `exp_avg` and
`exp_avg_sq`. All parameters of the stage lie in them in reverse order of registration, padded at
the end to a multiple of the data-parallel size. The Llama-2 fork, and Megatron from late 2023,
cut them into buckets: a list of tensors, each padded.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint.deferred import DeferredTensor
from megatron.checkpoint.legacy.inert import TensorRef
from megatron.errors import CheckpointError

# Their keys, with the kinds of our states.
KINDS = {"param": "master", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}


def offsets(numels: Sequence[int]) -> list[int]:
    """Where each parameter begins, in order of registration: the last one at 0."""
    after = list(accumulate(reversed(numels), initial=0))
    return list(reversed(after[:-1]))


def deferred(parts: Sequence[Tensor], data_parallel: int) -> DeferredTensor:
    """The flat tensor of a stage, put together when it is read.

    Args:
        parts: of the parameters, in order of registration.
        data_parallel: processes among which it is cut.
    """
    total = sum(part.numel() for part in parts)
    padded = -(-total // data_parallel) * data_parallel
    return DeferredTensor((padded,), torch.float32, partial(_fill, parts, padded))


def _fill(parts: Sequence[Tensor], size: int) -> Tensor:
    flat = torch.zeros(size)
    for start, part in zip(offsets([part.numel() for part in parts]), parts, strict=True):
        flat[start : start + part.numel()] = part.reshape(-1)
    return flat


def find(flat: Any, shapes: Sequence[tuple[int, ...]]) -> list[TensorRef]:
    """Where each parameter's values are in a file's flat tensor, or in its buckets.

    Args:
        flat: a tensor of the file, or a list of them.
        shapes: of the parameters, in order of registration.

    Raises:
        CheckpointError: not such a tensor, or not as long as the parameters are.
    """
    buckets = flat if isinstance(flat, list) else [flat]
    if not all(isinstance(one, TensorRef) and len(one.shape) == 1 for one in buckets):
        raise CheckpointError("a flat optimizer state is missing, or no tensor")
    windows = list(_deal(buckets, list(reversed(shapes))))
    return list(reversed(windows))


def _deal(buckets: Sequence[TensorRef], shapes: Sequence[tuple[int, ...]]) -> Iterator[TensorRef]:
    """Windows into the buckets, in their order; a bucket is full where the next has no room."""
    index, start = 0, 0
    for shape in shapes:
        size = math.prod(shape)
        while index < len(buckets) and start + size > buckets[index].shape[0]:
            index, start = index + 1, 0
        if index == len(buckets):
            raise CheckpointError("flat optimizer states are shorter than the parameters")
        bucket = buckets[index]
        yield TensorRef(bucket.storage, bucket.offset + start, shape, _strides(shape))
        start += size
    if index != len(buckets) - 1:
        raise CheckpointError("flat optimizer states have more buckets than the parameters fill")


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
