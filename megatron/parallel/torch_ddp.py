"""`--DDP-impl torch`: gradients averaged by PyTorch's own DistributedDataParallel.

Gradients stay where a `GradientBuffer` of one replica keeps them: PyTorch averages them in place.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from megatron.parallel.collectives import Pending, mean_of, start_all_reduce
from megatron.parallel.layout import Axis

# torch 2.13 renamed it.
_SYNC_BUFFERS = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    else "broadcast_buffers"
)


class TorchDataParallel:
    """The forward of a model whose gradients the backward averages over `axis`.

    Collective, to construct and to call.

    Args:
        model: not cut into pipeline stages: its backward passes follow its forward passes.
        forward: called with the model and what `__call__` is given.
        axis: who holds the same weights.
    """

    may_run_ahead = False

    def __init__(self, model: nn.Module, forward: Callable[..., Any], axis: Axis) -> None:
        options: dict[str, Any] = {"process_group": axis.group, _SYNC_BUFFERS: False}
        self._axis = axis
        self._under_way: list[Pending] = []
        with axis.joining("start of DistributedDataParallel"):
            self._replica = DistributedDataParallel(_Forward(model, forward), **options)
        # A function without annotations: PyTorch compares them, and ours are texts. It is held
        # where the garbage collector does not look: with a way back we would never be freed.
        average: Any = weakref.WeakMethod(self._average)
        self._replica.register_comm_hook(None, lambda _, bucket: average()(bucket))

    def begin_update(self) -> None:
        """Do nothing."""

    def release(self) -> None:
        """Do nothing."""

    def __call__(self, part: nn.Module, /, *args: Any, is_last: bool) -> Any:
        """Run one micro-batch; the backward of an update's last one averages the sums of all."""
        with nullcontext() if is_last else self._replica.no_sync():
            return self._replica(*args)

    def _average(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """PyTorch's own all-reduce, under its name in the journal.

        Behind the last bucket there is nothing left to compute, so that all are waited for here,
        where it can be seen for what.
        """
        gradients = bucket.buffer()
        pending = start_all_reduce(gradients, self._axis, mean_of(gradients, self._axis))
        self._under_way.append(pending)
        if bucket.is_last():
            for each in self._under_way:
                each.wait()
            self._under_way.clear()
        assert pending.transfer is not None, "alone there is nothing to average"
        return pending.transfer.future().then(lambda _: gradients)


class _Forward(nn.Module):
    """What PyTorch may wrap: the model, called by `function`."""

    def __init__(self, model: nn.Module, function: Callable[..., Any]) -> None:
        super().__init__()
        self.model = model
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(self.model, *args)
