"""What an optimizer and a training step need of the gradients, whoever averages them.

`gradients.GradientBuffer` keeps whole parameters (ZeRO stages 0 to 2), `sharded.ShardedModel` a
shard of each (stage 3).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor, nn

from megatron.config.parallel import ParallelOptions
from megatron.parallel.buckets import Span
from megatron.parallel.fp8 import Fp8Products
from megatron.parallel.layout import Layout


class SharedWeights(Protocol):
    """Weights of which each process updates its share."""

    def gather(self) -> None:
        """Make the update of every process known to all. Collective over the replica axis."""

    def settle(self) -> None:
        """Return once nothing of `gather` is under way."""

    def wait(self) -> None:
        """Return once parameters may be read, or changed, outside of their model's forward.
        Collective over the replica axis."""

    def forget(self) -> None:
        """All parameters have been given other values, on all processes."""


class Gradients(Protocol):
    """Gradients of a model, averaged over the processes that hold the same weights."""

    @property
    def is_sharded(self) -> bool:
        """Each process keeps and updates its own shard only."""

    @property
    def shares_weights(self) -> bool:
        """Between two passes each process holds no more of the weights than it updates."""

    def owned(self, parameter: nn.Parameter, /) -> Span:
        """Which elements of the flattened parameter this process updates; may be none."""

    def part(self, parameter: nn.Parameter, /) -> Tensor:
        """The weights that are `owned`: the parameter, or where sharded a 1-D view of it."""

    def gradient(self, parameter: nn.Parameter, /) -> Tensor:
        """The gradient of `part`, of its shape."""

    def compute_dtype(self, parameter: nn.Parameter, /) -> torch.dtype:
        """What forward computes in, and what a checkpoint holds the weight in."""

    def views(self, select: Callable[[nn.Parameter], bool], /) -> list[Tensor]:
        """As few 1-D tensors as hold what is owned of all selected parameters' gradients."""

    def share_weights(
        self,
        overlap_in: Sequence[nn.Module] | None,
        in_8_bits: Mapping[nn.Parameter, Fp8Products],
        /,
    ) -> SharedWeights | None:
        """The other half of a sharded update; None where every process updates everything."""

    def zero(self) -> None:
        """Forget all gradients. Call before the first micro-batch of an update."""

    def micro_batch(self, *, is_last: bool, wave: Hashable = None) -> AbstractContextManager[None]:
        """Around each backward of an update; `wave` says which gradients it brings."""

    def complete(self) -> None:
        """Zero the gradients that no backward of this update has reached. Before reading any."""

    def reduce(self) -> None:
        """Finish the average. Collective over the replica axis."""


def shares_weights(config: ParallelOptions, layout: Layout) -> bool:
    """Whether processes hold shards of the weights (ZeRO stage 3): one alone has all of them."""
    return config.zero_stage == 3 and layout.replica.size > 1
