"""T5's relative position bias, a function of query-key distance added to attention scores.

Each short distance has its own bucket. Longer distances share buckets whose width grows with the
distance (Raffel et al., 2019, 2.1). Every head has a bias for every bucket. All layers of an
encoder share one table, and all layers of a decoder share another.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.models.costs import MicroBatch
from megatron.models.plan import PositionBiasPlan
from megatron.parallel.build import BuildContext
from megatron.parallel.parameter import spec_of
from megatron.parallel.tied import SharedTable

# The names of the tables in every T5 model.
POSITION_TABLES = ("encoder.position_bias.weight", "decoder.position_bias.weight")


def relative_buckets(
    distances: Tensor, *, bidirectional: bool, buckets: int, max_distance: int
) -> Tensor:
    """Return the bucket of each distance.

    Half of a direction's buckets cover one distance each. The other buckets share the distances up
    to `max_distance`, and the last one also covers all longer distances.

    Args:
        distances: Position of the key minus position of the query, in any shape.
        bidirectional: Whether later keys have their own buckets; otherwise they all fall into the
            first one.
        buckets: Number of buckets, counting both directions.
        max_distance: Distance in tokens at and beyond which all distances share the last bucket.

    Returns:
        The buckets, int64 from 0 to `buckets` - 1, in the shape of `distances`.
    """
    first = torch.zeros_like(distances)
    if bidirectional:
        buckets //= 2
        first = (distances > 0).long() * buckets
        distances = distances.abs()
    else:
        distances = (-distances).clamp(min=0)
    max_exact = buckets // 2
    # Computed in fp32 and in this order, as in T5, because rounding matters at the boundary between
    # two buckets.
    log_fraction = torch.log(distances.float() / max_exact) / math.log(max_distance / max_exact)
    large = max_exact + (log_fraction * (buckets - max_exact)).clamp(min=0).long()
    return first + torch.where(distances < max_exact, distances, large.clamp(max=buckets - 1))


class PositionBias(SharedTable):
    """A stack's table of position biases, [buckets, n]. Each tensor rank holds its heads' columns.

    Every part of the model with layers of the stack holds a copy under the same name. The part with
    the stack's first layer holds the original, and `parallel.tied` keeps the copies equal to it.
    Parts in the same process share one table.

    Args:
        plan: The plan of the position biases.
        context: Layout, device, kernels and number formats.
        bidirectional: Whether the table belongs to an encoder. A decoder's bias includes the causal
            mask.
        is_copy: Whether another part of the model holds the original.
    """

    def __init__(
        self, plan: PositionBiasPlan, context: BuildContext, *, bidirectional: bool, is_copy: bool
    ) -> None:
        """Allocate the table and compute the bucket of every distance."""
        super().__init__()
        self.bidirectional = bidirectional
        self.weight = context.new_parameter(
            (plan.buckets, plan.heads), init=plan.init.weight(plan.buckets, plan.heads), split_dim=1
        )
        spec = replace(spec_of(self.weight), is_copy=is_copy)
        self.weight.spec = spec  # type: ignore[attr-defined]
        # Computed on the CPU, so that the values are the same on every device.
        max_offset = plan.positions - 1
        buckets = relative_buckets(
            torch.arange(-max_offset, max_offset + 1),
            bidirectional=bidirectional,
            buckets=plan.buckets,
            max_distance=plan.max_distance,
        )
        self.register_buffer("buckets", buckets.to(context.device), persistent=False)
        self.buckets: Tensor

    @staticmethod
    def parameter_count(plan: PositionBiasPlan, tensor: int) -> int:
        """Count the parameters of a stack's table that one of `tensor` ranks holds."""
        return plan.buckets * plan.heads // tensor

    @staticmethod
    def activation_bytes(plan: PositionBiasPlan, batch: MicroBatch, *, bidirectional: bool) -> int:
        """Count the bytes of the bias that is added to the scores.

        An encoder's bias includes the padding mask, so every sample has its own.
        """
        samples = batch.sequences if bidirectional else 1
        return batch.width * plan.heads // batch.tensor * samples * batch.length**2

    def forward(self, length: int, mask: Tensor | None) -> Tensor:
        """Return the bias to add to the self-attention scores.

        Args:
            length: Length of the sequence, s.
            mask: bool [b, 1, 1, s], True for keys that queries may attend to. With `None`, a query
                may attend to all keys in an encoder, and in a decoder to those up to its position.

        Returns:
            The bias [b or 1, n/t, s, s] in the table's dtype, with the lowest value of that dtype
            for keys that a query may not attend to.
        """
        if self.original is not None:
            shared: Tensor = self.original(length, mask)
            return shared
        middle = len(self.buckets) // 2
        distances = self.buckets[middle - length + 1 : middle + length]
        by_distance = F.embedding(distances, self.weight).t()  # [n/t, 2s - 1]
        # Window i has the distances from query s - 1 - i to every key. The backward pass sums in a
        # fixed order, and no tensor larger than [n/t, s, s] is ever in memory.
        bias = by_distance.unfold(1, length, 1).flip(1)[None]
        if mask is None and not self.bidirectional:
            mask = torch.ones(length, length, dtype=torch.bool, device=bias.device).tril()
        return bias if mask is None else bias.masked_fill(~mask, torch.finfo(bias.dtype).min)
