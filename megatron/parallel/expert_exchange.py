"""The exchange of tokens between the processes that divide the experts.

A token is sent once to every process that has some of its experts. That process returns the
weighted sum of their outputs, and the token's own process adds the sums up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.device import Reading
from megatron.kernels.grouped import Grouping, spread, unite
from megatron.kernels.library import KernelLibrary
from megatron.parallel.collectives import (
    RowsInTransit,
    all_to_all_rows,
    copy_to,
    gather_rows_to,
    reduce_from,
    reduce_scatter_from,
    start_all_to_all_rows,
)
from megatron.parallel.layout import Layout


@dataclass(frozen=True)
class Exchanged:
    """An exchange of tokens between processes.

    Attributes:
        tokens: The tokens that come here, [R, h].
        rows: Number of choices of experts on this process.
        sent: Number of tokens that this process sends to each process.
        received: Number of tokens that come from each process.
        grouping: The sent tokens, grouped by process.
    """

    tokens: RowsInTransit
    rows: int
    sent: list[int]
    received: list[int]
    grouping: Grouping


@dataclass(frozen=True)
class Arrived:
    """The tokens that use experts of this process. They may still be in transit.

    Attributes:
        choices: The experts that each token uses, numbered from this process's first, int64 [R, k];
            -1 for experts of other processes.
        weights: Their weights, fp32 [R, k].
        here: The tokens, [R, h], if they do not travel.
        exchanged: The exchange, if they do.
    """

    choices: Tensor
    weights: Tensor
    here: Tensor | None = None
    exchanged: Exchanged | None = None

    @property
    def rows(self) -> int | None:
        """Number of choices of experts on this process; `None` if it is not known in advance."""
        return None if self.exchanged is None else self.exchanged.rows

    @property
    def later(self) -> list[Callable[[], None]] | None:
        """The list of functions that run while the tokens' gradients travel; `None` if none do."""
        if self.exchanged is None or not self.exchanged.tokens.has_gradient:
            return None
        return self.exchanged.tokens.later

    def wait(self) -> Tensor:
        """Return the tokens, [R, h], when they have arrived. Call it once."""
        if self.exchanged is not None:
            return self.exchanged.tokens.wait()
        assert self.here is not None
        return self.here


class Returning:
    """The outputs of experts on their way back to the tokens' processes.

    Args:
        outputs: The sums of the outputs on this process, [R, h].
        arrived: The tokens that they belong to.
        exchange: The exchange.
    """

    def __init__(self, outputs: Tensor, arrived: Arrived, exchange: ExpertExchange) -> None:
        """Start the exchange."""
        self._exchange, self._outputs, self._rows = exchange, outputs, None
        there = arrived.exchanged
        if there is not None:
            self._grouping = there.grouping
            axis = exchange.layout.expert
            self._rows = start_all_to_all_rows(outputs, axis, there.received, there.sent)

    def wait(self) -> Tensor:
        """Return the sum of each token's outputs, [T, h]. Collective as `send` is; call it once."""
        layout, outputs = self._exchange.layout, self._outputs
        if self._rows is not None:
            outputs = unite(self._rows.wait(), self._grouping, self._exchange.library)
        if layout.sequence_parallel:
            outputs = reduce_scatter_from(outputs, layout.expert_tensor)
        else:
            outputs = reduce_from(outputs, layout.expert_tensor)
        return _scale_gradient(outputs, self._exchange.share)


class ExpertExchange:
    """The path that tokens take to their experts and back.

    Gradients inside are those of a mean over the processes that hold the same experts, as buckets
    compute it, so they are divided here by the number of other processes whose tokens come in.

    Args:
        layout: The grid of processes.
        experts: Total number of experts.
        library: Compiled kernels; `None` means PyTorch's operations.

    Attributes:
        layout: The grid of processes.
        library: Compiled kernels, if any.
        local: Number of experts on each process.
        share: The factor of the gradients inside.
    """

    def __init__(self, layout: Layout, experts: int, library: KernelLibrary | None = None) -> None:
        """Count the experts of a process."""
        self.layout, self.library = layout, library
        self.local = experts // layout.expert.size
        self.share = layout.tensor.size / (layout.expert.size * layout.expert_tensor.size)

    def send(self, tokens: Tensor, choices: Tensor, weights: Tensor) -> Arrived:
        """Start bringing tokens to their experts. Collective over expert and expert tensor ranks.

        The host waits once, for the number of tokens that each process sends. It queues the order
        of the rows first, so that the device has work while the host queues the rest.

        Args:
            tokens: [T, h].
            choices: The experts of each token, int64 [T, k]; -1 for none.
            weights: The weights of the choices, fp32 [T, k].
        """
        layout, axis = self.layout, self.layout.expert
        tokens = _scale_gradient(tokens, 1 / self.share)
        weights = _scale_gradient(weights, 1 / self.share)
        if layout.sequence_parallel:
            tokens = gather_rows_to(tokens, layout.expert_tensor)
            weights = gather_rows_to(weights, layout.expert_tensor)
            choices = gather_rows_to(choices, layout.expert_tensor)
        else:
            tokens = copy_to(tokens, layout.expert_tensor)
            weights = copy_to(weights, layout.expert_tensor)
        if axis.size == 1:
            return Arrived(choices, weights, here=tokens)
        owners = torch.where(choices >= 0, choices // self.local, -1)
        ranks = torch.arange(axis.size, device=choices.device)
        goes = (owners.unsqueeze(-1) == ranks).sum(1)  # [T, ranks], a token's experts per rank
        counts = torch.stack(((goes > 0).sum(0), goes.sum(0)), dim=1)  # [ranks, 2]
        counts_in = all_to_all_rows(counts, axis, [1] * axis.size, [1] * axis.size)
        reading = Reading(torch.cat((counts[:, 0], counts_in.t().flatten())))
        grouping = Grouping.of(torch.where(goes > 0, ranks, -1), axis.size)
        numbers = [int(number) for number in reading.wait()]
        sent, received, rows = (
            numbers[start : start + axis.size] for start in range(0, len(numbers), axis.size)
        )
        grouping = grouping.first(sum(sent))
        # The rank that each row is sent to, and its experts there.
        to = (grouping.order % axis.size).unsqueeze(1)
        choices = spread(choices, grouping) - to * self.local
        choices = torch.where((choices >= 0) & (choices < self.local), choices, -1)
        return Arrived(
            all_to_all_rows(choices, axis, sent, received),
            all_to_all_rows(spread(weights, grouping), axis, sent, received),
            exchanged=Exchanged(
                start_all_to_all_rows(spread(tokens, grouping, self.library), axis, sent, received),
                rows=sum(rows),
                sent=sent,
                received=received,
                grouping=grouping,
            ),
        )

    def bring_back(self, outputs: Tensor, arrived: Arrived) -> Returning:
        """Start returning the sum of each token's outputs on this process, [R, h]."""
        return Returning(outputs, arrived, self)


def _scale_gradient(x: Tensor, factor: float) -> Tensor:
    """Return x, whose gradient will be multiplied by a factor."""
    return x if factor == 1 else _Scaled.apply(x, factor)


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None
