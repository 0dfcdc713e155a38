"""Which operation of a schedule brings the gradient of which parameter.

One operation brings those of one chunk; where a zero-bubble schedule takes backward in two, the
first half brings the gradients of what no layer puts off: biases, normalizations, embeddings.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

from megatron.parallel.pipeline.schedule import Operation, OperationKind, ScheduleKind
from megatron.parallel.tied import borrowed_parameters

Wave = tuple[OperationKind, int]  # and the chunk


def wave_of(operation: Operation) -> Wave:
    """What a backward operation brings."""
    return operation.kind, operation.chunk


def parameter_waves(
    parts: Sequence[nn.Module], kind: ScheduleKind, deferrable: Iterable[nn.Parameter]
) -> dict[int, tuple[Wave, ...]]:
    """Return the operations that add to each parameter's gradient, by the parameter's `id`.

    It is one operation, or for a table that parts share one for each of these.

    Args:
        parts: of a stage.
        kind: of the schedule.
        deferrable: weights whose gradients layers can put off.
    """
    waves: dict[int, tuple[Wave, ...]] = {}
    waits = {id(parameter) for parameter in deferrable}
    is_halved = kind == "zero-bubble"
    first: OperationKind = "backward_input" if is_halved else "backward"
    for chunk, part in enumerate(parts):
        for parameter in {*part.parameters(), *borrowed_parameters(part)}:
            waves[id(parameter)] = (*waves.get(id(parameter), ()), (first, chunk))
        if is_halved:
            put_off = {id(parameter) for parameter in part.parameters()} & waits
            waves |= dict.fromkeys(put_off, (("backward_weight", chunk),))
    return waves
