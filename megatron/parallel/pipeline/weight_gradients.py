"""Weight gradients that are deferred until a pipeline stage would otherwise be idle.

A zero-bubble schedule divides the backward pass of a micro-batch into two parts: gradients of
inputs, for which the previous stage waits, and gradients of weights, for which no stage waits. A
layer gets the queue from its build context and passes it to its autograd function, whose backward
does this:

    if queue is not None and queue.is_collecting:
        queue.push(lambda: accumulate(weight, grad_output, x))
    else:
        accumulate(weight, grad_output, x)

The queue is an ordinary object and not thread-local, because on GPUs autograd runs the backward
pass in its own thread.

`parameter_waves` maps each parameter to the waves that compute its gradient. A wave is the backward
pass of a chunk or, in a zero-bubble schedule, one of its two parts. The first part also computes
the gradients that no layer defers: biases, normalizations, embeddings.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from megatron.parallel.pipeline.schedule import Operation, OperationKind, ScheduleKind
from megatron.parallel.tied import borrowed_parameters

Work = Callable[[], None]


class WeightGradientQueue:
    """A queue of deferred weight-gradient products, grouped by backward pass.

    Each backward pass is identified by a key.
    """

    def __init__(self) -> None:
        """Create an empty queue."""
        self._waiting: dict[Hashable, list[Work]] = {}
        self._open: list[Work] | None = None

    @property
    def is_collecting(self) -> bool:
        """Whether layers must push their weight gradients instead of computing them."""
        return self._open is not None

    def __len__(self) -> int:
        """Return the number of backward passes whose weight gradients are waiting."""
        return len(self._waiting)

    @contextmanager
    def collecting(self, key: Hashable) -> Iterator[None]:
        """Collect the work that is pushed inside the block, for `run(key)`."""
        assert self._open is None, "one backward pass at a time"
        assert key not in self._waiting, f"the weight gradients of {key} are already queued"
        self._open = self._waiting[key] = []
        try:
            yield
        finally:
            self._open = None

    def push(self, work: Work) -> None:
        """Defer work that adds to a weight's gradient. Call this method only while collecting.

        Args:
            work: A function that will run without autograd, in the order of the pushes. It may
                refer to activations, which are freed once it has run.
        """
        assert self._open is not None, "not collecting: compute the gradient immediately"
        self._open.append(work)

    def run(self, key: Hashable) -> None:
        """Run and remove the work collected for `key`."""
        works = self._waiting.pop(key)
        with torch.no_grad():
            works.reverse()
            while works:
                works.pop()()  # removed before the next one runs, to free its memory


Wave = tuple[OperationKind, int]  # the kind and chunk of a backward operation


def wave_of(operation: Operation) -> Wave:
    """Return the wave of a backward operation: its kind and chunk."""
    return operation.kind, operation.chunk


def parameter_waves(
    parts: Sequence[nn.Module], kind: ScheduleKind, deferrable: Iterable[nn.Parameter]
) -> dict[int, tuple[Wave, ...]]:
    """Return the waves that add to each parameter's gradient, by the parameter's `id`.

    A parameter has one wave, or one per model part if several parts share the parameter.

    Args:
        parts: The model parts of a stage.
        kind: The kind of schedule.
        deferrable: The weights whose gradients layers can defer.
    """
    waves: dict[int, tuple[Wave, ...]] = {}
    deferrable_ids = {id(parameter) for parameter in deferrable}
    is_split = kind == "zero-bubble"
    input_kind: OperationKind = "backward_input" if is_split else "backward"
    for chunk, part in enumerate(parts):
        for parameter in {*part.parameters(), *borrowed_parameters(part)}:
            waves[id(parameter)] = (*waves.get(id(parameter), ()), (input_kind, chunk))
        if is_split:
            deferred = {id(parameter) for parameter in part.parameters()} & deferrable_ids
            waves |= dict.fromkeys(deferred, (("backward_weight", chunk),))
    return waves
