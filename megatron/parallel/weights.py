"""Weights in flat buffers: each process updates its shard and gathers the others'.

The second half of a sharded update. The buffers are laid out as the gradients', so that a
process's shard of a bucket holds the weights whose reduced gradients it has.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megatron.parallel.collectives import start_all_gather
from megatron.parallel.flat import Flat
from megatron.parallel.layout import Axis


class WeightBuffer:
    """Moves parameters into flat buffers; their values, names and identity stay.

    Args:
        flats: what a sharded gradient buffer consists of.
        axis: the processes that share the update.
        overlap_in: models whose forward may begin while weights are still under way: their
            outermost modules wait for what they use. Whoever else reads a weight must `wait`.
            None: `gather` waits.
    """

    def __init__(
        self, flats: Iterable[Flat], axis: Axis, *, overlap_in: Sequence[nn.Module] | None = None
    ) -> None:
        self._axis = axis
        self._is_overlapped = overlap_in is not None
        self._buckets: list[Tensor] = []
        self._works: dict[int, Any] = {}
        bucket_of: dict[int, int] = {}
        for flat in flats:
            storage = _move(flat)
            for bucket in flat.buckets:
                inside = [p for p, slot in flat.members if slot.intersect(bucket.span) is not None]
                bucket_of.update({id(p): len(self._buckets) for p in inside})
                self._buckets.append(storage[bucket.span.start : bucket.span.end])
        # Forward needs the end of the buffer first (see `buckets`).
        self._order = list(reversed(range(len(self._buckets))))
        for model in overlap_in or ():
            self._wait_in(model, bucket_of)

    def _wait_in(self, model: nn.Module, bucket_of: dict[int, int]) -> None:
        needed: dict[nn.Module, set[int]] = {}
        for user, parameter in first_users(model):
            if id(parameter) in bucket_of:
                needed.setdefault(user, set()).add(bucket_of[id(parameter)])
        for user, buckets in needed.items():
            user.register_forward_pre_hook(partial(self._before_forward, frozenset(buckets)))
        at_once = needed.get(model, set())  # what the model itself waits for, it waits for first
        self._order.sort(key=lambda index: index not in at_once)

    def gather(self) -> None:
        """Fetch the shards that others have updated. Collective over the axis."""
        self.wait()
        for index in self._order:
            whole = self._buckets[index]
            shard = whole.chunk(self._axis.size)[self._axis.rank]
            self._works[index] = start_all_gather(shard, self._axis, into=whole)
        if not self._is_overlapped:
            self.wait()

    def wait(self) -> None:
        """Return once all weights may be read."""
        for index in list(self._works):
            self._works.pop(index).wait()

    def _before_forward(self, buckets: frozenset[int], module: nn.Module, inputs: Any) -> None:
        if not self._works:
            return
        for index in buckets & self._works.keys():
            self._works.pop(index).wait()


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
