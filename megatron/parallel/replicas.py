"""The interface through which an optimizer and a training step use averaged gradients.

`gradients.GradientBuffer` keeps whole parameters (ZeRO stages 0 to 2), and `sharded.ShardedModel`
keeps a shard of each parameter (stage 3).

`TorchDataParallel` implements --DDP-impl torch: PyTorch's DistributedDataParallel averages
gradients in place, in the memory of a `GradientBuffer` with one replica.
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
    """Weights that are shared by processes, each of which updates its own part."""

    def gather(self) -> None:
        """Send every process's updated weights to all others. Collective over the replica axis."""

    def settle(self) -> None:
        """Return once `gather` is complete."""

    def wait(self) -> None:
        """Return once parameters may be read or changed outside their model's forward pass.

        Collective over the replica axis.
        """

    def forget(self) -> None:
        """Record that all processes have changed the parameters' values."""


class Gradients(Protocol):
    """The gradients of a model, averaged over the processes that hold the same weights."""

    @property
    def is_sharded(self) -> bool:
        """Whether each process keeps and updates only its own shard."""

    @property
    def shares_weights(self) -> bool:
        """Whether, between two passes, a process holds only the weights that it updates."""

    def owned(self, parameter: nn.Parameter, /) -> Span:
        """Return the elements of the flattened parameter that this process updates, if any."""

    def part(self, parameter: nn.Parameter, /) -> Tensor:
        """Return the weights that are `owned`: the parameter or, if sharded, a 1-D view into it."""

    def gradient(self, parameter: nn.Parameter, /) -> Tensor:
        """Return the gradient of the weights that `part` returns, in the same shape."""

    def compute_dtype(self, parameter: nn.Parameter, /) -> torch.dtype:
        """Return the weight's data type in the forward pass and in checkpoints."""

    def views(self, select: Callable[[nn.Parameter], bool], /) -> list[Tensor]:
        """Return the fewest 1-D tensors that cover the owned part of all selected gradients."""

    def share_weights(
        self,
        overlap_in: Sequence[nn.Module] | None,
        in_8_bits: Mapping[nn.Parameter, Fp8Products],
        /,
    ) -> SharedWeights | None:
        """Return the object that gathers updated weights.

        The result is `None` if every process updates all weights itself.
        """

    def zero(self) -> None:
        """Forget all gradients. Call before the first micro-batch of an update."""

    def micro_batch(self, *, is_last: bool, wave: Hashable = None) -> AbstractContextManager[None]:
        """Wrap each backward pass of an update. `wave` identifies the gradients it computes."""

    def complete(self) -> None:
        """Zero the gradients that no backward pass has reached, before any gradient is read."""

    def reduce(self) -> None:
        """Finish averaging. Collective over the replica axis."""


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
    """A model's forward pass, with a backward pass that averages gradients over `axis`.

    Construction and calls are collective.

    Args:
        model: The model. It has no pipeline stages, so each backward pass directly follows its
            forward pass.
        forward: The function to call with the model and the arguments of `__call__`.
        axis: The processes that hold the same weights.
    """

    may_run_ahead = False

    def __init__(self, model: nn.Module, forward: Callable[..., Any], axis: Axis) -> None:
        """Wrap the model in PyTorch's DistributedDataParallel."""
        options: dict[str, Any] = {"process_group": axis.group, _SYNC_BUFFERS: False}
        self._axis = axis
        self._in_flight: list[Pending] = []
        with axis.joining("start of DistributedDataParallel"):
            self._replica = DistributedDataParallel(_Forward(model, forward), **options)
        # The hook has no annotations, because PyTorch compares them and ours are strings. The
        # garbage collector does not see PyTorch's reference to the hook, so a reference from the
        # hook back to this object would keep both alive forever.
        average: Any = weakref.WeakMethod(self._average)
        self._replica.register_comm_hook(None, lambda _, bucket: average()(bucket))

    def begin_update(self) -> None:
        """Do nothing, because an update needs no preparation."""

    def release(self) -> None:
        """Do nothing, because no memory can be freed."""

    def __call__(self, part: nn.Module, /, *args: Any, is_last: bool) -> Any:
        """Run one micro-batch. An update's last backward pass averages the sums of all ranks."""
        with nullcontext() if is_last else self._replica.no_sync():
            return self._replica(*args)

    def _average(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Start PyTorch's own all-reduce and record it in the journal.

        After the last bucket nothing is left to compute. The process then waits for all buckets
        here, so that a hang can be reported with the name of the pending communication.
        """
        gradients = bucket.buffer()
        pending = start_all_reduce(gradients, self._axis, mean_of(gradients, self._axis))
        self._in_flight.append(pending)
        if bucket.is_last():
            for reduction in self._in_flight:
                reduction.wait()
            self._in_flight.clear()
        assert pending.transfer is not None, "a single process has nothing to average"
        return pending.transfer.future().then(lambda _: gradients)


class _Forward(nn.Module):
    """A module that PyTorch wraps. Its forward calls `function` with the model."""

    def __init__(self, model: nn.Module, function: Callable[..., Any]) -> None:
        super().__init__()
        self.model = model
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(self.model, *args)
