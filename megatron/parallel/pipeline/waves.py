"""Which operation of a schedule brings the gradient of which parameter.

One operation brings those of one chunk; where a zero-bubble schedule takes backward in two, the
first half brings the gradients of what no layer puts off: biases, normalizations, embeddings.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from megatron.parallel.pipeline.schedule import Operation, OperationKind, ScheduleKind
from megatron.parallel.weight_gradients import deferrable_weights

Wave = tuple[OperationKind, int]  # and the chunk


def wave_of(operation: Operation) -> Wave:
    """What a backward operation brings."""
    return operation.kind, operation.chunk


def parameter_waves(parts: Sequence[nn.Module], kind: ScheduleKind) -> dict[int, Wave]:
    """By `id` of every parameter of a stage's parts the operations that bring its gradient."""
    waves: dict[int, Wave] = {}
    is_halved = kind == "zero-bubble"
    for chunk, part in enumerate(parts):
        first: OperationKind = "backward_input" if is_halved else "backward"
        waves |= {id(parameter): (first, chunk) for parameter in part.parameters()}
        if is_halved:
            put_off = deferrable_weights(part)
            waves |= {id(parameter): ("backward_weight", chunk) for parameter in put_off}
    return waves
