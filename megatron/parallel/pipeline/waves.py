"""Which operation of a schedule brings the gradient of which parameter.

One operation brings those of one chunk; where a zero-bubble schedule takes backward in two, the
first half brings the gradients of what no layer puts off: biases, normalizations, embeddings.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from megatron.parallel.pipeline.schedule import Operation, OperationKind, ScheduleKind
from megatron.parallel.tied import borrowed_parameters
from megatron.parallel.weight_gradients import deferrable_weights

Wave = tuple[OperationKind, int]  # and the chunk


def wave_of(operation: Operation) -> Wave:
    """What a backward operation brings."""
    return operation.kind, operation.chunk


def parameter_waves(parts: Sequence[nn.Module], kind: ScheduleKind) -> dict[int, tuple[Wave, ...]]:
    """By `id` of every parameter of a stage's parts the operations that add to its gradient: one,
    and of a table that parts share one for each of these."""
    waves: dict[int, tuple[Wave, ...]] = {}
    is_halved = kind == "zero-bubble"
    first: OperationKind = "backward_input" if is_halved else "backward"
    for chunk, part in enumerate(parts):
        for parameter in {*part.parameters(), *borrowed_parameters(part)}:
            waves[id(parameter)] = (*waves.get(id(parameter), ()), (first, chunk))
        if is_halved:
            put_off = deferrable_weights(part)
            waves |= {id(parameter): (("backward_weight", chunk),) for parameter in put_off}
    return waves
