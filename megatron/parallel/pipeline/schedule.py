"""Pipeline schedules as data: for every stage, an ordered list of operations.

The model is split into stages * chunks parts. Chunk c of stage p is part c * stages + p, so with
several chunks a micro-batch goes around the ring of stages once per chunk. A schedule is a pure
function of its kind and the numbers of stages, chunks and micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Literal, NamedTuple, get_args

from megatron.config.parallel import ParallelConfig

ScheduleKind = Literal["gpipe", "1f1b", "interleaved", "zero-bubble"]
SCHEDULE_KINDS: tuple[ScheduleKind, ...] = get_args(ScheduleKind)

OperationKind = Literal[
    "forward",
    "backward",  # gradients of inputs and of weights
    "backward_input",
    "backward_weight",
    "send_activation",
    "receive_activation",
    "send_gradient",
    "receive_gradient",
]
COMPUTE: frozenset[OperationKind] = frozenset(
    ("forward", "backward", "backward_input", "backward_weight")
)
SENDS: frozenset[OperationKind] = frozenset(("send_activation", "send_gradient"))


class Operation(NamedTuple):
    """One operation of a stage.

    Attributes:
        kind: The kind of operation. Activations are sent to the next part, and gradients to the
            previous part.
        micro_batch: The index of the micro-batch, from 0.
        chunk: The index of the stage's chunk, from 0. A message belongs to the chunk that computes
            it (send) or needs it (receive).
        peer: The stage at the other end of a message; `None` for a computation.
    """

    kind: OperationKind
    micro_batch: int
    chunk: int
    peer: int | None = None

    def __str__(self) -> str:
        """Return a description such as "forward of micro-batch 0, chunk 0"."""
        what = f"{self.kind} of micro-batch {self.micro_batch}, chunk {self.chunk}"
        return what if self.peer is None else f"{what} (peer stage {self.peer})"


Operations = tuple[Operation, ...]
Schedule = tuple[Operations, ...]  # one entry per stage


def make_schedule(kind: ScheduleKind, stages: int, chunks: int, micro_batches: int) -> Schedule:
    """Return the operations of every stage, including communication.

    Args:
        kind: "gpipe" runs all forward passes, then all backward passes. "1f1b" runs backward passes
            as early as possible, so that stage p holds at most stages - p micro-batches (Narayanan
            et al., 2019). "interleaved" is 1F1B over several chunks per stage, which divides the
            bubble by the number of chunks (Narayanan et al., 2021). "zero-bubble" is ZB-H1: weight
            gradients fill most of 1F1B's bubble, and no stage needs more memory than the first
            stage of 1F1B (Qi et al., 2023).
        stages: The pipeline-parallel size.
        chunks: The number of chunks (virtual stages) per stage: more than one for "interleaved",
            any number for "gpipe", otherwise one.
        micro_batches: The number of micro-batches in an update, which need not be a multiple of
            `stages`.
    """
    assert chunks == 1 or kind in {"gpipe", "interleaved"}, f"{kind} supports one chunk"
    computes = {
        "gpipe": _gpipe,
        "1f1b": _one_forward_one_backward,
        "interleaved": _one_forward_one_backward,
        "zero-bubble": _zero_bubble,
    }[kind]
    return tuple(
        tuple(_with_messages(computes(stage, stages, chunks, micro_batches), stage, stages, chunks))
        for stage in range(stages)
    )


def schedule_kind(parallel: ParallelConfig, chunks: int) -> ScheduleKind:
    """Return the kind of schedule that the flags specify.

    The default is "1f1b" or, with several chunks per stage, "interleaved".
    """
    requested = parallel.pipeline_schedule
    if requested is not None:
        return requested  # type: ignore[return-value] # the flag's choices
    return "interleaved" if chunks > 1 else "1f1b"


def forward_only(schedule: Schedule) -> Schedule:
    """Return the schedule without backward passes and gradients, for evaluation."""
    kinds = {"forward", "send_activation", "receive_activation"}
    return tuple(
        tuple(operation for operation in operations if operation.kind in kinds)
        for operations in schedule
    )


def activation_bound(kind: ScheduleKind, stage: int, stages: int, chunks: int, micro: int) -> int:
    """Return the maximum number of (micro-batch, chunk) activations that a stage holds at once.

    With uniform layers, each is 1 / (stages * chunks) of a micro-batch's activations. In a
    zero-bubble schedule, every stage holds as many as the first stage of 1F1B, because deferred
    weight gradients need the activations.

    Args:
        kind: The kind of schedule.
        stage: The index of the stage, from 0.
        stages: The pipeline-parallel size.
        chunks: The number of chunks per stage.
        micro: The number of micro-batches in an update.
    """
    bounds = {
        "gpipe": micro * chunks,
        "1f1b": stages - stage,
        "interleaved": 2 * (stages - stage - 1) + (chunks - 1) * stages + 1,
        "zero-bubble": stages,
    }
    return min(bounds[kind], micro * chunks)


def loss_bound(kind: ScheduleKind, micro: int) -> int:
    """Return the maximum number of micro-batches whose logits the last stage holds at once.

    Every kind except "gpipe" starts a backward pass as soon as a micro-batch has passed
    through the last part. The head's tensors are freed when its input gradient has been computed,
    because the head's weight gradient is not deferred.

    Args:
        kind: The kind of schedule.
        micro: The number of micro-batches in an update.
    """
    return micro if kind == "gpipe" else 1


def _gpipe(stage: int, stages: int, chunks: int, micro_batches: int) -> list[Operation]:
    """Return all forward passes chunk by chunk, then all backward passes, the last chunk first."""
    forwards = [Operation("forward", m, c) for c in range(chunks) for m in range(micro_batches)]
    backwards = [
        Operation("backward", m, c) for c in reversed(range(chunks)) for m in range(micro_batches)
    ]
    return forwards + backwards


def _one_forward_one_backward(
    stage: int, stages: int, chunks: int, micro_batches: int
) -> list[Operation]:
    """Return warm-up forward passes, alternating passes, and then the remaining backward passes.

    With several chunks, micro-batches are processed in groups of `stages`. A stage runs the whole
    group through one chunk before the next, and by then the group's first micro-batch has come
    around the ring. If the last group is not full, it is scheduled as if it were, and the missing
    micro-batches are then removed. Removing operations from a schedule without deadlock causes
    neither a deadlock nor a higher memory peak.
    """
    remaining = stages - 1 - stage
    if chunks == 1:
        order = [(m, 0) for m in range(micro_batches)]
        warm_up = remaining
    else:
        groups = -(-micro_batches // stages)
        order = [
            (group * stages + i, c)
            for group in range(groups)
            for c in range(chunks)
            for i in range(stages)
        ]
        warm_up = 2 * remaining + (chunks - 1) * stages
    forwards = [Operation("forward", m, c) for m, c in order]
    backwards = [Operation("backward", m, chunks - 1 - c) for m, c in order]
    warm_up = min(warm_up, len(order))
    steady = chain.from_iterable(zip(forwards[warm_up:], backwards, strict=False))
    operations = chain(forwards[:warm_up], steady, backwards[len(order) - warm_up :])
    return [operation for operation in operations if operation.micro_batch < micro_batches]


def _zero_bubble(stage: int, stages: int, chunks: int, micro_batches: int) -> list[Operation]:
    """Return ZB-H1: 1F1B with weight gradients `stage` micro-batches behind the input gradients.

    Late stages hold fewer micro-batches in 1F1B, so they may defer more weight gradients. They
    compute deferred weight gradients at the end, while they would otherwise wait for messages.
    """
    operations = []
    for operation in _one_forward_one_backward(stage, stages, 1, micro_batches):
        if operation.kind == "forward":
            operations.append(operation)
            continue
        micro_batch = operation.micro_batch
        operations.append(Operation("backward_input", micro_batch, 0))
        if micro_batch >= stage:
            operations.append(Operation("backward_weight", micro_batch - stage, 0))
    remaining = range(max(micro_batches - stage, 0), micro_batches)
    return operations + [Operation("backward_weight", m, 0) for m in remaining]


def _with_messages(
    computes: Iterable[Operation], stage: int, stages: int, chunks: int
) -> Iterable[Operation]:
    """Add a receive directly before each computation and a send directly after it, as needed.

    The first part receives no activations, and the last part receives no gradients. A single stage
    sends nothing.
    """
    following, previous = (stage + 1) % stages, (stage - 1) % stages
    last_part = stages * chunks - 1
    for compute in computes:
        micro_batch, chunk = compute.micro_batch, compute.chunk
        part = chunk * stages + stage
        if stages == 1 or compute.kind == "backward_weight":
            yield compute
        elif compute.kind == "forward":
            if part > 0:
                yield Operation("receive_activation", micro_batch, chunk, previous)
            yield compute
            if part < last_part:
                yield Operation("send_activation", micro_batch, chunk, following)
        else:
            if part < last_part:
                yield Operation("receive_gradient", micro_batch, chunk, following)
            yield compute
            if part > 0:
                yield Operation("send_gradient", micro_batch, chunk, previous)
