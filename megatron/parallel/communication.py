"""What a product of a split layer has to communicate around itself."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from megatron.parallel.collectives import (
    Pending,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)
from megatron.parallel.layout import Axis


@dataclass(frozen=True)
class Communication:
    """What a product has to do around itself.

    Attributes:
        axis: ranks that hold different rows of the weight; of one process: nothing to do.
        along_sequence: the input is this rank's part along dimension 0, else it is whole.
        overlap: communicate during the products, else before and after them: the same results.
    """

    axis: Axis = Axis()
    along_sequence: bool = False
    overlap: bool = True

    @property
    def gathers(self) -> bool:
        """Whether the input is a part, which others have the rest of."""
        return self.along_sequence and self.axis.size > 1

    def start_gather(self, x: Tensor) -> Pending:
        """The whole input from its part."""
        return self._maybe_wait(start_all_gather(x, self.axis) if self.gathers else Pending(x))

    def start_max(self, x: Tensor) -> Pending:
        """Of the whole input what `x` is of its part, a largest value; changes `x`."""
        if not self.gathers:
            return Pending(x)
        return self._maybe_wait(start_all_reduce(x, self.axis, dist.ReduceOp.MAX))

    def start_sum(self, grad: Tensor) -> Pending:
        """The input's gradient, from the whole input's on every rank; may change `grad`."""
        start = start_reduce_scatter if self.gathers else start_all_reduce
        return self._maybe_wait(start(grad, self.axis))

    def _maybe_wait(self, pending: Pending) -> Pending:
        return pending if self.overlap else Pending(pending.wait())


ALONE = Communication()
