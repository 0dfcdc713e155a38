"""Collectives through shared memory, for processes forked from one parent.

A collective of small tensors costs gloo up to a hundred system calls and two milliseconds of
CPU time in each process, more than a toy model computes between two of them. Here it costs a
copy and, if a reader sleeps, a wake-up through its eventfd (its bell). Tests of what a layout
computes use this; tests of how processes communicate use gloo.

Every rank writes its data into its own memory and counts its messages; whoever waits for the data
reads it there. So inputs are read when a collective starts, and results appear when it, or a later
one of its group, is waited for. As with gloo, all ranks get the same bits: they add in rank
order. A send completes only once its receiver has asked for the message, so two ranks that
both send first wait for each other. A rank that gives more or fewer bytes than another expects
gets an error. Only one thread of a process may communicate at a time.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import mmap
import os
import select
import time
from collections import deque
from collections.abc import Callable, Sequence
from multiprocessing.synchronize import Lock
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import increment_version

_GROUPS = 64  # process groups per run
_DEPTH = 128  # a rank's unread messages
_HEAP = 64 << 20  # bytes for a rank's messages; only used pages take memory
_SECONDS = 60.0  # until a waiting rank gives up
_LINE = 64  # messages start at multiples of this
_NUMPY_TYPES = {
    torch.float32: np.float32,
    torch.float64: np.float64,
    torch.int32: np.int32,
    torch.int64: np.int64,
}


class _Reduction(NamedTuple):
    in_torch: Callable[..., Any]
    in_numpy: Callable[..., Any]


_SUM = _Reduction(torch.add, np.add)
_REDUCTIONS: dict[Any, _Reduction] = {
    dist.ReduceOp.SUM: _SUM,
    dist.ReduceOp.AVG: _SUM,
    dist.ReduceOp.MAX: _Reduction(torch.maximum, np.maximum),
    dist.ReduceOp.MIN: _Reduction(torch.minimum, np.minimum),
}


class Memory:
    """The memory that the ranks of one run share. Create it before they are forked.

    Args:
        ranks: The number of ranks.
        lock: A lock that processes forked later share.
    """

    def __init__(self, ranks: int, lock: Lock) -> None:
        self.ranks, self.lock = ranks, lock
        self.channels = _GROUPS * ranks * (ranks + 1)  # from a group's rank to one, or to all
        num_words = 1 + _GROUPS + ranks + self.channels * (2 + ranks + 2 * _DEPTH)
        self._heaps = -(-8 * num_words // mmap.PAGESIZE) * mmap.PAGESIZE
        self.map = mmap.mmap(-1, self._heaps + ranks * _HEAP)
        remaining = memoryview(self.map)[: 8 * num_words].cast("q")
        self.failed, remaining = remaining[:1], remaining[1:]
        self.names, remaining = remaining[:_GROUPS], remaining[_GROUPS:]
        self.asleep, remaining = remaining[:ranks], remaining[ranks:]
        self.posted, remaining = remaining[: self.channels], remaining[self.channels :]
        self.asked, remaining = remaining[: self.channels], remaining[self.channels :]
        num_done, num_slots = self.channels * ranks, self.channels * _DEPTH
        self.done, remaining = remaining[:num_done], remaining[num_done:]
        self.offsets, self.sizes = remaining[:num_slots], remaining[num_slots:]
        self.bells = [os.eventfd(0, os.EFD_NONBLOCK) for _ in range(ranks)]

    def close(self) -> None:
        """Close the bells; the memory is freed with its last user."""
        for bell in self.bells:
            os.close(bell)

    def group_index(self, name: str) -> int:
        """Return a group's number, which is the same for everyone who asks for this name."""
        key = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big") + 1
        with self.lock:
            for index, stored_key in enumerate(self.names):
                if stored_key in (0, key):
                    self.names[index] = key
                    return index
        raise RuntimeError(f"more than {_GROUPS} process groups")

    def start_of(self, rank: int) -> int:
        """Return the offset of a rank's messages."""
        return self._heaps + rank * _HEAP


class _Message(NamedTuple):
    channel: int
    group_index: int
    readers: tuple[int, ...]
    end: int


class Rank:
    """One process's side of the memory."""

    def __init__(self, memory: Memory, rank: int) -> None:
        self.memory, self.rank = memory, rank
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(memory.map))
        self._arrays: dict[torch.dtype, Any] = {}
        self._total: Any = b""  # where values are reduced
        self._waiting: dict[int, deque[Work]] = {}  # by `Work.order`
        self._written: deque[_Message] = deque()
        self._next = memory.start_of(rank)
        self._bell = select.poll()
        self._bell.register(memory.bells[rank], select.POLLIN)

    def post(self, channel: int, readers: tuple[int, ...], data: int, size: int) -> None:
        """Write a message of `size` bytes at the address `data`, and notify its readers."""
        memory = self.memory
        offset = self._room(size)
        if size:
            ctypes.memmove(self.address + offset, data, size)
        sequence = memory.posted[channel]
        slot = channel * _DEPTH + sequence % _DEPTH
        memory.offsets[slot] = offset
        memory.sizes[slot] = size
        memory.posted[channel] = sequence + 1
        self._next = -(-(offset + size) // _LINE) * _LINE
        self._written.append(_Message(channel, sequence, readers, self._next))
        for reader in readers:
            self.ring(reader)

    def ask(self, channel: int, sequence: int, sender: int) -> None:
        """Announce that a message from one member to another will be read."""
        self.memory.asked[channel] = sequence + 1
        self.ring(sender)

    def ring(self, other: int) -> None:
        """Wake a sleeping rank."""
        if self.memory.asleep[other]:
            os.eventfd_write(self.memory.bells[other], 1)

    def view(self, offset: int, dtype: torch.dtype, count: int) -> Tensor:
        """Return a view of `count` values."""
        return torch.frombuffer(self.memory.map, dtype=dtype, count=count, offset=offset)

    def reduce(self, offsets: list[int], output: Tensor, add: _Reduction, average: bool) -> None:
        """Reduce the values at these offsets, one after the other, into `output`."""
        dtype, count = output.dtype, output.numel()
        if dtype not in _NUMPY_TYPES or not output.is_contiguous():
            with torch.no_grad():
                total = self.view(offsets[0], dtype, count).clone()
                for offset in offsets[1:]:
                    add.in_torch(total, self.view(offset, dtype, count), out=total)
                output.copy_((total.div_(len(offsets)) if average else total).view_as(output))
            return
        # NumPy takes a third of the time.
        values, width = self._array(dtype), dtype.itemsize
        if len(self._total) < count * width:
            self._total = (ctypes.c_char * (count * width))()
        total = np.frombuffer(self._total, values.dtype, count)
        total[:] = values[offsets[0] // width : offsets[0] // width + count]
        with np.errstate(all="ignore"):  # infinite values are not worth a warning
            for offset in offsets[1:]:
                add.in_numpy(total, values[offset // width : offset // width + count], out=total)
            if average:
                np.divide(total, len(offsets), out=total)
        ctypes.memmove(output.data_ptr(), self._total, count * width)
        _note_change(output)

    def _array(self, dtype: torch.dtype) -> Any:
        """Return the whole memory as an array."""
        found = self._arrays.get(dtype)
        if found is None:
            found = self._arrays[dtype] = np.frombuffer(self.memory.map, _NUMPY_TYPES[dtype])
        return found

    def _room(self, size: int) -> int:
        start, written = self.memory.start_of(self.rank), self._written
        assert size <= _HEAP, "a message is larger than the memory"
        while True:
            while written and self._is_read(written[0]):
                written.popleft()
            if not written:
                self._next = start
            if len(written) < _DEPTH and self._next + size <= start + _HEAP:
                return self._next
            self.sleep(0.001)  # no bell rings when a message has been read, but this is rare

    def _is_read(self, message: _Message) -> bool:
        done, first = self.memory.done, message.channel * self.memory.ranks
        for reader in message.readers:  # noqa: SIM110 (a generator takes twice as long)
            if done[first + reader] <= message.group_index:
                return False
        return True

    def start(self, work: Work) -> None:
        """Queue a work in its order."""
        self._waiting.setdefault(work.order, deque()).append(work)

    def advance(self, order: int) -> None:
        """Complete the works whose messages have arrived."""
        works = self._waiting.get(order)
        while works and works[0].is_ready():
            works.popleft().complete()

    def sleep(self, seconds: float = 0.1) -> None:
        """Sleep until a bell rings, but at most `seconds`, in case one rang a moment too early.

        Complete what can be completed first, as others may wait for the space that it takes.
        """
        for order in self._waiting:
            self.advance(order)
        self._bell.poll(1000 * seconds)
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.memory.bells[self.rank])
        if self.memory.failed[0]:
            raise RuntimeError("another rank has failed")

    def wait(self, work: Work) -> None:
        """Wait until a work is complete.

        Raises:
            RuntimeError: Another rank has failed, or nothing has arrived for a minute.
        """
        deadline = 0.0
        while not work.is_completed():
            self.memory.asleep[self.rank] = 1
            if not self._waiting[work.order][0].is_ready():
                deadline = deadline or time.monotonic() + _SECONDS
                if time.monotonic() > deadline:
                    raise RuntimeError(f"rank {self.rank} has waited for {_SECONDS} s")
                self.sleep()
            self.memory.asleep[self.rank] = 0


class Work(dist.Work):
    """A collective in progress, as `torch.distributed.Work`.

    Args:
        rank: The waiting rank.
        order: Works with the same order complete one after another.
        sources: The channels that it reads, with each message's number and its size in bytes.
        finish: Reads the messages, given their offsets.
    """

    def __init__(
        self,
        rank: Rank,
        order: int,
        sources: Sequence[tuple[int, int, int]],
        finish: Callable[[list[int]], None],
    ) -> None:
        super().__init__()
        self.order = order
        self._rank, self._sources, self._finish = rank, sources, finish
        self._complete = not sources
        if sources:
            rank.start(self)

    def is_ready(self) -> bool:
        """Return whether all that it reads has arrived, though earlier works may be pending."""
        posted = self._rank.memory.posted
        for channel, number, _ in self._sources:  # noqa: SIM110 (as above)
            if posted[channel] <= number:
                return False
        return True

    def complete(self) -> None:
        """Read the messages.

        Raises:
            RuntimeError: A message has more or fewer bytes than expected.
        """
        memory, rank, offsets = self._rank.memory, self._rank.rank, []
        for channel, number, size in self._sources:
            slot = channel * _DEPTH + number % _DEPTH
            if memory.sizes[slot] != size:
                raise RuntimeError(f"{size} bytes expected, {memory.sizes[slot]} given")
            offsets.append(memory.offsets[slot])
        self._finish(offsets)
        for channel, number, _ in self._sources:
            memory.done[channel * memory.ranks + rank] = number + 1
        self._complete = True

    def is_completed(self) -> bool:
        if not self._complete:
            self._rank.advance(self.order)
        return self._complete

    def wait(self, timeout: object = None) -> bool:
        if not self.is_completed():
            self._rank.wait(self)
        return True


class SendWork(Work):
    """A message in transit to one member."""

    def is_ready(self) -> bool:
        """Return whether the receiver has asked for it."""
        ((channel, number, _),) = self._sources
        return self._rank.memory.asked[channel] > number

    def complete(self) -> None:
        """Mark it as sent; its space is free once it has been read."""
        self._complete = True


class SharedMemoryGroup(dist.ProcessGroup):
    """A process group over the memory, with the operations that this project's layouts use.

    Args:
        rank: This process's side.
        number: The group's number in the memory.
        ranks: The global ranks of its members.
        own: This process's rank in the group.
    """

    def __init__(self, rank: Rank, number: int, ranks: Sequence[int], own: int) -> None:
        super().__init__(own, len(ranks))
        self._rank, self._number, self._ranks, self._own = rank, number, tuple(ranks), own
        self._size, self._members = len(ranks), range(len(ranks))
        self._counts: dict[int, int] = {}  # messages read, by channel
        self._name = self._description = ""

    def getBackendName(self) -> str:  # noqa: N802
        return "shared_memory"

    def _get_backend(self, device: torch.device) -> SharedMemoryGroup:
        """Return itself: since torch 2.15, a batch of messages asks for it."""
        return self

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def group_desc(self) -> str:
        return self._description

    def allreduce(self, tensors: list[Tensor], opts: Any) -> Work:
        (x,) = tensors
        self._post_to_all(x)
        return self._reduce(x, x, 0, opts.reduceOp)

    def reduce_scatter_single(self, output: Tensor, x: Tensor, opts: Any) -> Work:
        self._post_to_all(x)
        return self._reduce(output, x, output.nbytes * self._own, opts.reduceOp)

    _reduce_scatter_base = reduce_scatter_single

    def _reduce(self, output: Tensor, x: Tensor, start: int, op: Any) -> Work:
        add = next((add for reduce_op, add in _REDUCTIONS.items() if op == reduce_op), None)
        if add is None:
            raise NotImplementedError(f"reduction {op}")
        average, rank = op == dist.ReduceOp.AVG, self._rank

        def finish(offsets: list[int]) -> None:
            rank.reduce([offset + start for offset in offsets], output, add, average)

        sizes = [x.nbytes] * self._size
        return self._work(self._members, None, finish if output.numel() else _nothing, sizes)

    def all_gather_single(self, output: Tensor, x: Tensor, opts: Any = None) -> Work:
        self._post_to_all(x)
        return self._read(output, self._members, None, [output.nbytes // self._size] * self._size)

    _allgather_base = all_gather_single

    def allgather(self, outputs: list[list[Tensor]], tensors: list[Tensor], opts: Any) -> Work:
        self._post_to_all(tensors[0])
        return self._read_into(outputs[0], self._members)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Work:
        if opts.rootRank == self._own:
            self._post_to_all(tensors[0])
        return self._read_into(tensors, [opts.rootRank])

    def barrier(self, opts: Any = None) -> Work:
        self._post(None, 0, 0)
        return self._work(self._members, None, _nothing, [0] * self._size)

    def all_to_all_single(
        self,
        output: Tensor,
        x: Tensor,
        output_sizes: list[int],
        input_sizes: list[int],
        opts: Any = None,
    ) -> Work:
        given, taken = (
            [tensor.nbytes // len(tensor) * rows for rows in sizes]
            if sizes and len(tensor)
            else [tensor.nbytes // self._size] * self._size
            for tensor, sizes in ((x, input_sizes), (output, output_sizes))
        )
        x = x.contiguous()
        address = x.data_ptr()
        for peer, size in enumerate(given):
            self._post(peer, address, size)
            address += size
        return self._read(output, self._members, self._own, taken)

    alltoall_base = all_to_all_single

    def send(self, tensors: list[Tensor], to: int, tag: int) -> Work:
        channel = self._channel(self._own, to)
        number = self._rank.memory.posted[channel]
        x = tensors[0].contiguous()
        self._post(to, x.data_ptr(), x.nbytes)
        return SendWork(self._rank, channel, [(channel, number, x.nbytes)], _nothing)

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> Work:
        (x,) = tensors
        return self._read(x, [source], self._own, [x.nbytes])

    def _channel(self, source: int, to: int | None) -> int:
        """Return the channel of messages from one member to another, or to all of them."""
        ranks = self._rank.memory.ranks
        return (self._number * ranks + source) * (ranks + 1) + (ranks if to is None else to)

    def _post_to_all(self, x: Tensor) -> None:
        x = x.contiguous()
        self._post(None, x.data_ptr(), x.nbytes)

    def _post(self, to: int | None, address: int, size: int) -> None:
        readers = self._ranks if to is None else (self._ranks[to],)
        self._rank.post(self._channel(self._own, to), readers, address, size)

    def _work(
        self,
        sources: Sequence[int],
        to: int | None,
        finish: Callable[[list[int]], None],
        sizes: Sequence[int],
    ) -> Work:
        messages, counts = [], self._counts
        for source, size in zip(sources, sizes, strict=True):
            channel = self._channel(source, to)
            number = counts.get(channel, 0)
            messages.append((channel, number, size))
            counts[channel] = number + 1
            if to is not None:
                self._rank.ask(channel, number, self._ranks[source])
        order = messages[0][0] if len(messages) == 1 and to is not None else -1 - self._number
        return Work(self._rank, order, messages, finish)

    def _read(
        self, output: Tensor, sources: Sequence[int], to: int | None, sizes: Sequence[int]
    ) -> Work:
        """Read a message of each size into the output, one after the other."""
        start, whole = self._rank.address, output.is_contiguous()

        def finish(offsets: list[int]) -> None:
            target = output if whole else torch.empty(output.shape, dtype=output.dtype)
            address = target.data_ptr()
            for offset, size in zip(offsets, sizes, strict=True):
                ctypes.memmove(address, start + offset, size)
                address += size
            if not whole:
                with torch.no_grad():
                    output.copy_(target)
            else:
                _note_change(output)

        return self._work(sources, to, finish if output.numel() else _nothing, sizes)

    def _read_into(self, outputs: list[Tensor], sources: Sequence[int]) -> Work:
        """Read a message to all from each source into its output."""

        def finish(offsets: list[int]) -> None:
            with torch.no_grad():
                for output, offset in zip(outputs, offsets, strict=True):
                    if output.numel():
                        part = self._rank.view(offset, output.dtype, output.numel())
                        output.copy_(part.view_as(output))

        return self._work(sources, None, finish, [output.nbytes for output in outputs])


def _note_change(output: Tensor) -> None:
    """Let autograd know that a tensor was written to."""
    if not output.is_inference():
        increment_version(output)


def _nothing(offsets: list[int]) -> None:
    pass


def register(memory: Memory, rank: int) -> str:
    """Register the backend with torch.distributed in this process, and return its name."""
    local_rank = Rank(memory, rank)

    def create(options: Any, _: object) -> SharedMemoryGroup:
        ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
        group_index = memory.group_index(f"{options.group_id} {ranks}")
        return SharedMemoryGroup(local_rank, group_index, ranks, options.group_rank)

    dist.Backend.register_backend("shared_memory", create, extended_api=True, devices=["cpu"])
    return "shared_memory"
