"""An exchange of rows between the ranks of an axis while they compute.

A product that is split by rows sends each block of rows as soon as it is ready, and receives the
other ranks' rows when it needs them. The messages between an `open` and its `close` are one use of
an exchange. All ranks open the same uses in the same order. In step i, a rank sends to the i-th
rank after it and receives from the i-th rank before it, cyclically.

On a GPU, ranks write into each other's memory. Each rank tracks which slots of that memory are free
(`Ledger`) without asking the other ranks. The ranks are not synchronized, but all make the same
calls in the same order. Therefore, when a rank's rows for a use arrive, the rank's device has
already closed every use that the program closes before it sends these rows.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.parallel.journal import Transfer
from megatron.parallel.layout import Axis


class Use(Protocol):
    """One use of an exchange: a message to and from every other rank, all of shape [rows, ...]."""

    def send(self, step: int, rows: Tensor) -> None:
        """Start sending rows to the rank `step` ranks ahead.

        Args:
            step: The number of ranks to the destination, cyclically.
            rows: The rows, contiguous. They must not change until `close`.
        """

    def computing(self) -> None:
        """Record that the kernels that run alongside the messages have been launched."""

    def receive(self, step: int) -> Tensor:
        """Return the rows [rows, ...] sent by the rank `step` ranks behind, valid until `close`."""

    def whole(self, own: Tensor) -> Tensor:
        """Return the received rows and this rank's own rows in rank order, [t rows, ...].

        The result is valid until `close`. Call this method after all calls to `receive`.
        """

    def close(self) -> None:
        """End this use, after all messages have been read."""


class Exchange(Protocol):
    """A means for ranks to send rows to each other. Two uses may be open at the same time."""

    axis: Axis

    def fits(self, elements: int, dtype: torch.dtype) -> bool:
        """Return whether messages of this size can be sent. The result is the same on all ranks.

        Args:
            elements: The number of elements of a message.
            dtype: The data type of a message.
        """

    def open(self, rows: Tensor) -> Use:
        """Begin a use whose messages have the shape and dtype of `rows`."""


class GroupExchange:
    """An exchange that sends messages through the axis's process group, for CPUs.

    Args:
        axis: The axis. It has at least two processes.
    """

    def __init__(self, axis: Axis) -> None:
        """Create an exchange over the axis."""
        assert axis.group is not None, "an axis without a process group cannot exchange"
        self.axis = axis

    def fits(self, elements: int, dtype: torch.dtype) -> bool:
        """Return True: messages may have any size."""
        return True

    def open(self, rows: Tensor) -> Use:
        """Begin a use whose messages have the shape and dtype of `rows`."""
        return _GroupUse(self.axis, rows)


class _GroupUse:
    def __init__(self, axis: Axis, rows: Tensor) -> None:
        self._axis = axis
        self._arrived = rows.new_empty((axis.size, *rows.shape))
        self._sent_rows: list[Tensor] = []
        self._sending: list[dist.Work] = []
        self._receiving: dict[int, Transfer] = {}

    def send(self, step: int, rows: Tensor) -> None:
        axis, group = self._axis, self._axis.group
        destination, source = ((axis.rank + sign * step) % axis.size for sign in (1, -1))
        self._sent_rows.append(rows)
        sent, received = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, rows, axis.ranks[destination], group),
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
        assert not self._receiving, "messages were sent, but those received were never read"
        for work in self._sending:
            work.wait()
        self._sent_rows.clear()


# The backward pass of a column-parallel layer opens two uses. With a third slot, the next use needs
# no barrier.
SLOTS = 3


class Ledger:
    """A record of which slots all ranks are known to have freed.

    Uses are numbered from 0, and use k occupies slot k modulo `slots`. All ranks open and close
    uses in the same order. Therefore, when rows for use k arrive from another rank, that rank has
    closed every use that this rank had closed when it sent its own rows for use k.

    Args:
        slots: The number of slots.
    """

    def __init__(self, slots: int) -> None:
        """Create a ledger whose slots are all free."""
        self._slots = slots
        self._opened = 0
        self._open: list[int] = []
        self._closed_at_send: dict[int, int] = {}
        self._known = 0

    def open(self) -> int:
        """Open the next use, and return its index."""
        assert len(self._open) < self._slots, "too many uses are open"
        use = self._opened
        self._opened += 1
        self._open.append(use)
        return use

    def may_send(self, use: int) -> bool:
        """Return whether all other ranks are known to have closed the slot's previous use."""
        return use - self._slots < self._known

    def met(self) -> None:
        """Record that all ranks have passed a barrier."""
        self._known = self._closed

    def sent(self, use: int) -> None:
        """Record that the first rows of a use have been sent."""
        self._closed_at_send.setdefault(use, self._closed)

    def received(self, use: int) -> None:
        """Record that the rows of all other ranks have arrived for a use."""
        self._known = max(self._known, self._closed_at_send.pop(use))

    def close(self, use: int) -> None:
        """Record that this rank has read all rows of a use."""
        self._open.remove(use)

    @property
    def _closed(self) -> int:
        """The first use that may still be open. All earlier uses are closed."""
        return min(self._open, default=self._opened)
