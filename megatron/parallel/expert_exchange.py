"""The exchange of tokens between the processes among which experts are divided.

A token is sent once to every process that has any of its experts. Each of these processes returns
the weighted sum of its experts' outputs, and the token's own process adds up the sums. If nearly
every token goes to nearly every process, all tokens are gathered on all processes instead. No
process then needs to know in advance how many tokens it will receive from another.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.device import AsyncRead
from megatron.kernels.grouped import Grouping, Permutation, permute, unpermute
from megatron.kernels.library import KernelLibrary
from megatron.parallel.collectives import (
    InTransit,
    all_to_all_rows,
    copy_to,
    gather_rows_to,
    reduce_from,
    reduce_scatter_from,
    start_all_to_all_rows,
    start_gather_rows,
    start_sum_rows,
)
from megatron.parallel.exchange import Exchange
from megatron.parallel.layout import Axis, Layout

# If at least this fraction of the tokens uses a process's experts, all tokens are sent to it.
_NEARLY_ALL = 0.75


@dataclass(frozen=True)
class DispatchedTokens:
    """The tokens that this process has received for its experts. They may still be in transit.

    Attributes:
        tokens: The tokens, [R, h].
        choices: The experts of each token, relative to this process's first expert, int64 [R, k];
            -1 for experts of other processes.
        weights: The weights of these choices, fp32 [R, k].
        count: A function that returns the number of choices that are experts of this process. It
            may wait for the device. `None` if the number is not needed.
        return_outputs: A function that starts sending the outputs for these tokens, [R, h], back to
            their processes. It returns a function that waits for the sums of outputs for this
            process's own tokens, [T, h]. `None` if experts are not divided.
    """

    tokens: Tensor | InTransit
    choices: Tensor
    weights: Tensor
    count: Callable[[], int] | None = None
    return_outputs: Callable[[Tensor], Callable[[], Tensor]] | None = None

    @property
    def deferred_work(self) -> list[Callable[[], None]] | None:
        """Functions to run while the tokens' gradients are in transit; `None` if none are sent."""
        if isinstance(self.tokens, InTransit) and self.tokens.has_gradient:
            return self.tokens.deferred_work
        return None

    def rows(self, experts: int, library: KernelLibrary | None) -> tuple[Tensor, Grouping]:
        """Return the tokens as rows sorted by expert, [n, h], and their grouping.

        Call this method only once.

        Args:
            experts: The number of experts on this process.
            library: Compiled kernels; `None` means PyTorch's operations.
        """
        grouping = Grouping.of(self.choices, experts)  # while tokens are in transit
        if self.count is not None:
            grouping = grouping.first(self.count())
        if isinstance(self.tokens, InTransit):
            return self.tokens.wait(Permutation(grouping, library)), grouping
        return permute(self.tokens, grouping, library), grouping


def share_reached(experts: int, chosen: int, ranks: int) -> float:
    """Return the expected fraction of tokens that use a process's experts.

    All choices of experts are assumed to be equally likely.

    Args:
        experts: The total number of experts.
        chosen: The number of experts per token.
        ranks: The number of processes among which experts are divided.
    """
    elsewhere = experts - experts // ranks
    return 1 - math.comb(elsewhere, chosen) / math.comb(experts, chosen)


def gathers_all(experts: int, chosen: int, ranks: int) -> bool:
    """Return whether all tokens are sent to all processes.

    This requires that every process has the same number of tokens. The arguments are those of
    `share_reached`.
    """
    return share_reached(experts, chosen, ranks) >= _NEARLY_ALL


class ExpertExchange:
    """The exchange that sends tokens to their experts and returns the experts' outputs.

    Buckets average the gradients of experts over the processes that hold the same experts. The
    exchange therefore divides these gradients by the number of replicas of the other weights that
    send tokens to an expert.

    Args:
        layout: The grid of processes.
        experts: The total number of experts.
        chosen: The number of experts per token.
        library: Compiled kernels; `None` means PyTorch's operations.
        exchange: The exchange that sends rows if all tokens go to all processes (`gathers_all`) and
            fit into it; otherwise, and if this is `None`, collectives send them.

    Attributes:
        local: The number of experts on each process.
    """

    def __init__(
        self,
        layout: Layout,
        experts: int,
        chosen: int,
        library: KernelLibrary | None = None,
        exchange: Exchange | None = None,
    ) -> None:
        """Count the experts of a process, and choose how tokens are sent."""
        self._layout, self._library, self._exchange = layout, library, exchange
        self.local = experts // layout.expert.size
        self._share = layout.tensor.size / (layout.expert.size * layout.expert_tensor.size)
        self._gathers = gathers_all(experts, chosen, layout.expert.size)

    def dispatch(
        self, tokens: Tensor, choices: Tensor, weights: Tensor, *, equal_counts: bool
    ) -> DispatchedTokens:
        """Start sending tokens to their experts. Collective over expert and expert tensor ranks.

        Args:
            tokens: The tokens, [T, h].
            choices: The experts of each token, int64 [T, k]; -1 for none.
            weights: The weights of the choices, fp32 [T, k].
            equal_counts: Whether T is the same on all processes.

        Returns:
            The tokens that this process receives for its experts.
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
            return DispatchedTokens(tokens, choices, weights)
        send = self._send_to_all if self._gathers and equal_counts else self._send_where_needed
        return send(axis, tokens, choices, weights)

    def combine(self, outputs: Tensor, dispatched: DispatchedTokens) -> Callable[[], Tensor]:
        """Start sending this process's sums of outputs back to the tokens' processes.

        Args:
            outputs: For each token, the weighted sum of the outputs of this process's experts,
                [R, h].
            dispatched: The tokens that `dispatch` returned.

        Returns:
            A function that waits for the sum over all experts for each of this process's own
            tokens, and returns the sums [T, h]. Calling it is collective, like `dispatch`.
        """
        finish = None if dispatched.return_outputs is None else dispatched.return_outputs(outputs)

        def wait() -> Tensor:
            sums = outputs if finish is None else finish()
            if self._layout.sequence_parallel:
                sums = reduce_scatter_from(sums, self._layout.expert_tensor)
            else:
                sums = reduce_from(sums, self._layout.expert_tensor)
            return _scale_gradient(sums, self._share)

        return wait

    def _send_to_all(
        self, axis: Axis, tokens: Tensor, choices: Tensor, weights: Tensor
    ) -> DispatchedTokens:
        """Gather all ranks' tokens. The host waits for the row count only when `count` is called.

        Until then, the host queues all work that does not depend on this number, so the device
        stays busy while the host waits.
        """
        choices = gather_rows_to(choices, axis)
        choices = self._local_choices(choices, axis.rank)
        reading = AsyncRead((choices >= 0).sum().view(1))
        return DispatchedTokens(
            start_gather_rows(tokens, axis, self._exchange),
            choices,
            gather_rows_to(weights, axis),
            count=lambda: int(reading.wait()[0]),
            return_outputs=lambda outputs: start_sum_rows(outputs, axis, self._exchange).wait,
        )

    def _send_where_needed(
        self, axis: Axis, tokens: Tensor, choices: Tensor, weights: Tensor
    ) -> DispatchedTokens:
        """Send each token to the processes of its experts, after the host has read the counts."""
        owners = torch.where(choices >= 0, choices // self.local, -1)
        ranks = torch.arange(axis.size, device=choices.device)
        on_rank = (owners.unsqueeze(-1) == ranks).sum(1)  # [T, ranks], a token's experts per rank
        counts = torch.stack(((on_rank > 0).sum(0), on_rank.sum(0)), dim=1)  # [ranks, 2]
        received_counts = all_to_all_rows(counts, axis, [1] * axis.size, [1] * axis.size)
        reading = AsyncRead(torch.cat((counts[:, 0], received_counts.t().flatten())))
        grouping = Grouping.of(torch.where(on_rank > 0, ranks, -1), axis.size)
        totals = [int(total) for total in reading.wait()]
        sent, received, rows = (
            totals[start : start + axis.size] for start in range(0, len(totals), axis.size)
        )
        grouping = grouping.first(sum(sent))
        destination = (grouping.order % axis.size).unsqueeze(1)  # the rank that each row is sent to
        choices = self._local_choices(permute(choices, grouping), destination)

        def return_outputs(outputs: Tensor) -> Callable[[], Tensor]:
            transit = start_all_to_all_rows(outputs, axis, received, sent)
            return lambda: unpermute(transit.wait(), grouping, self._library)

        choices = all_to_all_rows(choices, axis, sent, received)
        weights = all_to_all_rows(permute(weights, grouping), axis, sent, received)
        rows_of_tokens = permute(tokens, grouping, self._library)
        return DispatchedTokens(
            start_all_to_all_rows(rows_of_tokens, axis, sent, received),
            choices,
            weights,
            count=lambda: sum(rows),
            return_outputs=return_outputs,
        )

    def _local_choices(self, choices: Tensor, rank: Tensor | int) -> Tensor:
        """Return choices relative to a rank's first expert; -1 for experts of other ranks."""
        choices = choices - rank * self.local
        return torch.where((choices >= 0) & (choices < self.local), choices, -1)


def _scale_gradient(x: Tensor, factor: float) -> Tensor:
    """Return `x`, with a backward pass that multiplies the gradient by a factor."""
    return x if factor == 1 else _Scaled.apply(x, factor)


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None
