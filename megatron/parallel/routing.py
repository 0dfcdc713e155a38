"""The state of expert routers: losses and token counts of an update, and biases for the next one.

Routers are in the middle of a model, where no loss is returned. `attach` adds a router's loss to
the graph of a tensor that passes through the model. The backward pass of this tensor then also
differentiates the router's loss, with the same scale as the model's loss.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from megatron.parallel.collectives import all_reduce
from megatron.parallel.layout import Layout


def attach(x: Tensor, loss: Tensor, scale: Tensor) -> Tensor:
    """Return `x` with a loss attached, which the backward pass of `x` also differentiates.

    Args:
        x: Any tensor from which the model's loss is computed.
        loss: The loss to attach, a scalar.
        scale: The factor applied to the loss when the backward pass runs, fp32 [].
    """
    result: Tensor = _Attach.apply(x, loss, scale)
    return result


class _Attach(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, scale: Tensor) -> Tensor:
        ctx.scale, ctx.dtype = scale, loss.dtype
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        return grad, ctx.scale.to(ctx.dtype), None


class RouterState:
    """One router's losses, counts and biases during an update, at fixed memory addresses.

    Args:
        experts: The number of experts.
        losses: The kinds of losses that the router has.
        bias_rate: The amount by which biases change in an update; `None` for no biases.
        routers: All routers of the process.

    Attributes:
        loss_scale: The factor applied to the losses in the backward pass, shared by all routers.
        bias: The bias added to each expert's score when experts are chosen, fp32 [experts]; `None`
            for no biases.
        counts: The number of this rank's tokens sent to each expert since the last update, fp32
            [experts].
        load: The sum of the counts of all updates since the last `pop_loads`, fp32 [experts].
        losses: The sum of each loss since the last update, fp32 [kinds].
    """

    def __init__(
        self,
        experts: int,
        losses: Sequence[str],
        bias_rate: float | None,
        routers: Routers,
    ) -> None:
        """Allocate the state, with counts and losses of zero."""
        assert routers.loss_scale is not None
        self._routers = routers
        self.loss_scale = loss_scale = routers.loss_scale
        self._kinds = {kind: i for i, kind in enumerate(losses)}
        self._rate = bias_rate
        self._hits: Tensor | float = 0.0  # sum over the update's micro-batches so far
        self._passes = 0
        self._mean_hits: dict[int, Tensor] = {}  # keyed by the micro-batch's seed
        self.counts = loss_scale.new_zeros(experts)
        self.load = loss_scale.new_zeros(experts)
        self.losses = loss_scale.new_zeros(len(losses))
        self.bias = None if bias_rate is None else loss_scale.new_zeros(experts)

    @property
    def seed(self) -> int:
        """The seed of the current micro-batch, the same on all ranks that share the micro-batch."""
        return self._routers.seed

    def add_loss(self, kind: str, value: Tensor) -> None:
        """Add a micro-batch's loss to `losses`.

        Args:
            kind: The kind of loss, one of those given to the constructor.
            value: The loss, without its coefficient.
        """
        if self._routers.is_paused:
            return
        self.losses[self._kinds[kind]].add_(value)

    @torch.no_grad()
    def count(self, choices: Tensor) -> None:
        """Add the tokens sent to each expert to `counts`.

        Args:
            choices: The experts of each token, int64 [T, k]; -1 for none.
        """
        if self._routers.is_paused:
            return
        # Summing a table takes half the time of atomic additions to a few addresses.
        hits = torch.zeros(len(choices), len(self.counts) + 1, device=choices.device)
        hits.scatter_(1, choices.remainder(len(self.counts) + 1), 1.0)  # -1 goes to the last column
        self.counts.add_(hits.sum(0)[:-1])

    def mean_hits(self, hits: Tensor) -> Tensor:
        """Return the mean of `hits` over the update's micro-batches so far.

        Recomputing a micro-batch returns the same mean again.

        Args:
            hits: The number of tokens of this micro-batch sent to each expert, over all ranks that
                share the micro-batch, [experts].
        """
        if not self._routers.is_paused:
            self._hits, self._passes = hits + self._hits, self._passes + 1
            self._mean_hits[self.seed] = self._hits / self._passes
        return self._mean_hits[self.seed]

    def update_bias(self, counts: Tensor) -> None:
        """Raise the biases of experts with few tokens and lower those of experts with many.

        Args:
            counts: The number of tokens of the global batch sent to each expert, [experts].
        """
        if self.bias is not None and self._rate is not None:
            self.bias.add_((counts.mean() - counts).sign(), alpha=self._rate)

    def reset(self) -> None:
        """Add the update's counts to the load, and reset counts and losses."""
        self._hits, self._passes = 0.0, 0
        self._mean_hits.clear()
        self.load.add_(self.counts)
        self.counts.zero_()
        self.losses.zero_()


class Routers:
    """The states of all routers on this process, in the order of their layers.

    Attributes:
        states: The state of each router.
        loss_scale: The factor applied to the routers' losses in the backward pass, fp32 []; 1 until
            it is set. `None` without routers.
        is_paused: Whether recording is off because layers are being recomputed.
        seed: The seed of the current micro-batch.
    """

    def __init__(self) -> None:
        """Create an object without routers."""
        self.states: list[RouterState] = []
        self.loss_scale: Tensor | None = None
        self.is_paused = False
        self.seed = 0

    def paused(self) -> AbstractContextManager[None]:
        """Return a context manager for recomputing layers of the current micro-batch.

        Nothing is recorded inside the block.
        """
        seed = self.seed  # the forward pass calls this method, so this is its micro-batch's seed

        @contextmanager
        def recomputing() -> Iterator[None]:
            before, self.seed, self.is_paused = self.seed, seed, True
            try:
                yield
            finally:
                self.seed, self.is_paused = before, False

        return recomputing()

    def add(
        self,
        experts: int,
        losses: Sequence[str],
        bias_rate: float | None,
        device: torch.device,
    ) -> RouterState:
        """Add a router, and return its state.

        Args:
            experts: The number of experts.
            losses: The kinds of losses that the router has.
            bias_rate: The amount by which biases change in an update; `None` for no biases.
            device: The device on which the router runs.
        """
        if self.loss_scale is None:
            self.loss_scale = torch.ones((), device=device)
        state = RouterState(experts, losses, bias_rate, self)
        self.states.append(state)
        return state

    def update_biases(self, layout: Layout) -> None:
        """Adjust biases toward an even load. Collective over all ranks with different tokens."""
        states = [state for state in self.states if state.bias is not None]
        if not states:
            return
        counts = torch.cat([state.counts for state in states])
        counts = all_reduce(all_reduce(counts, layout.replica), layout.sequence)
        sizes = [len(state.counts) for state in states]
        for state, state_counts in zip(states, counts.split(sizes), strict=True):
            state.update_bias(state_counts)

    def pop_losses(self) -> list[Tensor]:
        """Return each router's losses, fp32 [kinds], and `reset` all states for the next update."""
        losses = [state.losses.clone() for state in self.states]
        for state in self.states:
            state.reset()
        return losses

    def pop_loads(self) -> list[Tensor]:
        """Return each router's load on this rank, fp32 [experts], and reset the loads to zero."""
        loads = [state.load.clone() for state in self.states]
        for state in self.states:
            state.load.zero_()
        return loads
