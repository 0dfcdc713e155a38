"""Collectives over flat buffers that run while something else does: each returns what to wait for.

They are in place where a shard is a view of the whole. What they work on must live until then.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from megatron.parallel.layout import Axis

# torch 2.13 renamed both.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def start_all_reduce(whole: Tensor, axis: Axis) -> Any:
    """Sum `whole` over the axis, in place."""
    assert axis.group is not None, "a layout of several processes needs its groups"
    return dist.all_reduce(whole, group=axis.group, async_op=True)


def start_reduce_scatter(whole: Tensor, shard: Tensor, axis: Axis) -> Any:
    """Sum `whole` [n] over the axis; each process gets its part [n / size] in `shard`."""
    assert axis.group is not None, "a layout of several processes needs its groups"
    return _reduce_scatter(shard, whole, group=axis.group, async_op=True)


def start_all_gather(shard: Tensor, whole: Tensor, axis: Axis) -> Any:
    """Put all processes' `shard`s [n / size] into `whole` [n], in rank order."""
    assert axis.group is not None, "a layout of several processes needs its groups"
    return _all_gather(whole, shard, group=axis.group, async_op=True)
