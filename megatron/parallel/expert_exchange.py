"""The exchange of tokens between the processes that divide the experts.

A token is sent once to every process that holds some of its experts. That process returns the
weighted sum of their outputs, and the token's own process adds up these sums.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.kernels.grouped import Grouping, collect, spread
from megatron.kernels.library import KernelLibrary
from megatron.parallel.collectives import (
    all_to_all_rows,
    copy_to,
    gather_rows_to,
    reduce_from,
    reduce_scatter_from,
)
from megatron.parallel.layout import Layout


@dataclass(frozen=True)
class Arrived:
    """The tokens that use experts of this process.

    Attributes:
        tokens: [R, h].
        choices: The experts that each token uses, numbered from this process's first, int64 [R, k];
            -1 for experts of other processes.
        weights: Their weights, fp32 [R, k].
        rows: Number of choices of experts on this process; `None` if it is not known in advance.
        sent: Number of tokens that this process sent to each process; `None` without an exchange.
        received: Number of tokens that came from each process.
        grouping: The sent tokens, grouped by process.
    """

    tokens: Tensor
    choices: Tensor
    weights: Tensor
    rows: int | None = None
    sent: list[int] | None = None
    received: list[int] | None = None
    grouping: Grouping | None = None


class ExpertExchange:
    """The exchange that sends tokens to their experts and brings the outputs back.

    Buckets average an expert's gradient over the processes that hold the expert. The tokens of
    several processes pass through it here, so the gradients are divided by their number.

    Args:
        layout: The grid of processes.
        experts: Total number of experts.
        library: Compiled kernels; `None` means PyTorch's operations.
    """

    def __init__(self, layout: Layout, experts: int, library: KernelLibrary | None = None) -> None:
        """Count the experts of a process."""
        self._layout, self._library = layout, library
        self.local = experts // layout.expert.size
        self._share = layout.tensor.size / (layout.expert.size * layout.expert_tensor.size)

    def send(self, tokens: Tensor, choices: Tensor, weights: Tensor) -> Arrived:
        """Bring tokens to their experts. Collective over the expert and expert tensor ranks.

        Args:
            tokens: [T, h].
            choices: The experts of each token, int64 [T, k]; -1 for none.
            weights: The weights of the choices, fp32 [T, k].
        """
        layout, axis = self._layout, self._layout.expert
        tokens = _scale_gradient(tokens, 1 / self._share)
        weights = _scale_gradient(weights, 1 / self._share)
        if layout.sequence_parallel:
            tokens = gather_rows_to(tokens, layout.expert_tensor)
            weights = gather_rows_to(weights, layout.expert_tensor)
            choices = gather_rows_to(choices, layout.expert_tensor)
        else:
            tokens = copy_to(tokens, layout.expert_tensor)
            weights = copy_to(weights, layout.expert_tensor)
        if axis.size == 1:
            return Arrived(tokens, choices, weights)
        owners = torch.where(choices >= 0, choices // self.local, -1)
        ranks = torch.arange(axis.size, device=choices.device)
        goes = (owners.unsqueeze(-1) == ranks).sum(1)  # [T, ranks], a token's experts per rank
        counts = torch.stack(((goes > 0).sum(0), goes.sum(0)), dim=1)  # [ranks, 2]
        counts_in = all_to_all_rows(counts, axis, [1] * axis.size, [1] * axis.size)
        (sent, _), (received, rows) = (both.t().tolist() for both in (counts, counts_in))
        grouping = Grouping.of(torch.where(goes > 0, ranks, -1), axis.size, sum(sent))
        to = grouping.order % axis.size  # the rank that each row is sent to
        choices = spread(choices, grouping)
        choices = torch.where(choices // self.local == to.unsqueeze(1), choices, -1)
        choices = torch.where(choices >= 0, choices % self.local, -1)
        return Arrived(
            all_to_all_rows(spread(tokens, grouping, self._library), axis, sent, received),
            all_to_all_rows(choices, axis, sent, received),
            all_to_all_rows(spread(weights, grouping), axis, sent, received),
            rows=sum(rows),
            sent=sent,
            received=received,
            grouping=grouping,
        )

    def bring_back(self, outputs: Tensor, arrived: Arrived) -> Tensor:
        """Return the sum of each token's outputs, [R, h] -> [T, h]. Collective like `send`."""
        layout = self._layout
        if arrived.grouping is not None:
            assert arrived.sent is not None and arrived.received is not None
            rows = all_to_all_rows(outputs, layout.expert, arrived.received, arrived.sent)
            ones = torch.ones(arrived.grouping.place.shape, device=rows.device)
            outputs = collect(rows, ones, arrived.grouping, self._library)
        if layout.sequence_parallel:
            outputs = reduce_scatter_from(outputs, layout.expert_tensor)
        else:
            outputs = reduce_from(outputs, layout.expert_tensor)
        return _scale_gradient(outputs, self._share)


def _scale_gradient(x: Tensor, factor: float) -> Tensor:
    """Return x unchanged; its gradient is multiplied by a factor."""
    return x if factor == 1 else _Scaled.apply(x, factor)


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None
