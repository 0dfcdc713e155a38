"""Weight gradients put off until a pipeline stage would otherwise stand idle.

A zero-bubble schedule takes the backward of a micro-batch in two: what the stage before waits for
(gradients of inputs), and what nobody waits for (gradients of weights). A layer gets the queue from
the context it is built in, and hands it to its autograd function, whose backward does

    if queue is not None and queue.is_collecting:
        queue.push(lambda: accumulate(weight, grad_output, x))
    else:
        accumulate(weight, grad_output, x)

The queue is an ordinary object, not thread-local state: on GPUs autograd runs backward in a thread
of its own while the thread that asked for it waits.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager

import torch

Work = Callable[[], None]


class WeightGradientQueue:
    """Weight-gradient products that wait, by the backward pass (`key`) they belong to."""

    def __init__(self) -> None:
        self._waiting: dict[Hashable, list[Work]] = {}
        self._open: list[Work] | None = None

    @property
    def is_collecting(self) -> bool:
        """Whether layers are to push their weight gradients rather than compute them."""
        return self._open is not None

    def __len__(self) -> int:
        """Backward passes whose weight gradients wait."""
        return len(self._waiting)

    @contextmanager
    def collecting(self, key: Hashable) -> Iterator[None]:
        """Keep what is pushed inside the block for `run(key)`."""
        assert self._open is None, "one backward pass at a time"
        assert key not in self._waiting, f"the weight gradients of {key} still wait"
        self._open = self._waiting[key] = []
        try:
            yield
        finally:
            self._open = None

    def push(self, work: Work) -> None:
        """Put off `work`, which adds to the gradient of one weight. Only while collecting.

        Runs without autograd, in the order of pushing. It may hold activations: they are freed
        when it has run.
        """
        assert self._open is not None, "nobody collects: compute the gradient right away"
        self._open.append(work)

    def run(self, key: Hashable) -> None:
        """Compute what was collected for `key`, and forget it."""
        works = self._waiting.pop(key)
        with torch.no_grad():
            works.reverse()
            while works:
                works.pop()()  # gone before the next runs: what it held is free
