"""The interface through which an optimizer and a training step use averaged gradients.

`gradients.GradientBuffer` keeps whole parameters (ZeRO stages 0 to 2), `sharded.ShardedModel` a
shard of each (stage 3).

`TorchDataParallel` is --DDP-impl torch: gradients averaged by PyTorch's DistributedDataParallel.
They stay where a `GradientBuffer` of one replica keeps them: PyTorch averages them in place.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from megatron.config.parallel import ParallelOptions
from megatron.parallel.buckets import Span
from megatron.parallel.collectives import Pending, mean_of, start_all_reduce
from megatron.parallel.fp8 import Fp8Products
from megatron.parallel.layout import Axis, Layout


class SharedWeights(Protocol):
    """Weights that processes share: each updates its own part."""

    def gather(self) -> None:
        """Make every process's update known to all. Collective over the replica axis."""

    def settle(self) -> None:
        """Return once `gather` is complete."""

    def wait(self) -> None:
        """Return once parameters may be read, or changed, outside of their model's forward pass.

        Collective over the replica axis.
        """

    def forget(self) -> None:
        """Record that all processes have given the parameters other values."""


class Gradients(Protocol):
    """The gradients of a model, averaged over the processes that hold the same weights."""

    @property
    def is_sharded(self) -> bool:
        """Whether each process keeps and updates only its own shard."""

    @property
    def shares_weights(self) -> bool:
        """Whether a process holds, between two passes, no more of the weights than it updates."""

    def owned(self, parameter: nn.Parameter, /) -> Span:
        """Return the elements of the flattened parameter that this process updates, if any."""

    def part(self, parameter: nn.Parameter, /) -> Tensor:
        """Return the weights that are `owned`: the parameter or, if sharded, a 1-D view of it."""

    def gradient(self, parameter: nn.Parameter, /) -> Tensor:
        """Return the gradient of `part`, in the same shape."""

    def compute_dtype(self, parameter: nn.Parameter, /) -> torch.dtype:
        """Return the weight's data type in the forward pass and in checkpoints."""

    def views(self, select: Callable[[nn.Parameter], bool], /) -> list[Tensor]:
        """Return the fewest 1-D tensors that hold the owned part of all selected gradients."""

    def share_weights(
        self,
        overlap_in: Sequence[nn.Module] | None,
        in_8_bits: Mapping[nn.Parameter, Fp8Products],
        /,
    ) -> SharedWeights | None:
        """Return the object that gathers updated weights; `None` if each process updates all."""

    def zero(self) -> None:
        """Forget all gradients. Call before the first micro-batch of an update."""

    def micro_batch(self, *, is_last: bool, wave: Hashable = None) -> AbstractContextManager[None]:
        """Wrap each backward pass of an update; `wave` says which gradients it computes."""

    def complete(self) -> None:
        """Zero the gradients that no backward pass has reached, before any gradient is read."""

    def reduce(self) -> None:
        """Finish the average. Collective over the replica axis."""


def shares_weights(config: ParallelOptions, layout: Layout) -> bool:
    """Return whether each process holds only a shard of the weights (ZeRO stage 3).

    A single replica always holds all of them.
    """
    return config.zero_stage == 3 and max(layout.replica.size, layout.expert_replica.size) > 1


# torch 2.13 renamed it.
_SYNC_BUFFERS = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    else "broadcast_buffers"
)


class TorchDataParallel:
    """The forward pass of a model whose backward pass averages gradients over `axis`.

    Construction and calls are collective.

    Args:
        model: The model, without pipeline stages: each backward pass directly follows its forward
            pass.
        forward: The function to call with the model and the arguments of `__call__`.
        axis: The processes that hold the same weights.
    """

    may_run_ahead = False

    def __init__(self, model: nn.Module, forward: Callable[..., Any], axis: Axis) -> None:
        """Wrap the model in PyTorch's DistributedDataParallel."""
        options: dict[str, Any] = {"process_group": axis.group, _SYNC_BUFFERS: False}
        self._axis = axis
        self._under_way: list[Pending] = []
        with axis.joining("start of DistributedDataParallel"):
            self._replica = DistributedDataParallel(_Forward(model, forward), **options)
        # The hook has no annotations, because PyTorch compares them, and ours are strings. It is
        # held where the garbage collector does not look: with a reference back to this object,
        # neither would ever be freed.
        average: Any = weakref.WeakMethod(self._average)
        self._replica.register_comm_hook(None, lambda _, bucket: average()(bucket))

    def begin_update(self) -> None:
        """Do nothing."""

    def release(self) -> None:
        """Do nothing."""

    def __call__(self, part: nn.Module, /, *args: Any, is_last: bool) -> Any:
        """Run one micro-batch. An update's last backward pass averages the sums of all ranks."""
        with nullcontext() if is_last else self._replica.no_sync():
            return self._replica(*args)

    def _average(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Start PyTorch's own all-reduce, under its name in the journal.

        After the last bucket there is nothing left to compute, so the process waits for all buckets
        here, where the awaited communication can be reported.
        """
        gradients = bucket.buffer()
        pending = start_all_reduce(gradients, self._axis, mean_of(gradients, self._axis))
        self._under_way.append(pending)
        if bucket.is_last():
            for each in self._under_way:
                each.wait()
            self._under_way.clear()
        assert pending.transfer is not None, "a single process has nothing to average"
        return pending.transfer.future().then(lambda _: gradients)


class _Forward(nn.Module):
    """A module for PyTorch to wrap, whose forward calls `function` with the model."""

    def __init__(self, model: nn.Module, function: Callable[..., Any]) -> None:
        super().__init__()
        self.model = model
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(self.model, *args)
