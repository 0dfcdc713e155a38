"""Gradients in flat buffers, averaged over the processes that hold the same weights.

`buckets.BucketPlan` says where each gradient lies and when it is sent; `GradientBuffer` carries the
plan out. If the gradient dtype equals the parameter's, autograd adds straight into the buffer.
Otherwise (16-bit parameters, fp32 gradients) a hook adds each finished gradient to it.
Alternatively, the code that computes a gradient asks for a `slot` and writes there itself: a
product that adds to fp32 memory needs neither a 16-bit gradient nor a buffer of zeros.

The memory that a process needs for gradients, for d processes and gradients of g bytes per element,
depends on the stage of ZeRO (Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training
Trillion Parameter Models", 2020):

    stage 0  all-reduce: everything, everywhere.                                 g bytes
    stage 1  reduce-scatter: everything until then; its own shard counts after.  g bytes
    stage 2  reduce-scatter in every micro-batch's backward: its own shard.      g / d bytes and
             two buckets at most, one being filled and one on its way

With overlap a bucket is sent as soon as all its gradients are complete, otherwise after backward
(in stage 2 it is also sent when complete, but waited for at once). All processes send the buckets
in the plan's order, whatever order their gradients come in. A parameter that gets no gradient in an
iteration counts as zero: its bucket, and those behind it, are sent when backward ends.

In a pipeline, a micro-batch's backward goes through the model parts of a process one by one, with
those of other processes in between. Each such step is a wave. In stage 2 all gradients of a bucket
come in the same wave (or, if several parts share them, in the same waves); when that is over, only
shards of it are left.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby

import torch
from torch import Tensor, nn

from megatron.parallel.buckets import Bucket, BucketPlan, FlatPlan, ParameterTraits, Span
from megatron.parallel.collectives import (
    Pending,
    add_over_ranks,
    mean_of,
    start_all_reduce,
    start_reduce_scatter,
)
from megatron.parallel.fp8 import Fp8Products
from megatron.parallel.layout import Axis
from megatron.parallel.parameter import ParameterSpec
from megatron.parallel.weights import FlatBuffer, WeightBuffer


@dataclass
class PendingBucket:
    """A bucket on its way from backward to the reduced gradient.

    Attributes:
        axis: The processes to average over.
        members: The parameters in it, each with its location in the bucket.
        tied: The members, by `id`, whose gradients are added to after backward.
        partial: The locations of gradients that tensor ranks add up first.
        waves: The waves that each add to the gradients of the bucket, and of others together with
            them.
        kept: The memory for the reduced gradients: the whole bucket or this process's shard.
        whole: All gradients of the bucket. In stage 2 it is `None` until the first one arrives.
        elements: The number of elements of the whole bucket.
        missing: How often each parameter's gradient will still be added to. A parameter is removed
            when its gradient is complete.
    """

    axis: Axis
    members: list[tuple[nn.Parameter, slice]]
    tied: frozenset[int]
    partial: list[slice]
    waves: tuple[Hashable, ...]
    kept: Tensor
    whole: Tensor | None
    elements: int
    missing: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class _Sent:
    """A reduction under way, with the memory that must live at least as long."""

    bucket: PendingBucket
    work: Pending
    whole: Tensor


class Reducer:
    """A sender of gradient buckets that receives their averages.

    Args:
        buckets: All buckets, in sending order.
        tensor: The axis over which partial gradients are added.
        zero_stage: The ZeRO stage, 0 to 2; 0 if no other process holds the same weights.
        overlap: Send during the backward of the last micro-batch.
        uses: How often a backward adds to the gradients of parameters that have slots, by `id`. The
            other parameters' gradients are added to once. It is read again whenever buckets are
            expected.

    Attributes:
        overlap: The argument, but always False if no other process holds the same weights.
    """

    def __init__(
        self,
        buckets: Sequence[PendingBucket],
        tensor: Axis,
        *,
        zero_stage: int,
        overlap: bool,
        uses: Mapping[int, int],
    ) -> None:
        """Expect all gradients."""
        self.buckets = list(buckets)
        self._is_alone = all(bucket.axis.size == 1 for bucket in self.buckets)
        self.overlap = overlap and not self._is_alone
        self._tensor = tensor
        self._zero_stage = zero_stage
        self._uses = uses
        self._waves: dict[Hashable, list[PendingBucket]] = {}
        for bucket in self.buckets:
            for wave in bucket.waves:
                self._waves.setdefault(wave, []).append(bucket)
        self._collecting = False  # whether finished gradients may be sent
        self._expected: list[PendingBucket] = []  # buckets that this wave or update fills
        self._next = 0  # of them, to be sent
        self._wave_now: Hashable = None
        self._sent: list[_Sent] = []
        self.expect_all()

    def expect_all(self) -> None:
        """Note that every gradient is missing and no bucket has been sent."""
        self._expect(self.buckets)

    @contextmanager
    def micro_batch(self, *, is_last: bool, wave: Hashable) -> Iterator[None]:
        """Send completed buckets in the last micro-batch of an update; in stage 2 in every one.

        Args:
            is_last: No other backward of this update reaches the same parameters.
            wave: The wave of gradients that this backward brings.
        """
        self._collecting = self._zero_stage == 2 or (self.overlap and is_last)
        if self._zero_stage == 2:
            self._wave_now = wave
            self._expect(self._waves.get(wave, []))
        try:
            yield
        finally:
            self._collecting = False
        if self._zero_stage == 2:
            self._send_rest()

    def whole(self, bucket: PendingBucket) -> Tensor:
        """Return the tensor [elements] to which backward adds the bucket's gradients."""
        if bucket.whole is None:
            assert self._collecting, "backward outside of micro_batch()"
            assert self._wave_now in bucket.waves, "a gradient came in another one's wave"
            bucket.whole = bucket.kept.new_zeros(bucket.elements)
        return bucket.whole

    def finish(self, bucket: PendingBucket, parameter: nn.Parameter) -> None:
        """Note that a parameter's gradient was added to, and send the buckets that are complete."""
        if not self._collecting:
            return
        assert id(parameter) in bucket.missing, "a gradient came twice in one backward"
        if id(parameter) in bucket.tied and self._zero_stage < 2:
            return
        bucket.missing[id(parameter)] -= 1
        if bucket.missing[id(parameter)] == 0:
            del bucket.missing[id(parameter)]
        while self._next < len(self._expected) and not self._expected[self._next].missing:
            self._send(self._expected[self._next])

    def reduce(self) -> None:
        """Send what is left and wait for all averages. Collective over the replicas."""
        if self._is_alone:
            for bucket in self.buckets:
                self._add_partial_gradients(bucket)
            return
        if self._zero_stage < 2:
            self._send_rest()
        self.receive()
        self.expect_all()

    def receive(self) -> None:
        """Wait for all messages that are under way."""
        for sent in self._sent:
            received = sent.work.wait()
            if self._zero_stage == 2:
                sent.bucket.kept.add_(received)
        self._sent.clear()

    def _expect(self, buckets: list[PendingBucket]) -> None:
        """Note that every gradient of these buckets is missing and none of them has been sent."""
        self._expected, self._next = buckets, 0
        for bucket in buckets:
            bucket.missing = {id(p): self._uses.get(id(p), 1) for p, _ in bucket.members}

    def _send_rest(self) -> None:
        """Send the buckets left after backward. Parameters without a gradient count as zero."""
        for bucket in self._expected[self._next :]:
            self._send(bucket)

    def _send(self, bucket: PendingBucket) -> None:
        self._next += 1
        if bucket.whole is None:
            bucket.whole = bucket.kept.new_zeros(bucket.elements)
        self._add_partial_gradients(bucket)
        whole, into = bucket.whole, bucket.kept
        if self._zero_stage == 2:
            self.receive()  # so that at most one bucket is on its way
            bucket.whole, into = None, torch.empty_like(bucket.kept)
        mean = mean_of(whole, bucket.axis)
        if self._zero_stage > 0:
            work = start_reduce_scatter(whole, bucket.axis, into=into, op=mean)
        else:
            work = start_all_reduce(whole, bucket.axis, mean)
        self._sent.append(_Sent(bucket, work, whole))
        if self._zero_stage == 2 and not self.overlap:
            self.receive()

    def _add_partial_gradients(self, bucket: PendingBucket) -> None:
        if bucket.partial and self._tensor.size > 1:
            assert bucket.whole is not None
            add_over_ranks([bucket.whole[place] for place in bucket.partial], self._tensor)


def traits_of(name: str, parameter: nn.Parameter) -> ParameterTraits:
    """Return the traits that a parameter itself defines: its name, shape, dtype and spec."""
    spec: ParameterSpec | None = getattr(parameter, "spec", None)
    return ParameterTraits(
        name,
        tuple(parameter.shape),
        parameter.dtype,
        is_partial=spec is not None and spec.partial_gradient,
    )


class GradientSlot:
    """The destination, instead of autograd, of a gradient's use; once per backward."""

    def __init__(self, buffer: GradientBuffer, parameter: nn.Parameter) -> None:
        """Point to a parameter's gradient in the buffer."""
        self._buffer = buffer
        self._parameter = parameter

    @contextmanager
    def open(self) -> Iterator[tuple[Tensor, bool]]:
        """Yield the gradient [rows, columns], and whether to add to it or overwrite it.

        After the block, this use's part of the gradient is complete, and the gradient may be sent.
        Runs without autograd.
        """
        into, accumulate = self._buffer.begin(self._parameter)
        yield into.flatten(0, -2), accumulate
        self._buffer.end(self._parameter)


class GradientBuffer:
    """A buffer that holds a model's gradients and averages them.

    Below stage 2 each parameter's gradient is `parameter.main_grad`, a view of a flat buffer. In
    stage 2 only a tied parameter has a `main_grad`: the part of its bucket that this process keeps.

    Args:
        named_parameters: The parameters of the plan, as `model.named_parameters()` gives them, each
            tensor once. Parameters that need no gradient are left out.
        plan: The layout of gradients and the sending order.
        axes: The plan's replica axes by name.
        tensor: The axis over which partial gradients are added, just before they are averaged.
        overlap: Reduce during the backward of the last micro-batch.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        plan: BucketPlan,
        axes: Mapping[str, Axis],
        *,
        tensor: Axis | None = None,
        overlap: bool = False,
    ) -> None:
        """Allocate the plan's buffers and register the parameters' hooks."""
        parameters = {name: p for name, p in named_parameters if p.requires_grad}
        assert len({id(p) for p in parameters.values()}) == len(parameters), (
            "a parameter came twice"
        )
        planned = {member.traits.name for flat in plan.flats for member in flat.members}
        assert planned == parameters.keys(), "the plan is of other parameters"
        self.plan = plan
        self._storages: list[Tensor] = []
        self._in_place: list[tuple[nn.Parameter, Tensor]] = []
        self._owned: dict[int, tuple[Span, Tensor]] = {}
        self._places: dict[int, tuple[PendingBucket, slice]] = {}
        self._uses: dict[int, int] = {}  # slots handed out
        self._unslotted: list[Tensor] | None = None  # what has none; `None`: not looked up yet
        self._stale: set[int] = set()  # gradients of an update before: to be written over
        self._has_waves = any(b.waves != (None,) for flat in plan.flats for b in flat.buckets)
        pending: dict[tuple[int, int], PendingBucket] = {}
        self.flats = [
            self._allocate(flat, axes[flat.axis], parameters, pending, number)
            for number, flat in enumerate(plan.flats)
        ]
        self._reducer = Reducer(
            [pending[place] for place in plan.order],
            tensor or Axis(),
            zero_stage=plan.zero_stage,
            overlap=overlap,
            uses=self._uses,
        )
        for parameter in parameters.values():
            self._collect_from(parameter)

    @property
    def is_sharded(self) -> bool:
        """Whether each process keeps and updates only its own shard."""
        return self.plan.zero_stage > 0

    @property
    def shares_weights(self) -> bool:
        """Whether a process lacks some of the weights: never, in stages 0 to 2."""
        return False

    def _allocate(
        self,
        plan: FlatPlan,
        axis: Axis,
        parameters: Mapping[str, nn.Parameter],
        pending: dict[tuple[int, int], PendingBucket],
        number: int,
    ) -> FlatBuffer:
        """Allocate a buffer, and note its buckets by (number, place in the buffer)."""
        assert plan.replicas == axis.size, f"the plan is for {plan.replicas} {plan.axis} ranks"
        shards, rank = (axis.size, axis.rank) if self.is_sharded else (1, 0)
        is_cut = self.plan.zero_stage == 2
        first = parameters[next(plan.members).traits.name]
        storage = torch.zeros(
            plan.elements // shards if is_cut else plan.elements,
            dtype=plan.gradient_dtype,
            device=first.device,
        )
        self._storages.append(storage)
        regions = []
        for place, bucket in enumerate(plan.buckets):
            shard = bucket.span.shard(rank, shards)
            if is_cut:
                start = bucket.span.start // shards
                whole, kept = None, storage[start : start + shard.size]
            else:
                whole = storage[bucket.span.start : bucket.span.end]
                kept = whole[shard.within(bucket.span)]
            one = pending[number, place] = _pending(bucket, axis, parameters, kept, whole)
            for member in bucket.members:
                parameter, slot = parameters[member.traits.name], member.slot
                own = slot.intersect(shard) or Span(slot.start, slot.start)
                gradient = kept[own.within(shard)] if own.size else kept[:0]
                self._owned[id(parameter)] = (own.relative_to(slot), gradient)
                self._places[id(parameter)] = (one, slot.within(bucket.span))
            regions.append((shard, kept))
        members = [(parameters[member.traits.name], member.slot) for member in plan.members]
        if not self.is_sharded:
            regions = [(Span(0, plan.elements), storage)]
        return FlatBuffer(plan, axis, members, regions)

    def _collect_from(self, parameter: nn.Parameter) -> None:
        """Collect the parameter's gradient in its bucket."""
        bucket, slot = self._places[id(parameter)]
        is_in_place = False
        if bucket.whole is not None:
            view = bucket.whole[slot].view_as(parameter)
            parameter.main_grad = view  # type: ignore[attr-defined]
            is_in_place = view.dtype == parameter.dtype
            if is_in_place:
                parameter.grad = view
                self._in_place.append((parameter, view))
        elif id(parameter) in bucket.tied:
            parameter.main_grad = bucket.kept  # type: ignore[attr-defined]
        if not is_in_place or self._reducer.overlap:
            # The parameter holds its hook where the garbage collector does not look, and the buffer
            # holds the parameter: with a reference back, neither would ever be freed.
            collect = partial(_collect, weakref.ref(self), is_in_place)
            parameter.register_post_accumulate_grad_hook(collect)

    def owned(self, parameter: nn.Parameter) -> Span:
        """Return the elements of the flattened parameter updated here; may be empty."""
        return self._owned[id(parameter)][0]

    def part(self, parameter: nn.Parameter) -> Tensor:
        """Return the weights that are `owned`: the parameter or, if sharded, a 1-D view of it."""
        if not self.is_sharded:
            return parameter.detach()
        own = self.owned(parameter)
        return parameter.detach().view(-1)[own.start : own.end]

    def compute_dtype(self, parameter: nn.Parameter) -> torch.dtype:
        """Return the data type that forward computes in."""
        return parameter.dtype

    def gradient(self, parameter: nn.Parameter) -> Tensor:
        """Return the gradient of the `owned` elements, in the buffer's dtype.

        It has the parameter's shape or, if the buffer is sharded, one dimension.
        """
        if self.is_sharded:
            return self._owned[id(parameter)][1]
        view: Tensor = parameter.main_grad  # type: ignore[attr-defined]
        return view

    def slot(self, parameter: nn.Parameter) -> GradientSlot | None:
        """Return a slot for one use of the parameter, which autograd must not reach from now on.

        With several uses (tied embeddings), each asks for its own: the gradient is complete when
        all of them have added to it.

        Returns:
            The slot, or `None` if no fp32 gradient of the parameter is kept. Autograd then handles
            it.
        """
        if id(parameter) not in self._places:
            return None
        if self._places[id(parameter)][0].kept.dtype != torch.float32:
            return None
        self._uses[id(parameter)] = self._uses.get(id(parameter), 0) + 1
        self._unslotted = None
        self._reducer.expect_all()
        return GradientSlot(self, parameter)

    def begin(self, parameter: nn.Parameter) -> tuple[Tensor, bool]:
        """Return a slot's gradient, and whether it already holds something of this update."""
        bucket, place = self._places[id(parameter)]
        is_stale = id(parameter) in self._stale
        self._stale.discard(id(parameter))
        return self._reducer.whole(bucket)[place].view_as(parameter), not is_stale

    def end(self, parameter: nn.Parameter) -> None:
        """Note that one use of a slot's parameter has added its part."""
        self._reducer.finish(self._places[id(parameter)][0], parameter)

    def views(self, select: Callable[[nn.Parameter], bool]) -> list[Tensor]:
        """Return the fewest 1-D tensors that hold the owned part of all selected gradients.

        Between two parameters there may be padding, which is zero.
        """
        return [run for flat in self.flats for run in flat.runs(select)]

    def share_weights(
        self,
        overlap_in: Sequence[nn.Module] | None,
        in_8_bits: Mapping[nn.Parameter, Fp8Products],
    ) -> WeightBuffer | None:
        """Return the weight half of a sharded update; `None` if every process updates everything.

        This moves the parameters' values, so call it before `part`.

        Args:
            overlap_in: The models whose forward may begin while weights are under way.
            in_8_bits: The parameters that the plan gathers in 8 bits, and the products that use
                each.
        """
        if not self.is_sharded:
            return None
        return WeightBuffer(self.flats, overlap_in=overlap_in, in_8_bits=in_8_bits)

    def zero(self) -> None:
        """Forget all gradients. Call before the first micro-batch of an update."""
        self._forget()
        for parameter, view in self._in_place:  # zero_grad(set_to_none=True) may have cut it
            parameter.grad = view
        self._reducer.expect_all()

    def _forget(self) -> None:
        """Zero the gradients that backward adds to. A slot's first use overwrites them."""
        if self.plan.zero_stage == 2 or not self._uses:
            for storage in self._storages:
                storage.zero_()
            return
        if self._unslotted is None:
            self._unslotted = self._runs_without_slot()
        if self._unslotted:  # one kernel for all: one for each took 2 ms with a GPT of 1.7B
            torch._foreach_zero_(self._unslotted)
        self._stale = set(self._uses)

    def _runs_without_slot(self) -> list[Tensor]:
        """Return the gradients that autograd adds to, as runs of neighbors."""
        runs = []
        for bucket in self._reducer.buckets:
            assert bucket.whole is not None
            for has_slot, members in groupby(bucket.members, lambda m: id(m[0]) in self._uses):
                places = [place for _, place in members]
                if not has_slot:
                    runs.append(bucket.whole[places[0].start : places[-1].stop])
        return runs

    @property
    def to_overwrite(self) -> frozenset[int]:
        """The parameters, by `id`, whose old gradient the next backward writes over."""
        return frozenset(self._stale)

    @contextmanager
    def recording(self) -> Iterator[Callable[[], None]]:
        """Surround a backward whose kernels a device only records: no gradient is there yet.

        Yields a function to call each time the recorded kernels have run with the same
        `to_overwrite`.
        """
        before, written = self._stale, set[int]()
        self._stale = set(before)
        yield lambda: self._stale.difference_update(written)
        written |= before - self._stale
        self._stale = before

    @torch.no_grad()
    def complete(self) -> None:
        """Zero the gradients that no backward of this update has reached.

        Call it before any gradient is read.
        """
        if self.plan.zero_stage == 2:
            self._reducer.receive()
        for stale in self._stale:
            bucket, place = self._places[stale]
            self._reducer.whole(bucket)[place].zero_()
        self._stale.clear()

    @contextmanager
    def micro_batch(self, *, is_last: bool, wave: Hashable = None) -> Iterator[None]:
        """Surround each backward. With overlap the last one sends buckets as they are completed.

        Collective over the replica axis with overlap or in stage 2.

        Args:
            is_last: No other backward of this update reaches the same parameters.
            wave: The gradients that it brings, one of the plan's waves.
        """
        wave = wave if self._has_waves else None
        with self._reducer.micro_batch(is_last=is_last, wave=wave):
            yield

    @torch.no_grad()
    def reduce(self) -> None:
        """Average the gradients over the replica axis. Collective over it.

        Every element is summed on one process and sent to the others, so that all hold the same
        bits. Dividing first keeps fp16 sums in range.
        """
        self.complete()
        self._reducer.reduce()

    @torch.no_grad()
    def collect(self, is_in_place: bool, parameter: nn.Parameter) -> None:
        """Take over a finished gradient. Autograd adds up all uses of a parameter before that."""
        bucket, slot = self._places[id(parameter)]
        assert id(parameter) not in self._uses, "a parameter with slots is outside of autograd"
        if not is_in_place:
            assert parameter.grad is not None
            self._reducer.whole(bucket)[slot].view_as(parameter).add_(parameter.grad)
            parameter.grad = None
        self._reducer.finish(bucket, parameter)


def _collect(
    buffer: weakref.ref[GradientBuffer], is_in_place: bool, parameter: nn.Parameter
) -> None:
    alive = buffer()
    if alive is not None:
        alive.collect(is_in_place, parameter)


def _pending(
    bucket: Bucket,
    axis: Axis,
    parameters: Mapping[str, nn.Parameter],
    kept: Tensor,
    whole: Tensor | None,
) -> PendingBucket:
    """Return a bucket of the plan with its memory."""
    places = [(member.traits, member.slot.within(bucket.span)) for member in bucket.members]
    return PendingBucket(
        axis=axis,
        members=[(parameters[traits.name], place) for traits, place in places],
        tied=frozenset(id(parameters[traits.name]) for traits, _ in places if traits.is_tied),
        partial=[place for traits, place in places if traits.is_partial],
        waves=bucket.waves,
        kept=kept,
        whole=whole,
        elements=bucket.span.size,
    )
