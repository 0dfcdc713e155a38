"""Parameters side by side in a flat buffer, and what this process keeps of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby

from torch import Tensor, nn

from megatron.parallel.buckets import Bucket, Span


@dataclass(frozen=True)
class Flat:
    """A flat buffer's contents, in order.

    Attributes:
        members: the parameters, each with its slot.
        buckets: what is communicated at once.
        regions: what this process keeps after the reduction: spans, and their gradients.
    """

    members: list[tuple[nn.Parameter, Span]]
    buckets: list[Bucket]
    regions: list[tuple[Span, Tensor]]

    def runs(self, select: Callable[[nn.Parameter], bool]) -> list[Tensor]:
        """The fewest 1-D views that hold the selected parameters (and zeros between them)."""
        runs = []
        for is_selected, members in groupby(self.members, key=lambda member: select(member[0])):
            slots = [slot for _, slot in members]
            if not is_selected:
                continue
            span = Span(slots[0].start, slots[-1].end)
            for region, held in self.regions:
                common = span.intersect(region)
                if common is not None:
                    runs.append(held[common.within(region)])
        return runs
