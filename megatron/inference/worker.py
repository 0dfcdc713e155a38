"""The loop of every serving rank, which receives commands, runs steps and sends events.

The first rank of a copy of the model receives commands from outside and sends them to the copy's
other ranks, so that every engine gets the same calls in the same order and makes the same
decisions. Only the first rank sends events. A server has a single copy, whose first rank is rank 0.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

import torch

from megatron.inference.engine import BatchEngine
from megatron.inference.messages import Add, Cancel, Command, Shutdown, read, write
from megatron.inference.request import Event, Finished, RequestError
from megatron.parallel.collectives import broadcast
from megatron.parallel.layout import Axis

# Interval at which an idle first rank contacts the other ranks, far below any collective's timeout.
_IDLE_SECONDS = 5.0

logger = logging.getLogger(__name__)


class Inbox(Protocol):
    """The first rank's connection to the clients."""

    def poll(self, wait: float) -> list[Command]:
        """Return the commands that have arrived, in order.

        Args:
            wait: Maximum time to wait for the first command, in seconds.
        """
        ...

    def send(self, events: Sequence[Event]) -> None:
        """Send events to the clients, without waiting for those that read slowly."""
        ...


def serve(engine: BatchEngine, inbox: Inbox | None) -> None:
    """Serve requests until told to shut down. Collective over this copy of the model's ranks.

    Args:
        engine: This rank's engine, which has the same settings as the other ranks' engines.
        inbox: The first rank's inbox, or `None` on the other ranks.
    """
    replica, device = engine.executor.replica, engine.executor.device.torch_device
    assert (inbox is not None) == (replica.rank == 0), (
        "the first rank has an inbox, and no other rank has one"
    )
    replica.journal.enter("text generation")
    running = True
    while running:
        local_commands = (
            [] if inbox is None else inbox.poll(0.0 if engine.has_work else _IDLE_SECONDS)
        )
        events: list[Event] = []
        for command in _share(local_commands, replica, device):
            running = running and not isinstance(command, Shutdown)
            events += execute(engine, command)
        if engine.has_work:
            events += _step(engine, is_alone=replica.size == 1)
        if inbox is not None and events:
            inbox.send(events)


def execute(engine: BatchEngine, command: Command) -> list[Event]:
    """Execute a command, and return the events that it causes immediately."""
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


def _step(engine: BatchEngine, *, is_alone: bool) -> list[Event]:
    """Run a single step. With one process, an error ends the requests but not the process.

    With several ranks, an unexpected error ends this rank. Its launcher then ends the others, which
    may be waiting in a collective that this rank will never enter.
    """
    try:
        return engine.step()
    except Exception as error:
        if not is_alone:
            raise
        logger.exception("a step failed; its requests end with an error")
        return engine.abort(f"{type(error).__name__}: {error}")


def _share(commands: list[Command], replica: Axis, device: torch.device) -> list[Command]:
    """Broadcast the first rank's commands, as a size and then bytes, and return them."""
    if replica.size == 1:
        return commands
    data = write(Command, commands) if commands else b""
    size = int(broadcast(torch.tensor([len(data)], device=device), replica))
    if not size:
        return []
    body = torch.empty(size, dtype=torch.uint8, device=device)
    if replica.rank == 0:
        body.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    return read(Command, broadcast(body, replica).cpu().numpy().tobytes())
