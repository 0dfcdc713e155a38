"""Checks that a pipeline schedule is complete, in order, free of deadlocks and within memory."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator

from megatron.parallel.pipeline.schedule import (
    SENDS,
    Operation,
    OperationKind,
    Schedule,
    ScheduleKind,
    activation_bound,
    make_schedule,
)

Message = tuple[int, int]  # the micro-batch, and the part that receives the message
Edge = tuple[int, int, bool]  # source stage, destination stage, whether it carries activations


class ScheduleError(AssertionError):
    """An error in the operations of a schedule, which is always a bug in this package."""


def replay(schedule: Schedule) -> Iterator[tuple[int, Operation]]:
    """Yield every (stage, operation) pair in an order in which all operations can run.

    Sends are buffered. As with NCCL and gloo, a receive takes the oldest message that was sent over
    its edge, so this must be the message that the operation needs.

    Raises:
        ScheduleError: There is a deadlock, or a message is out of order or never received.
    """
    stages = len(schedule)
    edges: defaultdict[Edge, deque[Message]] = defaultdict(deque)
    waiting: dict[Edge, int] = {}  # the stage that waits for the edge's next message
    position = [0] * stages
    ready = deque(range(stages))
    while ready:
        stage = ready.popleft()
        operations = schedule[stage]
        i, end = position[stage], len(operations)
        while i < end:
            operation = operations[i]
            kind, micro_batch, chunk, peer = operation
            if peer is not None:
                is_activation = kind in ("send_activation", "receive_activation")
                part = chunk * stages + stage
                if kind in SENDS:
                    edge = (stage, peer, is_activation)
                    edges[edge].append((micro_batch, part + 1 if is_activation else part - 1))
                    if edge in waiting:
                        ready.append(waiting.pop(edge))
                else:
                    edge = (peer, stage, is_activation)
                    if not edges[edge]:
                        waiting[edge] = stage
                        break
                    message = edges[edge].popleft()
                    if message != (micro_batch, part):
                        raise ScheduleError(
                            f"stage {stage}: {operation} receives the message for micro-batch "
                            f"{message[0]} of part {message[1]}"
                        )
            yield stage, operation
            i += 1
        position[stage] = i
    stuck = [
        f"stage {stage} waits in {operations[i]}"
        for stage, (operations, i) in enumerate(zip(schedule, position, strict=True))
        if i < len(operations)
    ]
    if stuck:
        raise ScheduleError("deadlock: " + "; ".join(stuck))
    if left := [edge for edge, queue in edges.items() if queue]:
        raise ScheduleError(f"messages that are never received, on edges {left}")


def check(schedule: Schedule) -> tuple[int, ...]:
    """Check that the schedule is complete and in order, and runs to the end.

    Every micro-batch must pass through every chunk of every stage once: receive, forward, send,
    receive the gradient, backward, send, each with the right peer and only where it applies.
    Messages must arrive in the order in which they are received, and no stage may wait forever.

    Returns:
        The maximum number of (micro-batch, chunk) activations that each stage holds at once.

    Raises:
        ScheduleError: The schedule is wrong. The message names the operation and the reason.
    """
    peaks = tuple(_check_stage(schedule, stage) for stage in range(len(schedule)))
    for _ in replay(schedule):
        pass
    return peaks


def check_bounds(kind: ScheduleKind, stages: int, chunks: int, micro_batches: int) -> Schedule:
    """Return a schedule after checking that it runs within the memory bound of its kind.

    The arguments are those of `make_schedule`.

    Raises:
        ScheduleError: The schedule cannot run, or it exceeds the bound on activations.
    """
    schedule = make_schedule(kind, stages, chunks, micro_batches)
    for stage, peak in enumerate(check(schedule)):
        bound = activation_bound(kind, stage, stages, chunks, micro_batches)
        if peak > bound:
            raise ScheduleError(f"stage {stage} holds {peak} activations; {kind} allows {bound}")
    return schedule


def _check_stage(schedule: Schedule, stage: int) -> int:
    """Check the order of a stage's operations, and return the peak number of activations."""
    chunks = 1 + max(operation.chunk for operations in schedule for operation in operations)
    micro_batches = 1 + max(operation.micro_batch for operation in schedule[0])
    kinds = {operation.kind for operation in schedule[stage]}
    expected = [_life(stage, chunk, len(schedule), chunks, kinds) for chunk in range(chunks)]
    done = [[0] * micro_batches for _ in range(chunks)]
    live = peak = 0
    release = "backward_weight" if "backward_weight" in kinds else "backward"
    for operation in schedule[stage]:
        kind, micro_batch, chunk, peer = operation
        steps, life = done[chunk], expected[chunk]
        step = steps[micro_batch]
        if step == len(life) or life[step] != (kind, peer):
            wanted = "nothing more" if step == len(life) else life[step]
            raise ScheduleError(f"stage {stage}: {operation} instead of {wanted}")
        if len(schedule) == 1 and chunk > 0 and kind == "forward":
            _require(done[chunk - 1][micro_batch] > 0, operation)
        if len(schedule) == 1 and chunk < chunks - 1 and kind == "backward":
            _require(done[chunk + 1][micro_batch] > 1, operation)
        steps[micro_batch] = step + 1
        if kind == "forward":
            live += 1
            peak = max(peak, live)
        elif kind == release:
            live -= 1
    for chunk, life in enumerate(expected):
        for micro_batch, step in enumerate(done[chunk]):
            if step < len(life):
                raise ScheduleError(
                    f"stage {stage}: micro-batch {micro_batch}, chunk {chunk} lacks {life[step:]}"
                )
    return peak


def _require(condition: bool, operation: Operation) -> None:
    if not condition:
        raise ScheduleError(f"{operation} comes before the chunk it depends on")


def _life(
    stage: int, chunk: int, stages: int, chunks: int, kinds: set[OperationKind]
) -> list[tuple[str, int | None]]:
    """Return the kind and peer of each operation of a micro-batch in a chunk, in order."""
    first = stages == 1 or (stage == 0 and chunk == 0)
    last = stages == 1 or (stage == stages - 1 and chunk == chunks - 1)
    following, previous = (stage + 1) % stages, (stage - 1) % stages
    is_split = "backward_weight" in kinds
    steps: list[tuple[str, int | None, bool]] = [
        ("receive_activation", previous, not first),
        ("forward", None, True),
        ("send_activation", following, not last),
    ]
    if is_split or "backward" in kinds:
        steps += [
            ("receive_gradient", following, not last),
            ("backward_input" if is_split else "backward", None, True),
            ("send_gradient", previous, not first),
            ("backward_weight", None, is_split),
        ]
    return [(kind, peer) for kind, peer, applies in steps if applies]
