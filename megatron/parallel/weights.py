"""Weights in flat buffers. Each process updates its own shard and gathers the other shards.

This is the second half of a sharded update. Weights and gradients have the same layout, so a
process's shard of a bucket contains the weights for which the process has reduced gradients.

Weights that only FP8 products read may be gathered in 8 bits. A scale applies to a whole weight,
but a process knows only its own shard. With current scaling, the processes first take the maximum
of their shards' amaxes, for all weights together. With delayed scaling they already know the scale,
and a shard's amax goes into the history, which takes the maximum later. Each process casts its
shard and sends the result, which has half as many bytes. The result is bit for bit equal to a cast
of the gathered weight. A process then has only its own shard in 16 bits, until `wait` gathers the
other shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.kernels.fp8 import Fp8, inverses_of
from megatron.parallel.buckets import ALIGNMENT_BYTES, FlatPlan, Span, runs
from megatron.parallel.collectives import Pending, all_reduce, start_all_gather
from megatron.parallel.fp8 import ArrivingWeight, Fp8Products
from megatron.parallel.layout import Axis


@dataclass(frozen=True)
class FlatBuffer:
    """A flat buffer of parameters, and the regions of it that this process owns.

    Attributes:
        plan: The plan of the buffer.
        axis: The processes that hold the same parameters.
        members: The parameters, each with its slot, in the order of the slots.
        regions: The spans that this process owns after the reduction, each with its gradients.
    """

    plan: FlatPlan
    axis: Axis
    members: list[tuple[nn.Parameter, Span]]
    regions: list[tuple[Span, Tensor]]

    def runs(self, select: Callable[[nn.Parameter], bool]) -> list[Tensor]:
        """Return the fewest 1-D views that contain the owned gradients of selected parameters.

        Padding between parameters is included and is zero.
        """
        gradients = []
        for span in runs(self.members, select):
            for region, memory in self.regions:
                common = span.intersect(region)
                if common is not None:
                    gradients.append(common.relative_to(region).of(memory))
        return gradients


class WeightBuffer:
    """Parameters in flat buffers, whose shards are updated by different processes and gathered.

    Construction moves the parameters into the buffers; their values, names and identity stay the
    same.

    Args:
        flats: The flat buffers of a sharded gradient buffer.
        overlap_in: The models whose forward pass may start while weights are still in transit.
            Their outermost modules wait for the weights that they use; any other reader must call
            `wait`. If `None`, `gather` waits.
        in_8_bits: The products of each weight that is gathered in 8 bits. These weights have
            separate buffers.
    """

    def __init__(
        self,
        flats: Sequence[FlatBuffer],
        *,
        overlap_in: Sequence[nn.Module] | None = None,
        in_8_bits: Mapping[nn.Parameter, Fp8Products] | None = None,
    ) -> None:
        """Move the parameters into flat buffers."""
        self._is_overlapped = overlap_in is not None
        self._buckets: list[tuple[Tensor, Axis]] = []
        self._pending: dict[int, Pending] = {}
        self._casts: list[Fp8Weights] = []
        # The 16-bit buckets of the weights that are gathered in 8 bits.
        self._buckets_in_16_bits: list[tuple[Tensor, Axis]] = []
        self._is_outdated = False  # whether other processes' shards of these buckets are outdated
        bucket_of: dict[nn.Parameter, int] = {}
        for flat in flats:
            storage = _move(flat)
            sent = storage
            if in_8_bits and flat.members[0][0] in in_8_bits:
                cast = Fp8Weights(flat, storage, in_8_bits)
                self._casts.append(cast)
                self._buckets_in_16_bits += [
                    (b.span.of(storage), flat.axis) for b in flat.plan.buckets
                ]
                sent = cast.bytes
            members = iter(flat.members)
            for bucket in flat.plan.buckets:
                for parameter, _ in islice(members, len(bucket.members)):
                    bucket_of[parameter] = len(self._buckets)
                self._buckets.append((bucket.span.of(sent), flat.axis))
        used_parameters = (
            parameter for model in overlap_in or () for parameter in model.parameters()
        )
        used_buckets = [
            bucket_of[parameter] for parameter in used_parameters if parameter in bucket_of
        ]
        ordered = dict.fromkeys([*used_buckets, *range(len(self._buckets))])
        self._order = list(ordered)  # by first use
        for model in overlap_in or ():
            self._wait_in(model, bucket_of)

    def _wait_in(self, model: nn.Module, bucket_of: Mapping[nn.Parameter, int]) -> None:
        def wait(buckets: frozenset[int], module: nn.Module, inputs: Any) -> None:
            if not self._pending:
                return
            for index in buckets & self._pending.keys():
                self._pending.pop(index).wait()

        needed: dict[nn.Module, set[int]] = {}
        for user, parameter in first_users(model):
            if parameter in bucket_of:
                needed.setdefault(user, set()).add(bucket_of[parameter])
        for user, buckets in needed.items():
            user.register_forward_pre_hook(partial(wait, frozenset(buckets)))
        own_buckets = needed.get(model, set())  # the model waits for these first
        self._order.sort(key=lambda index: index not in own_buckets)

    def gather(self) -> None:
        """Gather the shards that other processes have updated. Collective over the replicas.

        With overlap, this only starts the communication.
        """
        self.settle()
        for cast in self._casts:
            cast.cast()
        for index in self._order:
            self._pending[index] = _start(*self._buckets[index])
        self._is_outdated = bool(self._buckets_in_16_bits)
        if not self._is_overlapped:
            self.settle()

    def settle(self) -> None:
        """Wait for the weights that `gather` has requested."""
        for index in list(self._pending):
            self._pending.pop(index).wait()

    def wait(self) -> None:
        """Wait until all weights may be read or changed in 16 bits.

        Collective over the replicas.
        """
        self.settle()
        if self._is_outdated:
            for work in [_start(*each) for each in self._buckets_in_16_bits]:
                work.wait()
            self._is_outdated = False

    def forget(self) -> None:
        """Discard the gathered 8-bit weights, because all processes have changed the weights."""
        assert not self._pending and not self._is_outdated, "call wait before changing a weight"
        for cast in self._casts:
            cast.forget()


def _start(whole: Tensor, axis: Axis) -> Pending:
    return start_all_gather(whole.chunk(axis.size)[axis.rank], axis, into=whole)


@torch.no_grad()
def _move(flat: FlatBuffer) -> Tensor:
    """Move the parameters into a single buffer, and return the buffer."""
    first = flat.members[0][0]
    storage = torch.zeros(flat.plan.elements, dtype=first.dtype, device=first.device)
    for parameter, slot in flat.members:
        view = slot.of(storage).view_as(parameter)
        view.copy_(parameter)
        parameter.data = view
    return storage


def first_users(model: nn.Module) -> Iterator[tuple[nn.Module, nn.Parameter]]:
    """Yield every parameter with the outermost module whose forward pass uses the parameter.

    For the model's own parameters, this module is the model. For all others, it is the outermost
    module below the model that contains the parameter and has a `forward` method (lists and dicts
    of modules have none).
    """

    def users(module: nn.Module) -> Iterator[tuple[nn.Module, nn.Parameter]]:
        yield from ((model, parameter) for parameter in module.parameters(recurse=False))
        for child in module.children():
            if type(child).forward is nn.Module.forward:
                yield from users(child)
            else:
                yield from ((child, parameter) for parameter in child.parameters())

    return users(model)


class Fp8Weights:
    """The weights of a flat buffer, cast to the 8-bit format of their products.

    Args:
        flat: The weights, all [..., out, in], and the regions that this process owns.
        storage: The memory of the weights in 16 bits.
        products: The products of each weight, all in the same format. Nothing else may read the
            weights.

    Attributes:
        bytes: The whole buffer as uint8, for gathering (gloo does not support FP8).
    """

    def __init__(
        self, flat: FlatBuffer, storage: Tensor, products: Mapping[nn.Parameter, Fp8Products]
    ) -> None:
        """Allocate the 8-bit buffer and assign its elements to the weights."""
        self._axis = flat.axis
        self._products = [products[parameter] for parameter, _ in flat.members]
        fp8 = self._products[0].weight_format
        assert fp8 is not None, "a shard may end within a row, so rows cannot have their own scales"
        self._fp8 = fp8
        self.bytes = torch.zeros(storage.numel(), dtype=torch.uint8, device=storage.device)
        # Each inverse is aligned like a separate tensor, as libraries may expect.
        stride = ALIGNMENT_BYTES // torch.float32.itemsize
        self._inverses = torch.zeros(len(self._products), stride, device=storage.device)[:, 0]
        self._has_arrived = False
        # The elements that this process updates: weight index, 16-bit values, 8-bit values.
        self._pieces: list[tuple[int, Tensor, Tensor]] = []
        values = self.bytes.view(fp8)
        for index, (parameter, slot) in enumerate(flat.members):
            whole = slot.of(values).view(-1, parameter.shape[-1])
            cast = Fp8(whole, self._inverses[index])
            self._products[index].receive_weight(ArrivingWeight(cast, lambda: self._has_arrived))
            for span, _ in flat.regions:
                own = slot.intersect(span)
                if own is not None:
                    self._pieces.append((index, own.of(storage), own.of(values)))

    @torch.no_grad()
    def cast(self) -> None:
        """Cast this process's shard after an update. Collective with current scaling."""
        amaxes = self._amaxes()
        self._inverses.copy_(inverses_of(amaxes, self._fp8))
        amax_of = amaxes.unbind()
        for index, values, cast in self._pieces:
            self._products[index].cast_part(values, amax_of[index], cast)
        self._has_arrived = True

    def forget(self) -> None:
        """Discard the 8-bit weights, because all processes have changed the 16-bit weights."""
        self._has_arrived = False

    def _amaxes(self) -> Tensor:
        """Return the amax by which each weight is scaled, fp32 [weights]."""
        delayed = [products.amax_of_weight() for products in self._products]
        recorded = [amax for amax in delayed if amax is not None]
        if len(recorded) == len(delayed):
            return torch.stack(recorded)
        current = list(torch.zeros(len(delayed), device=self.bytes.device).unbind())
        for index, values, _ in self._pieces:
            current[index] = self._products[index].casts.amax(values)
        # No backend specifies the maximum of values that include nan. inf also makes the weight
        # nan.
        amaxes = torch.stack(current).nan_to_num(nan=torch.inf, posinf=torch.inf)
        return all_reduce(amaxes, self._axis, dist.ReduceOp.MAX)
