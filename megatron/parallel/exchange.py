"""Rows that the ranks of an axis send each other while they compute.

A product that is cut by rows sends each part as soon as it is there, and takes the others' when it
needs them. What is sent between an `open` and its `close` is one use of an exchange. All ranks
program the same uses in the same order; step i is the message to the i-th rank after one's own,
round the axis, and from the i-th before it.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.parallel.journal import Transfer
from megatron.parallel.layout import Axis


class Use(Protocol):
    """One message to, and one from, each other rank of the axis: [rows, ...] of one shape."""

    def send(self, step: int, rows: Tensor) -> None:
        """Begin to send, contiguous rows that nobody changes until `close`."""
        ...

    def computing(self) -> None:
        """Call when the kernels that are to run beside the messages have been launched."""
        ...

    def receive(self, step: int) -> Tensor:
        """What came, [rows, ...]; to be read until `close`."""
        ...

    def whole(self, own: Tensor) -> Tensor:
        """Everything received and one's own rows, in the order of the ranks: [t rows, ...], to be
        read until `close`. After all of `receive`."""
        ...

    def close(self) -> None:
        """The messages are read."""
        ...


class Exchange(Protocol):
    """Where uses are opened; two may be open at a time."""

    axis: Axis

    def fits(self, elements: int, dtype: torch.dtype) -> bool:
        """Whether messages of so many elements can be sent; the same on every rank."""
        ...

    def open(self, rows: Tensor) -> Use:
        """Begin a use, of messages like `rows`."""
        ...


class GroupExchange:
    """By messages of the axis' process group: on a CPU.

    Args:
        axis: of at least two processes.
    """

    def __init__(self, axis: Axis) -> None:
        assert axis.group is not None, "an axis without a process group cannot exchange"
        self.axis = axis

    def fits(self, elements: int, dtype: torch.dtype) -> bool:
        """See `Exchange`."""
        return True

    def open(self, rows: Tensor) -> Use:
        """See `Exchange`."""
        return _GroupUse(self.axis, rows)


class _GroupUse:
    def __init__(self, axis: Axis, rows: Tensor) -> None:
        self._axis = axis
        self._arrived = rows.new_empty((axis.size, *rows.shape))
        self._kept: list[Tensor] = []
        self._sending: list[dist.Work] = []
        self._receiving: dict[int, Transfer] = {}

    def send(self, step: int, rows: Tensor) -> None:
        axis, group = self._axis, self._axis.group
        to, source = ((axis.rank + sign * step) % axis.size for sign in (1, -1))
        self._kept.append(rows)
        sent, received = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, rows, axis.ranks[to], group),
                dist.P2POp(dist.irecv, self._arrived[source], axis.ranks[source], group),
            ]
        )
        self._sending.append(sent)
        self._receiving[step] = axis.transfer("exchange", received)

    def computing(self) -> None:
        pass

    def receive(self, step: int) -> Tensor:
        self._receiving.pop(step).wait()
        return self._arrived[(self._axis.rank - step) % self._axis.size]

    def whole(self, own: Tensor) -> Tensor:
        self._arrived[self._axis.rank].copy_(own)
        return self._arrived.flatten(0, 1)

    def close(self) -> None:
        assert not self._receiving, "messages were sent, and their answers never read"
        for work in self._sending:
            work.wait()
        self._kept.clear()
