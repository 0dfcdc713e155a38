"""Messages between neighboring pipeline stages: activations forward, gradients backward.

The two edges of a stage have different process groups, and so do activations and gradients. In each
group a stage only sends or only receives, in the schedule's order. NCCL may run the operations of a
group one after another. If two directions shared a group, two stages that both send first would
wait for each other forever.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.parallel.journal import Journal, Transfer
from megatron.parallel.layout import Layout
from megatron.parallel.pipeline.schedule import SENDS, Operation


@dataclass
class _Edge:
    """One direction of the connection to a neighbor.

    Attributes:
        is_send: Whether this process sends over the edge; otherwise it receives.
        group: The process group of the edge.
        peer: The global rank of the neighbor.
        journal: The record of this process's communication.
        pending: The messages that have been started, oldest first, each with its tensor.
    """

    is_send: bool
    group: dist.ProcessGroup
    peer: int
    journal: Journal
    pending: deque[tuple[Transfer, Tensor]] = field(default_factory=deque)

    def start(self, tensor: Tensor) -> Transfer:
        transfer, kind = (dist.isend, "send") if self.is_send else (dist.irecv, "receive")
        work = transfer(tensor, self.peer, group=self.group)
        assert work is not None, "an edge's group contains both of its ends"
        return self.journal.message(kind, self.peer, work)


EdgeKey = tuple[str, int]  # the kind of operation and the peer stage


class PipelineChannel:
    """A stage's connection to its neighbors.

    All messages of a micro-batch have the same shape. `post_receive`, `receive` and `send` must be
    called in the order of the stage's operations; `finish` ends an update. Construction is
    collective over the world.

    Args:
        layout: The grid of processes, with process groups if there is more than one stage.
        device: The device on which received tensors are allocated.
        dtype: The data type of activations and their gradients.
        shape: The shape of a message: [s, b, h], or [s/t, b, h] with sequence parallelism. It may
            be omitted if `with_shapes` is called next.
        ring: Whether to also connect the last stage to the first, for schedules with several
            chunks.
    """

    def __init__(
        self,
        layout: Layout,
        *,
        device: torch.device,
        dtype: torch.dtype,
        shape: Sequence[int] = (),
        ring: bool = False,
    ) -> None:
        """Connect this process to its neighbors."""
        self._edges = connect(layout, ring=ring, device=device)
        self._device, self._dtype = device, dtype
        self._used_shapes: set[tuple[int, ...]] = set()
        self._shape_of: Callable[[int], Sequence[int]] = lambda micro_batch: shape

    def with_shapes(self, shape_of: Callable[[int], Sequence[int]]) -> PipelineChannel:
        """Return a copy of this channel whose message shapes depend on the micro-batch.

        Args:
            shape_of: A function that returns the shape of a message, given the index of its
                micro-batch.
        """
        other = copy.copy(self)
        other._shape_of = shape_of
        return other

    def with_samples(self, samples: int, usual: int) -> PipelineChannel:
        """Return a channel for micro-batches of a given size: this channel, or a copy.

        Args:
            samples: The number of samples in each micro-batch.
            usual: The number of samples in each micro-batch for which this channel was made.
        """
        if samples == usual:
            return self

        def shape(micro_batch: int) -> tuple[int, ...]:
            rows, sequences, *rest = self._shape_of(micro_batch)
            return rows, sequences // usual * samples, *rest

        return self.with_shapes(shape)

    def is_first_use(self, micro_batch: int) -> bool:
        """Return whether the messages of a micro-batch have a new shape, and record the shape."""
        shape = tuple(self._shape_of(micro_batch))
        is_new = shape not in self._used_shapes
        self._used_shapes.add(shape)
        return is_new

    def post_receive(self, operation: Operation) -> None:
        """Start receiving the message of an operation. `receive` waits for it."""
        edge = self._edge(operation)
        shape = self._shape_of(operation.micro_batch)
        buffer = torch.empty(shape, dtype=self._dtype, device=self._device)
        edge.pending.append((edge.start(buffer), buffer))

    def receive(self, operation: Operation) -> Tensor:
        """Return the message of the oldest pending receive on the operation's edge.

        On a CPU, the process waits for the message. On a GPU, only later kernels wait for it.
        """
        message, buffer = self._edge(operation).pending.popleft()
        message.wait()
        return buffer

    def send(self, operation: Operation, tensor: Tensor) -> None:
        """Start sending a tensor. Its values are read later and must not be changed in place.

        The channel keeps the tensor alive until it has been sent.
        """
        shape = tuple(self._shape_of(operation.micro_batch))
        assert tuple(tensor.shape) == shape and tensor.dtype == self._dtype, (
            f"{operation}: the tensor is {tensor.dtype} {tuple(tensor.shape)}, "
            f"but every message is {self._dtype} {shape}"
        )
        edge = self._edge(operation)
        tensor = tensor.detach().contiguous()
        edge.pending.append((edge.start(tensor), tensor))
        # With gloo, no send counts as completed before `finish`.
        while edge.pending and edge.pending[0][0].is_completed():
            edge.pending.popleft()

    def finish(self) -> None:
        """Wait until all messages have been sent. No posted receive may remain."""
        for (kind, _), edge in self._edges.items():
            assert kind in SENDS or not edge.pending, f"{kind}: a message was never received"
            while edge.pending:
                edge.pending.popleft()[0].wait()

    def _edge(self, operation: Operation) -> _Edge:
        assert operation.peer is not None, f"{operation} is neither a send nor a receive"
        return self._edges[operation.kind, operation.peer]


def connect(layout: Layout, *, ring: bool, device: torch.device) -> dict[EdgeKey, _Edge]:
    """Return this process's edges with new process groups. Collective over the world.

    A message is sent over each edge immediately, in the same order on all stages. NCCL builds a
    connection at the first message and blocks until both ends take part, which could cause a
    deadlock during a schedule.

    Args:
        layout: The grid of processes.
        ring: Whether to also connect the last stage to the first.
        device: The device of the messages.
    """
    stages = layout.pipeline.size
    if stages == 1:
        return {}
    stage, ranks = layout.pipeline.rank, layout.pipeline.ranks
    edges: dict[EdgeKey, _Edge] = {}
    for kind, step in (("activation", 1), ("gradient", -1)):
        groups = _groups(layout, ring)
        for low in range(stages if ring else stages - 1):
            ends = (low, (low + 1) % stages)
            source, destination = ends[::step]
            group = groups["wrap" if low == stages - 1 else "odd" if low % 2 else "even"]
            if stage in ends:
                is_send = stage == source
                peer = destination if is_send else source
                edge = _Edge(is_send, group, ranks[peer], layout.journal)
                edges[f"{'send' if is_send else 'receive'}_{kind}", peer] = edge
                edge.start(torch.zeros(1, device=device)).wait()
    return edges


def _groups(layout: Layout, ring: bool) -> dict[str, dist.ProcessGroup]:
    """Create this pipeline's process groups for activations or gradients.

    Even edges, odd edges, and the edge from the last stage to the first ("wrap") have different
    groups, so in each group a stage communicates with at most one neighbor and in one direction.
    Every process creates the groups of all pipelines in the same order.
    """
    own_groups: dict[str, dist.ProcessGroup] = {}
    for ranks in map(list, zip(*layout.stages, strict=True)):
        for name in ("even", "odd", "wrap") if ring else ("even", "odd"):
            group = dist.new_group(ranks)
            if layout.world.rank in ranks:
                own_groups[name] = group
    return own_groups
