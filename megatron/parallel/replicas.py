"""The interface through which an optimizer and a training step use averaged gradients.

`gradients.GradientBuffer` implements it for whole parameters (ZeRO stages 0 to 2), and
`sharded.ShardedModel` for shards of parameters (stage 3).

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
    """Weights shared by several processes, each of which updates its own shard."""

    def gather(self) -> None:
        """Start gathering the updated weights. Collective over the replica axis."""

    def settle(self) -> None:
        """Wait until `gather` is complete."""

    def wait(self) -> None:
        """Wait until parameters may be read or changed outside their model's forward pass.

        Collective over the replica axis.
        """

    def forget(self) -> None:
        """Record that all processes have changed the parameters' values.

        Call `wait` before changing them.
        """


class Gradients(Protocol):
    """The gradients of a model, averaged over the processes that hold the same weights."""

    @property
    def is_sharded(self) -> bool:
        """Whether each process averages and updates only its own shard."""

    @property
    def shares_weights(self) -> bool:
        """Whether each process holds only its own shard of the weights between two passes."""

    def owned(self, parameter: nn.Parameter, /) -> Span:
        """Return the span of the flattened parameter that this process updates; it may be empty."""

    def part(self, parameter: nn.Parameter, /) -> Tensor:
        """Return the weights that `owned` selects: the parameter, or a 1-D view if sharded."""

    def gradient(self, parameter: nn.Parameter, /) -> Tensor:
        """Return the gradient of the weights that `part` returns, in the same shape."""

    def compute_dtype(self, parameter: nn.Parameter, /) -> torch.dtype:
        """Return the parameter's data type in the forward pass and in checkpoints."""

    def views(self, select: Callable[[nn.Parameter], bool], /) -> list[Tensor]:
        """Return the fewest 1-D views that contain the owned gradients of selected parameters.

        Args:
            select: A function that returns whether to include a given parameter.
        """

    def share_weights(
        self,
        overlap_in: Sequence[nn.Module] | None,
        in_8_bits: Mapping[nn.Parameter, Fp8Products],
        /,
    ) -> SharedWeights | None:
        """Return the object that gathers updated weights.

        The result is `None` if every process updates all weights itself.

        Args:
            overlap_in: The models whose forward pass may begin while weights are in transit;
                `None` waits for the weights first.
            in_8_bits: The products of each parameter that is gathered in 8 bits.
        """

    def zero(self) -> None:
        """Reset all gradients. Call before the first micro-batch of an update."""

    def micro_batch(self, *, is_last: bool, wave: Hashable = None) -> AbstractContextManager[None]:
        """Return a context manager for one backward pass.

        Args:
            is_last: Whether this is the last backward pass of the update to reach these parameters.
            wave: An identifier of the gradients that this backward pass computes.
        """

    def complete(self) -> None:
        """Zero the gradients that no backward pass has reached. Call before reading gradients."""

    def reduce(self) -> None:
        """Sum partial gradients over tensor ranks, and finish averaging the gradients.

        Collective over the tensor axis and the replica axis.
        """


def shares_weights(config: ParallelOptions, layout: Layout) -> bool:
    """Return whether each process holds only a shard of the weights.

    This requires ZeRO stage 3 and more than one replica.
    """
    return config.zero_stage == 3 and max(layout.replica.size, layout.expert_replica.size) > 1


# torch 2.13 renamed it.
_SYNC_BUFFERS = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    else "broadcast_buffers"
)


class TorchDataParallel:
    """The forward pass of a model whose backward pass averages gradients over an axis.

    Construction and calls are collective.

    Args:
        model: The model. It is not pipelined, so each backward pass directly follows its forward
            pass.
        forward: The function to call with the model and the arguments of `__call__`.
        axis: The processes that hold the same weights.
    """

    may_run_ahead = False

    def __init__(self, model: nn.Module, forward: Callable[..., Any], axis: Axis) -> None:
        """Wrap the model in PyTorch's DistributedDataParallel."""
        options: dict[str, Any] = {"process_group": axis.group, _SYNC_BUFFERS: False}
        self._axis = axis
        self._in_flight: list[Pending] = []
        with axis.external_collective("start of DistributedDataParallel"):
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
        """Run the forward pass of one micro-batch, and return the result of `forward`.

        Args:
            part: The model that the constructor has wrapped.
            args: The arguments of `forward` after the model.
            is_last: Whether this is the last micro-batch of an update, whose backward pass averages
                the gradients over the ranks.
        """
        with nullcontext() if is_last else self._replica.no_sync():
            return self._replica(*args)

    def _average(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Start averaging a bucket and record the all-reduce in the journal.

        After the last bucket nothing is left to compute. The process then waits for all buckets
        here, so that a report of a hang names the pending all-reduce.
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
    """The module that PyTorch wraps. Its forward pass calls a function with the model."""

    def __init__(self, model: nn.Module, function: Callable[..., Any]) -> None:
        super().__init__()
        self.model = model
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(self.model, *args)
