"""Gradients in contiguous buffers, averaged over the data-parallel processes in buckets.

One flat buffer a gradient dtype. Backward reaches the last layers first, so parameters lie in
reverse order: the buffer fills front to back, and a bucket is ready as soon as the parameters in
it are. Where the gradient dtype equals the parameter's, autograd adds straight into the buffer.
Elsewhere (16-bit parameters, fp32 gradients) a hook adds each finished gradient into it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.parallel.layout import Axis, Layout

ALIGNMENT_BYTES = 256  # of every parameter's start: whole vector loads and cache lines
BUCKET_BYTES = 64 * 2**20  # large enough that an all-reduce runs at full bandwidth


@dataclass(frozen=True)
class Slot:
    """A parameter's place in a flat buffer: elements [start, start + size)."""

    start: int
    size: int

    @property
    def end(self) -> int:
        return self.start + self.size


def plan_slots(sizes: Sequence[int], alignment: int) -> list[Slot]:
    """Places for tensors of `sizes` elements, in order, each start a multiple of `alignment`."""
    slots, start = [], 0
    for size in sizes:
        slots.append(Slot(start, size))
        start += -(-size // alignment) * alignment
    return slots


def plan_buckets(slots: Sequence[Slot], limit: int) -> list[slice]:
    """Cut a buffer, in order and between parameters, into pieces of at least `limit` elements.

    Together the slices cover every slot once; only the last may be smaller than the limit. A
    bucket can be reduced once every slot inside it is complete.
    """
    buckets, start = [], 0
    for i, slot in enumerate(slots):
        is_last = i == len(slots) - 1
        end = slot.end if is_last else slots[i + 1].start
        if is_last or end - start >= limit:
            buckets.append(slice(start, end))
            start = end
    return buckets


@dataclass(frozen=True)
class _Flat:
    """The gradients of one dtype: `storage` of zeros between slots, one slot a parameter."""

    storage: Tensor
    parameters: list[nn.Parameter]
    slots: list[Slot]
    buckets: list[slice]

    @classmethod
    def allocate(
        cls, parameters: list[nn.Parameter], dtype: torch.dtype, bucket_bytes: int
    ) -> _Flat:
        slots = plan_slots([p.numel() for p in parameters], ALIGNMENT_BYTES // dtype.itemsize)
        storage = torch.zeros(slots[-1].end, dtype=dtype, device=parameters[0].device)
        buckets = plan_buckets(slots, bucket_bytes // dtype.itemsize)
        return cls(storage, parameters, slots, buckets)

    def runs(self, select: Callable[[nn.Parameter], bool]) -> list[Tensor]:
        """The fewest 1-D views that hold the selected parameters (and zeros between them)."""
        chosen = groupby(
            zip(self.parameters, self.slots, strict=True), key=lambda pair: select(pair[0])
        )
        runs = [[slot for _, slot in pairs] for is_selected, pairs in chosen if is_selected]
        return [self.storage[run[0].start : run[-1].end] for run in runs]


class GradientBuffer:
    """Where the gradients of a model live: `parameter.main_grad`, views of flat buffers.

    Args:
        named_parameters: as `model.named_parameters()` gives them, each tensor once; those that
            need no gradient are left out.
        layout: gradients are averaged over its context and data axes.
        accumulate_in_fp32: keep 16-bit parameters' gradients in fp32 (always so with bf16).
        bucket_bytes: smallest piece (but the last) that is reduced on its own.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        layout: Layout,
        *,
        accumulate_in_fp32: bool,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        parameters = [p for _, p in named_parameters if p.requires_grad]
        assert len({id(p) for p in parameters}) == len(parameters), "a parameter came twice"
        self._axes = [axis for axis in (layout.context, layout.data) if axis.size > 1]
        by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
        for parameter in reversed(parameters):
            dtype = torch.float32 if accumulate_in_fp32 else parameter.dtype
            by_dtype.setdefault(dtype, []).append(parameter)
        self._flats = [
            _Flat.allocate(members, dtype, bucket_bytes) for dtype, members in by_dtype.items()
        ]
        self._in_place: list[nn.Parameter] = []
        for flat in self._flats:
            for parameter, slot in zip(flat.parameters, flat.slots, strict=True):
                view = flat.storage[slot.start : slot.end].view_as(parameter)
                self._attach(parameter, view)

    def _attach(self, parameter: nn.Parameter, view: Tensor) -> None:
        parameter.main_grad = view  # type: ignore[attr-defined]
        if view.dtype == parameter.dtype:
            parameter.grad = view
            self._in_place.append(parameter)
        else:
            parameter.register_post_accumulate_grad_hook(_add_to_main_grad)

    def gradient(self, parameter: nn.Parameter) -> Tensor:
        """The accumulated gradient, in the parameter's shape and the buffer's dtype."""
        view: Tensor = parameter.main_grad  # type: ignore[attr-defined]
        return view

    def views(self, select: Callable[[nn.Parameter], bool]) -> list[Tensor]:
        """As few 1-D tensors as hold the gradients of all selected parameters.

        Between two parameters there may be padding, which is zero.
        """
        return [run for flat in self._flats for run in flat.runs(select)]

    def zero(self) -> None:
        """Forget all gradients. Call before the first micro-batch of an update."""
        for flat in self._flats:
            flat.storage.zero_()
        for parameter in self._in_place:  # somebody's zero_grad(set_to_none=True) may have cut it
            parameter.grad = self.gradient(parameter)

    @torch.no_grad()
    def reduce(self) -> None:
        """Average over the data and context axes. Collective over them; alone, nothing to do.

        Every element is summed on one process and sent to the others, so that all hold the same
        bits. Dividing first keeps fp16 sums in range.
        """
        if not self._axes:
            return
        for flat in self._flats:
            flat.storage.div_(prod(axis.size for axis in self._axes))
        for axis in self._axes:
            works = [
                _start_sum(flat.storage[bucket], axis)
                for flat in self._flats
                for bucket in flat.buckets
            ]
            for work in works:
                work.wait()


def _add_to_main_grad(parameter: nn.Parameter) -> None:
    assert parameter.grad is not None
    parameter.main_grad.add_(parameter.grad)  # type: ignore[attr-defined]
    parameter.grad = None


def _start_sum(bucket: Tensor, axis: Axis) -> Any:
    assert axis.group is not None, "a layout of several processes without groups cannot reduce"
    return dist.all_reduce(bucket, group=axis.group, async_op=True)
