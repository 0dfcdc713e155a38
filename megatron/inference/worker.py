"""The loop of every rank that serves: commands in, steps, events out.

Rank 0 takes commands from outside and tells them to the other ranks, so that every engine gets the
same calls in the same order; all decisions follow from these. Only rank 0 sends events.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.inference.messages import Add, Cancel, Command, Shutdown, read, write
from megatron.inference.request import Engine, Event, Finished, RequestError
from megatron.parallel.layout import Axis

# An idle rank 0 speaks to the others this often: far below any timeout of a collective.
IDLE_SECONDS = 5.0

logger = logging.getLogger(__name__)


class Inbox(Protocol):
    """Rank 0's way to those who ask."""

    def poll(self, wait: float) -> list[Command]:
        """What has arrived, in order. Waits up to `wait` seconds for the first; 0: not at all."""
        ...

    def send(self, events: Sequence[Event]) -> None:
        """Hand these on. Must not wait for slow readers."""
        ...


def serve(
    engine: Engine, inbox: Inbox | None, world: Axis, *, device: torch.device | None = None
) -> None:
    """Run until the command to shut down. Collective over `world`.

    Args:
        engine: this rank's; they are equal.
        inbox: of rank 0; None on the others.
        world: all ranks of the layout; `Layout.single().world` of one process.
        device: where tensors of the world's collectives are; None: the CPU.
    """
    assert (inbox is not None) == (world.rank == 0), "rank 0, and no other, has an inbox"
    channel = _Channel(world, device or torch.device("cpu"))
    world.journal.enter("text generation")
    running = True
    while running:
        mine = [] if inbox is None else inbox.poll(0.0 if engine.has_work else IDLE_SECONDS)
        events: list[Event] = []
        for command in channel.share(mine):
            running = running and not isinstance(command, Shutdown)
            events += obey(engine, command)
        if engine.has_work:
            events += _step(engine, alone=world.size == 1)
        if inbox is not None and events:
            inbox.send(events)


def obey(engine: Engine, command: Command) -> list[Event]:
    """Carry out one command; what it leads to at once."""
    match command:
        case Add(request):
            try:
                engine.add(request)
            except RequestError as error:
                return [Finished(request.id, "refused", str(error))]
            return []
        case Cancel(request_id):
            return engine.cancel(request_id)
    return engine.abort("the server is shutting down")


def _step(engine: Engine, *, alone: bool) -> list[Event]:
    """One step. What goes wrong in it ends the requests and not the process, where it is alone.

    Among several ranks an unexpected error ends this one, and with it, through its launcher, all:
    others may wait for it in a collective that it will never enter.
    """
    try:
        return engine.step()
    except Exception as error:
        if not alone:
            raise
        logger.exception("a step failed; its requests end with an error")
        return engine.abort(f"{type(error).__name__}: {error}")


class _Channel:
    """Rank 0's commands to all ranks: the number of bytes, then the bytes."""

    def __init__(self, world: Axis, device: torch.device) -> None:
        self._world = world
        self._device = device

    def share(self, commands: list[Command]) -> list[Command]:
        """Rank 0's commands, on every rank. Collective."""
        if self._world.size == 1:
            return commands
        data = write(Command, commands) if self._world.rank == 0 and commands else b""
        size = torch.tensor([len(data)], dtype=torch.int64, device=self._device)
        self._broadcast(size)
        if not int(size):
            return []
        body = torch.empty(int(size), dtype=torch.uint8, device=self._device)
        if self._world.rank == 0:
            body.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        self._broadcast(body)
        return read(Command, body.cpu().numpy().tobytes())

    def _broadcast(self, tensor: Tensor) -> None:
        work = dist.broadcast(
            tensor, src=self._world.ranks[0], group=self._world.group, async_op=True
        )
        self._world.transfer("broadcast", work).wait()
