"""An exchange between the GPUs of one machine, which map each other's memory.

Copy engines write rows into the receiver's memory, leaving the multiprocessors free for the product
that runs at the same time. A flag next to the rows signals their arrival. The memory is PyTorch's
symmetric memory; NVLink multicast is not used.

A sender learns from its `Ledger`, not from the receiver, whether the receiver has read earlier
messages. If the ledger does not know, the ranks synchronize at a barrier.
"""

from __future__ import annotations

import math
from collections import deque

import torch
import torch.distributed._symmetric_memory as symmetric
from torch import Tensor

from megatron.parallel.exchange import SLOTS, Ledger, Use
from megatron.parallel.journal import Transfer
from megatron.parallel.layout import Axis

# Keep the memory until the process ends. PyTorch waits for the device before it unmaps memory, and
# the device may be waiting for a neighbor that no longer exists.
_MAPPED: list[Tensor] = []
_BARRIER = SLOTS  # flag channels: one per slot, then this one
# The maximum number of uses by which the process may run ahead of its device. PyTorch launches the
# kernel for a flag without releasing the GIL. A launch that waits for room in a full queue
# therefore also stops the watchdog, just when a neighbor hangs. A use takes about ten kernels and a
# few events, and a queue holds a thousand. With 56, a hung neighbor was reported in time; with 400,
# it was not. With 24, the device ran out of work whenever the host paused for 40 ms
# (docs/benchmarks/parallel.md).
_MAX_USES_AHEAD = 56
_ALIGNMENT = 256  # bytes, like the allocator's memory; fast kernels need 16


class SymmetricExchange:
    """An exchange between GPUs of one machine. Construction is collective over the axis.

    Args:
        axis: The axis. Its ranks must be on one machine.
        device: This rank's device.
        message_bytes: The maximum size of a message, in bytes.
        seconds: The timeout, in seconds, after which the device stops waiting for a neighbor.

    Raises:
        RuntimeError: The GPUs cannot map each other's memory.
    """

    def __init__(
        self, axis: Axis, device: torch.device, message_bytes: int, *, seconds: float
    ) -> None:
        """Map the other ranks' memory. Collective over the axis."""
        assert axis.group is not None, "an axis without a process group cannot exchange"
        self.axis, self.device = axis, device
        self.signal_timeout = {"timeout_ms": int(1000 * seconds)}
        self._ends: deque[tuple[torch.Event, Transfer]] = deque()
        self.ledger = Ledger(SLOTS)
        self._slot_bytes = -(-axis.size * message_bytes // _ALIGNMENT) * _ALIGNMENT
        shape = (SLOTS, self._slot_bytes)
        self._memory = symmetric.empty(shape, dtype=torch.uint8, device=device)
        self.handle = symmetric.rendezvous(self._memory, axis.group)
        _MAPPED.append(self._memory)
        self._mapped = [
            self.handle.get_buffer(rank, shape, torch.uint8) for rank in range(axis.size)
        ]
        self.side = torch.Stream(device, priority=-1)

    def fits(self, elements: int, dtype: torch.dtype) -> bool:
        """Return whether messages of this size fit. The result is the same on all ranks."""
        return elements * dtype.itemsize * self.axis.size <= self._slot_bytes

    def open(self, rows: Tensor) -> Use:
        """Begin a use whose messages have the shape and dtype of `rows`.

        If the process is too far ahead of its device, wait for the device to finish older uses.
        """
        while len(self._ends) >= _MAX_USES_AHEAD:
            end, transfer = self._ends.popleft()
            self.axis.journal.begin_wait(transfer)
            end.synchronize()
            self.axis.journal.end_wait()
        return _SymmetricUse(self, rows)

    def note_end(self, transfer: Transfer) -> None:
        """Record that all work of a use has been queued.

        Args:
            transfer: The last message of the use.
        """
        end = torch.Event(self.device)
        end.record(torch.accelerator.current_stream(self.device))
        self._ends.append((end, transfer))

    def slot(self, use: int, rank: int, rows: Tensor) -> Tensor:
        """Return the memory on `rank` that receives every rank's rows, [t, rows, ...].

        Args:
            use: The index of the use.
            rank: The rank that owns the memory.
            rows: A tensor with the shape and dtype of a message.
        """
        memory = self._mapped[rank][use % SLOTS, : self.axis.size * rows.nbytes]
        return memory.view(rows.dtype).view(self.axis.size, *rows.shape)


class _SymmetricUse:
    def __init__(self, exchange: SymmetricExchange, rows: Tensor) -> None:
        assert exchange.fits(math.prod(rows.shape), rows.dtype), "larger than message_bytes"
        self._exchange, self._axis = exchange, exchange.axis
        self._use = exchange.ledger.open()
        self._received = exchange.slot(self._use, self._axis.rank, rows)
        self._sent_rows: list[Tensor] = []
        self._unsignaled: list[int] = []
        self._missing = set(range(1, self._axis.size))
        self._last_transfer: Transfer | None = None

    def send(self, step: int, rows: Tensor) -> None:
        exchange, rank = self._exchange, self._axis.rank
        if not exchange.ledger.may_send(self._use):
            exchange.handle.barrier(channel=_BARRIER, **exchange.signal_timeout)
            exchange.ledger.met()
        exchange.ledger.sent(self._use)
        destination = (rank + step) % self._axis.size
        exchange.side.wait_stream(torch.accelerator.current_stream(exchange.device))
        with exchange.side:
            exchange.slot(self._use, destination, rows)[rank].copy_(rows)
        self._sent_rows.append(rows)
        self._unsignaled.append(destination)

    def computing(self) -> None:
        """Set the flags, now that the product has been launched.

        The kernel that sets a flag waits for the copy. Training uses a single hardware queue
        (CUDA_DEVICE_MAX_CONNECTIONS=1), so a product launched after this kernel would also wait.
        """
        exchange = self._exchange
        with exchange.side:
            for destination in self._unsignaled:
                channel = self._use % SLOTS
                exchange.handle.put_signal(destination, channel=channel, **exchange.signal_timeout)
        self._unsignaled.clear()

    def receive(self, step: int) -> Tensor:
        assert not self._unsignaled, "every rank would wait: call computing() first"
        source = (self._axis.rank - step) % self._axis.size
        flag = _Flag(self._exchange, self._use, source)
        self._last_transfer = self._axis.transfer("exchange", flag)
        self._last_transfer.wait()
        self._missing.remove(step)
        if not self._missing:
            self._exchange.ledger.received(self._use)
        return self._received[source]

    def whole(self, own: Tensor) -> Tensor:
        self._received[self._axis.rank].copy_(own)
        return self._received.flatten(0, 1)

    def close(self) -> None:
        assert not self._missing, "messages were sent, but those received were never read"
        assert self._last_transfer is not None
        exchange = self._exchange
        # From here on, the sent rows may be overwritten.
        torch.accelerator.current_stream(exchange.device).wait_stream(exchange.side)
        self._sent_rows.clear()
        exchange.ledger.close(self._use)
        exchange.note_end(self._last_transfer)


class _Flag:
    """The flag of a message, with the interface of `torch.distributed.Work`.

    `wait` makes later kernels wait for the flag.
    """

    def __init__(self, exchange: SymmetricExchange, use: int, source: int) -> None:
        self._exchange, self._use, self._source = exchange, use, source

    def wait(self) -> None:
        exchange, channel = self._exchange, self._use % SLOTS
        exchange.handle.wait_signal(self._source, channel=channel, **exchange.signal_timeout)
