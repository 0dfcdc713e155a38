"""A flat buffer of weights in 8 bits, for fp8 products: what is gathered in the place of 16 bits.

After a sharded update a process knows its shard of every weight. A scale is of a whole weight: with
current scaling the processes first take the maximum of what they find in their parts, all weights
at once; with delayed scaling they know it, and what a part holds goes into the history, which takes
the maximum later. Each casts its shard, and the bytes of the casts travel, half as many. They are
those of a cast of the gathered weight, bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.kernels.fp8 import Fp8, inverses_of
from megatron.parallel.buckets import ALIGNMENT_BYTES
from megatron.parallel.collectives import all_reduce
from megatron.parallel.flat import Flat
from megatron.parallel.fp8_products import ArrivingWeight, Fp8Products
from megatron.parallel.layout import Axis


@dataclass(frozen=True)
class _Piece:
    """What this process updates of a weight.

    Attributes:
        place: of the weight among those of the buffer.
        values: in 16 bits, [n].
        cast: in 8 bits, [n].
    """

    place: int
    values: Tensor
    cast: Tensor


class Fp8Weights:
    """The weights of a flat buffer of a sharded update in 8 bits, as their products take them.

    Args:
        flat: the weights, all [..., out, in], and the shards of this process.
        storage: where they are in 16 bits.
        products: what each is multiplied by, nothing else reads them; all of one form.
        axis: the processes that share the update.

    Attributes:
        bytes: of the whole buffer, uint8 (gloo knows no fp8): what is to be gathered.
    """

    def __init__(
        self,
        flat: Flat,
        storage: Tensor,
        products: Mapping[nn.Parameter, Fp8Products],
        axis: Axis,
    ) -> None:
        self._axis = axis
        self._products = [products[parameter] for parameter, _ in flat.members]
        fp8 = self._products[0].weight_format
        assert fp8 is not None, "shards cut rows, which would each need a scale"
        self._fp8 = fp8
        self.bytes = torch.zeros(storage.numel(), dtype=torch.uint8, device=storage.device)
        # Each where a tensor of its own would start: libraries may expect that.
        apart = ALIGNMENT_BYTES // torch.float32.itemsize
        self._inverses = torch.zeros(len(self._products), apart, device=storage.device)[:, 0]
        self._is_there = False
        self._pieces: list[_Piece] = []
        values = self.bytes.view(fp8)
        for place, (parameter, slot) in enumerate(flat.members):
            whole = values[slot.start : slot.end].view(-1, parameter.shape[-1])
            cast = Fp8(whole, self._inverses[place])
            self._products[place].arriving = ArrivingWeight(cast, lambda: self._is_there)
            for span, _ in flat.regions:
                own = slot.intersect(span)
                if own is not None:
                    part = slice(own.start, own.end)
                    self._pieces.append(_Piece(place, storage[part], values[part]))

    @torch.no_grad()
    def cast(self) -> None:
        """This process's shard, after an update. Collective with current scaling."""
        amaxes = self._amaxes()
        self._inverses.copy_(inverses_of(amaxes, self._fp8))
        each = amaxes.unbind()
        for piece in self._pieces:
            products = self._products[piece.place]
            products.cast_part(piece.values, each[piece.place], piece.cast)
        self._is_there = True

    def forget(self) -> None:
        """The weights have changed, in 16 bits and on all processes."""
        self._is_there = False

    def _amaxes(self) -> Tensor:
        """What each weight scales by: fp32, [weights]."""
        known = [products.amax_of_weight() for products in self._products]
        held = [amax for amax in known if amax is not None]
        if len(held) == len(known):
            return torch.stack(held)
        found = list(torch.zeros(len(known), device=self.bytes.device).unbind())
        for piece in self._pieces:
            found[piece.place] = self._products[piece.place].measure_part(piece.values)
        # No backend says what a maximum makes of nan; inf makes the weight nan just as well.
        amaxes = torch.stack(found).nan_to_num(nan=torch.inf, posinf=torch.inf)
        return all_reduce(amaxes, self._axis, dist.ReduceOp.MAX)
