"""Weights in flat buffers: each process updates its shard and gathers the others'.

The second half of a sharded update. The buffers are laid out as the gradients', so that a
process's shard of a bucket holds the weights whose reduced gradients it has.

Weights that are multiplied in 8 bits, and read by nothing else, may be gathered in 8 bits. Then a
process has in 16 bits what it updates, until somebody asks for the rest: `wait`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megatron.parallel.collectives import Pending, start_all_gather
from megatron.parallel.flat import Flat
from megatron.parallel.fp8_products import Fp8Products
from megatron.parallel.fp8_weights import Fp8Weights
from megatron.parallel.layout import Axis


class WeightBuffer:
    """Moves parameters into flat buffers; their values, names and identity stay.

    Args:
        flats: what a sharded gradient buffer consists of.
        axis: the processes that share the update.
        overlap_in: models whose forward may begin while weights are still under way: their
            outermost modules wait for what they use. Whoever else reads a weight must `wait`.
            None: `gather` waits.
        in_8_bits: weights that are gathered in 8 bits, with what multiplies by them. They fill
            flats of their own.
    """

    def __init__(
        self,
        flats: Iterable[Flat],
        axis: Axis,
        *,
        overlap_in: Sequence[nn.Module] | None = None,
        in_8_bits: Mapping[nn.Parameter, Fp8Products] | None = None,
    ) -> None:
        self._axis = axis
        self._is_overlapped = overlap_in is not None
        self._buckets: list[Tensor] = []
        self._works: dict[int, Pending] = {}
        self._casts: list[Fp8Weights] = []
        self._beneath: list[Tensor] = []  # of what is gathered in 8 bits the 16-bit buckets
        self._is_behind = False  # these hold others' weights of an update before
        bucket_of: dict[nn.Parameter, int] = {}
        for flat in flats:
            storage = _move(flat)
            spans = [slice(bucket.span.start, bucket.span.end) for bucket in flat.buckets]
            travels = storage
            if in_8_bits and flat.members[0][0] in in_8_bits:
                cast = Fp8Weights(flat, storage, in_8_bits, axis)
                self._casts.append(cast)
                self._beneath += [storage[span] for span in spans]
                travels = cast.bytes
            for bucket, span in zip(flat.buckets, spans, strict=True):
                inside = [p for p, slot in flat.members if slot.intersect(bucket.span) is not None]
                bucket_of.update({p: len(self._buckets) for p in inside})
                self._buckets.append(travels[span])
        self._order = _in_order_of_use(overlap_in or (), bucket_of, len(self._buckets))
        for model in overlap_in or ():
            self._wait_in(model, bucket_of)

    def _wait_in(self, model: nn.Module, bucket_of: Mapping[nn.Parameter, int]) -> None:
        needed: dict[nn.Module, set[int]] = {}
        for user, parameter in first_users(model):
            if parameter in bucket_of:
                needed.setdefault(user, set()).add(bucket_of[parameter])
        for user, buckets in needed.items():
            user.register_forward_pre_hook(partial(self._before_forward, frozenset(buckets)))
        at_once = needed.get(model, set())  # what the model itself waits for, it waits for first
        self._order.sort(key=lambda index: index not in at_once)

    def gather(self) -> None:
        """Fetch the shards that others have updated. Collective over the axis."""
        self.settle()
        for cast in self._casts:
            cast.cast()
        for index in self._order:
            self._works[index] = self._start(self._buckets[index])
        self._is_behind = bool(self._beneath)
        if not self._is_overlapped:
            self.settle()

    def _start(self, whole: Tensor) -> Pending:
        shard = whole.chunk(self._axis.size)[self._axis.rank]
        return start_all_gather(shard, self._axis, into=whole)

    def settle(self) -> None:
        """Return once what `gather` fetches has arrived."""
        for index in list(self._works):
            self._works.pop(index).wait()

    def wait(self) -> None:
        """Return once all weights may be read, or changed, in 16 bits. Collective over the axis."""
        self.settle()
        if self._is_behind:
            for work in [self._start(whole) for whole in self._beneath]:
                work.wait()
            self._is_behind = False

    def forget(self) -> None:
        """All weights have been given other values, on all processes: what was gathered is void."""
        assert not self._works and not self._is_behind, "wait before you change a weight"
        for cast in self._casts:
            cast.forget()

    def _before_forward(self, buckets: frozenset[int], module: nn.Module, inputs: Any) -> None:
        if not self._works:
            return
        for index in buckets & self._works.keys():
            self._works.pop(index).wait()


def _in_order_of_use(
    models: Sequence[nn.Module], bucket_of: Mapping[nn.Parameter, int], count: int
) -> list[int]:
    """The buckets, as forward first needs something of them."""
    parameters = [parameter for model in models for parameter in model.parameters()]
    met = [bucket_of[parameter] for parameter in parameters if parameter in bucket_of]
    return list(dict.fromkeys([*met, *range(count)]))


@torch.no_grad()
def _move(flat: Flat) -> Tensor:
    """Put the parameters into one buffer; the buffer."""
    first = flat.members[0][0]
    storage = torch.zeros(flat.buckets[-1].span.end, dtype=first.dtype, device=first.device)
    for parameter, slot in flat.members:
        view = storage[slot.start : slot.end].view_as(parameter)
        view.copy_(parameter)
        parameter.data = view
    return storage


def first_users(model: nn.Module) -> Iterator[tuple[nn.Module, nn.Parameter]]:
    """Every parameter with the module whose forward starts before any use of it.

    That is the outermost module below the model that is called (a list or dict of modules is
    not), whoever inside of it reads the parameter; or the model, for what it uses itself.
    """
    yield from _users_below(model, model)


def _users_below(module: nn.Module, model: nn.Module) -> Iterator[tuple[nn.Module, nn.Parameter]]:
    for parameter in module.parameters(recurse=False):
        yield model, parameter
    for child in module.children():
        if type(child).forward is nn.Module.forward:
            yield from _users_below(child, model)
        else:
            for parameter in child.parameters():
                yield child, parameter
