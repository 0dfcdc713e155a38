"""Gradients in flat buffers, averaged over the processes that hold the same weights.

`buckets.BucketPlan` defines where each gradient is stored and when it is sent, and `GradientBuffer`
executes the plan. Below stage 2, if gradients have the parameter's dtype, autograd adds directly
into the buffer. Otherwise (16-bit parameters with fp32 gradients, or stage 2) a hook adds each
finished gradient to the buffer.
Alternatively, the code that computes a gradient requests a `slot` and writes to it directly: a
product that adds to fp32 memory needs neither a 16-bit gradient nor a buffer of zeros.

With d processes and g bytes per element, the gradient memory of a process depends on the ZeRO stage
(Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020):

    stage 0  All-reduce. A process keeps all gradients: g bytes.
    stage 1  Reduce-scatter. A process keeps all gradients, but only its shard is averaged:
             g bytes.
    stage 2  Reduce-scatter in the backward pass of every micro-batch. A process keeps its shard,
             g / d bytes, and whole buckets only while they are filled or sent: usually one of each
             buffer is being filled, and at most one is in transit.

With overlap, a bucket is sent as soon as all its gradients are complete. Otherwise it is sent after
the backward pass or, in stage 2, when complete, and the process waits for it immediately. All
processes send the buckets in the plan's order, regardless of the order of their gradients. A
parameter without a gradient in an iteration counts as zero: its bucket and those after it are sent
by `reduce` or, in stage 2, when the backward pass ends.

In a pipeline, the backward pass of a micro-batch goes through the model parts of a process one by
one, with parts of other processes in between. Each such step is a wave. In stage 2, all gradients
of a bucket are computed in the same wave, or in the same waves if several parts share the
parameters. After the wave, only shards of the bucket remain.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor, nn

from megatron.parallel import collectives
from megatron.parallel.buckets import Bucket, BucketPlan, FlatPlan, ParameterTraits, Span, runs
from megatron.parallel.collectives import Pending
from megatron.parallel.fp8 import Fp8Products
from megatron.parallel.layout import Axis
from megatron.parallel.linear import WeightSlot
from megatron.parallel.parameter import ParameterSpec
from megatron.parallel.weights import FlatBuffer, WeightBuffer

Parameters = Mapping[str, nn.Parameter]  # by name


class PendingBucket:
    """A bucket of gradients that are being computed or reduced.

    Args:
        plan: The plan of the bucket.
        axis: The processes over which gradients are averaged.
        tensor: The processes over which partial gradients are summed.
        parameters: The parameters by name, including those of the bucket.
        reduced: The memory for the reduced gradients: the whole bucket or this process's shard.
        whole: All gradients of the bucket. In stage 2 this is `None` until the first gradient
            arrives.

    Attributes:
        members: The bucket's parameters, each with its span relative to the bucket.
        tied: The parameters, by `id`, whose copies' gradients are added after the backward pass.
        partial: The spans of gradients that are first summed over tensor ranks.
        missing: The number of additions to the gradient of each parameter, by `id`, that are still
            to come. A parameter is removed when its gradient is complete.
    """

    def __init__(
        self,
        plan: Bucket,
        axis: Axis,
        tensor: Axis,
        parameters: Parameters,
        reduced: Tensor,
        whole: Tensor | None,
    ) -> None:
        """Create a bucket that expects no gradients yet."""
        self.plan, self.axis, self.tensor = plan, axis, tensor
        self.reduced, self.whole = reduced, whole
        members = [
            (member.traits, parameters[member.traits.name], member.slot.relative_to(plan.span))
            for member in plan.members
        ]
        self.members = [(parameter, span) for _, parameter, span in members]
        self.tied = {id(parameter) for traits, parameter, _ in members if traits.is_tied}
        self.partial = [span for traits, _, span in members if traits.is_partial]
        self.missing: dict[int, int] = {}

    def allocate(self) -> Tensor:
        """Return the memory of the whole bucket, allocating zeros if necessary."""
        if self.whole is None:
            self.whole = self.reduced.new_zeros(self.plan.span.size)
        return self.whole


class Reducer:
    """An object that averages buckets of gradients over the processes with the same weights.

    Args:
        buckets: All buckets, in sending order.
        zero_stage: The ZeRO stage, 0 to 2; 0 if no other process holds the same weights.
        overlap: Whether to send during the backward pass of the last micro-batch; in stage 2,
            whether the backward pass goes on while a bucket is in transit.

    Attributes:
        overlap: The argument, or False if no other process holds the same weights.
        uses: The number of times that a backward pass adds to the gradient of each parameter with
            slots, by `id`. Every other gradient is complete after one addition. `expect` reads this
            mapping.
        fingerprints: If not `None`, a list to which the reducer appends the sum of squares of each
            bucket's gradients on this rank before reduction, fp32 [].
    """

    def __init__(self, buckets: Iterable[PendingBucket], *, zero_stage: int, overlap: bool) -> None:
        """Create a reducer that expects all gradients."""
        self.buckets = list(buckets)
        self.uses: dict[int, int] = {}
        self._is_alone = all(bucket.axis.size == 1 for bucket in self.buckets)
        self.overlap = overlap and not self._is_alone
        self._zero_stage = zero_stage
        self.fingerprints: list[Tensor] | None = None
        self._is_noted = False  # whether the buckets left to send are in `fingerprints`
        self._collecting = False  # whether finished gradients may be sent
        self._wave_now: Hashable = None
        # Reductions in flight, and the memory that must outlive them.
        self._sent: list[tuple[PendingBucket, Pending, Tensor]] = []
        self.expect(self.buckets)

    def expect(self, buckets: list[PendingBucket]) -> None:
        """Record that these buckets have received no gradients and none has been sent."""
        self._expected, self._next, self._is_noted = buckets, 0, False
        for bucket in buckets:
            bucket.missing = {id(p): self.uses.get(id(p), 1) for p, _ in bucket.members}

    @contextmanager
    def micro_batch(self, *, is_last: bool, wave: Hashable) -> Iterator[None]:
        """Return a context manager for one backward pass, which sends completed buckets.

        Buckets are sent in the last micro-batch of an update with overlap, or in every micro-batch
        in stage 2.

        Args:
            is_last: Whether this is the last backward pass of the update to reach these parameters.
            wave: The wave of gradients that this backward pass computes.
        """
        self._collecting = self._zero_stage == 2 or (self.overlap and is_last)
        if self._zero_stage == 2:
            self._wave_now = wave
            self.expect([bucket for bucket in self.buckets if wave in bucket.plan.waves])
        try:
            yield
        finally:
            self._collecting = False
        if self._zero_stage == 2:
            self._send_remaining()

    def whole(self, bucket: PendingBucket) -> Tensor:
        """Return the tensor [elements] to which the backward pass adds the bucket's gradients."""
        if bucket.whole is None:
            assert self._collecting, "backward pass outside micro_batch()"
            assert self._wave_now in bucket.plan.waves, "a gradient arrived in the wrong wave"
        return bucket.allocate()

    def finish(self, bucket: PendingBucket, parameter: nn.Parameter) -> None:
        """Record an addition to a parameter's gradient, and send complete buckets, in order.

        In a backward pass that sends no buckets, this does nothing.
        """
        if not self._collecting:
            return
        assert id(parameter) in bucket.missing, "a gradient arrived twice in one backward pass"
        if id(parameter) in bucket.tied and self._zero_stage < 2:
            return
        bucket.missing[id(parameter)] -= 1
        if bucket.missing[id(parameter)] == 0:
            del bucket.missing[id(parameter)]
        while self._next < len(self._expected) and not self._expected[self._next].missing:
            self._send(self._expected[self._next])

    def reduce(self) -> None:
        """Send the remaining buckets and wait for all averages.

        Collective over the replicas, and over the tensor axis if there are partial gradients.
        """
        if self._is_alone:
            for bucket in self.buckets:
                self._add_partial_gradients(bucket)
            return
        if self._zero_stage < 2:
            self._send_remaining()
        self.receive()
        self.expect(self.buckets)

    def receive(self) -> None:
        """Wait for all reductions in flight. In stage 2, add them to this process's shards."""
        for bucket, work, _ in self._sent:
            received = work.wait()
            if self._zero_stage == 2:
                bucket.reduced.add_(received)
        self._sent.clear()

    def _send_remaining(self) -> None:
        """Send the remaining buckets. Parameters without a gradient count as zero."""
        for bucket in self._expected[self._next :]:
            self._send(bucket)

    def note_remaining(self) -> None:
        """Record fingerprints of the remaining buckets, before gradients of copies are added."""
        if self.fingerprints is not None and not self._is_noted:
            self._is_noted = True
            remaining = [bucket.allocate() for bucket in self._expected[self._next :]]
            self.fingerprints += [_sum_of_squares(whole) for whole in remaining]

    def _send(self, bucket: PendingBucket) -> None:
        if self.fingerprints is not None and not self._is_noted:
            self.fingerprints.append(_sum_of_squares(bucket.allocate()))
        self._next += 1
        whole, into = bucket.allocate(), bucket.reduced
        self._add_partial_gradients(bucket)
        if self._zero_stage == 2:
            self.receive()  # so that at most one bucket is in transit
            bucket.whole, into = None, torch.empty_like(bucket.reduced)
        mean = collectives.mean_of(whole, bucket.axis)
        if self._zero_stage > 0:
            work = collectives.start_reduce_scatter(whole, bucket.axis, into=into, op=mean)
        else:
            work = collectives.start_all_reduce(whole, bucket.axis, mean)
        self._sent.append((bucket, work, whole))
        if self._zero_stage == 2 and not self.overlap:
            self.receive()

    def _add_partial_gradients(self, bucket: PendingBucket) -> None:
        if bucket.partial and bucket.tensor.size > 1:
            whole = bucket.allocate()
            parts = [span.of(whole) for span in bucket.partial]
            collectives.all_reduce_coalesced(parts, bucket.tensor)


def _sum_of_squares(gradients: Tensor) -> Tensor:
    return torch.linalg.vector_norm(gradients.detach(), dtype=torch.float32).square()


def traits_of(name: str, parameter: nn.Parameter) -> ParameterTraits:
    """Return the traits that follow from a parameter's name, shape, dtype and spec."""
    spec: ParameterSpec | None = getattr(parameter, "spec", None)
    is_partial = spec is not None and spec.partial_gradient
    axis = "expert_data" if spec is not None and spec.is_expert else "data"
    shape = tuple(parameter.shape)
    return ParameterTraits(name, shape, parameter.dtype, axis, is_partial=is_partial)


class GradientBuffer:
    """A buffer that stores and averages the gradients of a model (ZeRO stages 0 to 2).

    Below stage 2 each parameter's gradient is `parameter.main_grad`, a view of a flat buffer. In
    stage 2 only a tied parameter has a `main_grad`: this process's shard of the parameter's bucket.

    Args:
        named_parameters: The parameters, as `model.named_parameters()` returns them, each tensor
            once. Those that require gradients must be the parameters of the plan.
        plan: The layout of gradients and the sending order.
        axes: The plan's replica axes by name.
        tensor: For each of these names, the axis over which partial gradients are summed, just
            before they are averaged.
        overlap: Whether to reduce during the backward pass of the last micro-batch; in stage 2,
            whether the backward pass goes on while a bucket is in transit.

    Attributes:
        plan: The layout of gradients and the sending order.
        flats: The flat buffers of the plan.
        is_sharded: Whether each process averages and updates only its own shard.
        shares_weights: Whether a process stores only a shard of the weights; always False here.
    """

    shares_weights = False

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        plan: BucketPlan,
        axes: Mapping[str, Axis],
        *,
        tensor: Mapping[str, Axis],
        overlap: bool = False,
    ) -> None:
        """Allocate the plan's buffers and register hooks on the parameters."""
        parameters = {name: p for name, p in named_parameters if p.requires_grad}
        assert len(set(map(id, parameters.values()))) == len(parameters), "a parameter is repeated"
        planned = {member.traits.name for flat in plan.flats for member in flat.members}
        assert planned == parameters.keys(), "the plan is for other parameters"
        self.plan = plan
        self.is_sharded = plan.zero_stage > 0
        self._storages: list[Tensor] = []
        self._in_place: dict[nn.Parameter, Tensor] = {}
        self._owned: dict[int, tuple[Span, Tensor]] = {}
        self._spans: dict[int, tuple[PendingBucket, Span]] = {}
        self._unslotted: list[Tensor] | None = None  # gradients without a slot, cached
        self._stale: set[int] = set()  # gradients of the previous update, to be overwritten
        self._has_waves = any(b.waves != (None,) for flat in plan.flats for b in flat.buckets)
        self.flats: list[FlatBuffer] = []
        pending: list[list[PendingBucket]] = []
        for flat in plan.flats:
            axis = axes[flat.axis]
            assert flat.replicas == axis.size, f"the plan is for {flat.replicas} {flat.axis} ranks"
            buffer, buckets = self._allocate(flat, axis, tensor[flat.axis], parameters)
            self.flats.append(buffer)
            pending.append(buckets)
        self._reducer = Reducer(
            (pending[flat][bucket] for flat, bucket in plan.order),
            zero_stage=plan.zero_stage,
            overlap=overlap,
        )
        self._uses = self._reducer.uses
        for parameter in parameters.values():
            self._collect_from(parameter)

    def _allocate(
        self, plan: FlatPlan, axis: Axis, tensor: Axis, parameters: Parameters
    ) -> tuple[FlatBuffer, list[PendingBucket]]:
        """Allocate a buffer and its buckets, and record where each gradient is stored."""
        shards, rank = (axis.size, axis.rank) if self.is_sharded else (1, 0)
        # This process stores one of this many parts of each bucket.
        parts = shards if self.plan.zero_stage == 2 else 1
        members = [(parameters[member.traits.name], member.slot) for member in plan.members]
        first, _ = members[0]
        elements = plan.elements // parts
        storage = torch.zeros(elements, dtype=plan.gradient_dtype, device=first.device)
        self._storages.append(storage)
        regions, buckets = [], []
        for bucket in plan.buckets:
            shard = bucket.span.shard(rank, shards)
            memory = storage[bucket.span.start // parts : bucket.span.end // parts]
            whole, reduced = None, memory
            if self.plan.zero_stage < 2:
                whole, reduced = memory, shard.relative_to(bucket.span).of(memory)
            pending = PendingBucket(bucket, axis, tensor, parameters, reduced, whole)
            for member, (parameter, span) in zip(bucket.members, pending.members, strict=True):
                slot = member.slot
                own = slot.intersect(shard) or Span(slot.start, slot.start)
                gradient = own.relative_to(shard).of(reduced) if own.size else reduced[:0]
                self._owned[id(parameter)] = (own.relative_to(slot), gradient)
                self._spans[id(parameter)] = (pending, span)
            buckets.append(pending)
            regions.append((shard, reduced))
        if not self.is_sharded:
            regions = [(Span(0, plan.elements), storage)]
        return FlatBuffer(plan, axis, members, regions), buckets

    def _collect_from(self, parameter: nn.Parameter) -> None:
        """Arrange for the parameter's gradient to be added to its bucket."""
        bucket, span = self._spans[id(parameter)]
        if bucket.whole is not None:
            view = span.of(bucket.whole).view_as(parameter)
            parameter.main_grad = view  # type: ignore[attr-defined]
            if view.dtype == parameter.dtype:
                parameter.grad = self._in_place[parameter] = view
        elif id(parameter) in bucket.tied:
            parameter.main_grad = bucket.reduced  # type: ignore[attr-defined]
        if parameter not in self._in_place or self._reducer.overlap:
            # The garbage collector does not see the parameter's reference to its hook. The buffer
            # refers to the parameter, so a strong reference from the hook to the buffer would keep
            # both alive forever.
            buffer = weakref.ref(self)

            def collect(parameter: nn.Parameter) -> None:
                if (alive := buffer()) is not None:
                    alive.collect(parameter)

            parameter.register_post_accumulate_grad_hook(collect)

    def owned(self, parameter: nn.Parameter) -> Span:
        """Return the span of the flattened parameter that this process updates; it may be empty."""
        return self._owned[id(parameter)][0]

    def part(self, parameter: nn.Parameter) -> Tensor:
        """Return the weights that `owned` selects: the parameter, or a 1-D view if sharded."""
        if not self.is_sharded:
            return parameter.detach()
        own = self.owned(parameter)
        return parameter.detach().view(-1)[own.start : own.end]

    def compute_dtype(self, parameter: nn.Parameter) -> torch.dtype:
        """Return the parameter's data type in the forward pass."""
        return parameter.dtype

    def gradient(self, parameter: nn.Parameter) -> Tensor:
        """Return the gradient of the weights that `part` returns, in the buffer's dtype.

        The result has the parameter's shape or, if the buffer is sharded, one dimension.
        """
        if self.is_sharded:
            return self._owned[id(parameter)][1]
        view: Tensor = parameter.main_grad  # type: ignore[attr-defined]
        return view

    def slot(self, parameter: nn.Parameter) -> WeightSlot | None:
        """Return a slot for one use of the parameter. Autograd must not differentiate this use.

        Each use of a parameter (tied embeddings have two) requests its own slot. The gradient is
        complete when all uses have added to it. `zero`, before each update, counts these uses, so
        request all slots before the first update.

        Returns:
            The slot, or `None` if the buffer does not store the parameter's gradient in fp32.
            Autograd then handles the gradient.
        """
        if id(parameter) not in self._spans:
            return None
        bucket, span = self._spans[id(parameter)]
        if bucket.reduced.dtype != torch.float32:
            return None
        self._uses[id(parameter)] = self._uses.get(id(parameter), 0) + 1
        self._unslotted = None

        @contextmanager
        def add() -> Iterator[tuple[Tensor, bool]]:
            is_stale = id(parameter) in self._stale
            self._stale.discard(id(parameter))
            gradient = span.of(self._reducer.whole(bucket)).view_as(parameter)
            yield gradient.flatten(0, -2), not is_stale
            self._reducer.finish(bucket, parameter)

        return add

    def views(self, select: Callable[[nn.Parameter], bool]) -> list[Tensor]:
        """Return the fewest 1-D views that contain the owned gradients of selected parameters.

        Padding between parameters is included and is zero.
        """
        return [run for flat in self.flats for run in flat.runs(select)]

    def share_weights(
        self, overlap_in: Sequence[nn.Module] | None, in_8_bits: Mapping[nn.Parameter, Fp8Products]
    ) -> WeightBuffer | None:
        """Return the object that gathers updated weights, or `None` if the buffer is not sharded.

        This moves the parameters into flat buffers, so call it before `part`.

        Args:
            overlap_in: The models whose forward pass may begin while weights are in transit;
                `None` waits for the weights first.
            in_8_bits: The products of each parameter that the plan gathers in 8 bits.
        """
        if not self.is_sharded:
            return None
        return WeightBuffer(self.flats, overlap_in=overlap_in, in_8_bits=in_8_bits)

    def zero(self) -> None:
        """Reset all gradients. Call before the first micro-batch of an update.

        Below stage 2, a gradient with slots keeps its old values until a backward pass overwrites
        them or `complete` zeroes them.
        """
        if self.plan.zero_stage == 2 or not self._uses:
            for storage in self._storages:
                storage.zero_()
        else:  # a slot's first use overwrites the old values
            if self._unslotted is None:
                self._unslotted = [
                    run.of(bucket.allocate())
                    for bucket in self._reducer.buckets
                    for run in runs(bucket.members, lambda p: id(p) not in self._uses)
                ]
            if self._unslotted:  # in one kernel; separate ones took 2 ms for a 1.7B GPT
                torch._foreach_zero_(self._unslotted)
            self._stale = set(self._uses)
        for parameter, view in self._in_place.items():
            parameter.grad = view  # zero_grad(set_to_none=True) may have removed it
        self._reducer.expect(self._reducer.buckets)

    @property
    def to_overwrite(self) -> frozenset[int]:
        """The parameters, by `id`, whose old gradients the next backward pass overwrites."""
        return frozenset(self._stale)

    @contextmanager
    def recording(self) -> Iterator[Callable[[], None]]:
        """Wrap a backward pass that a device only records, without computing gradients.

        Yields a function to call after each replay of the recorded kernels. A replay must start
        with the same `to_overwrite` as the recording.
        """
        before, written = self._stale, set[int]()
        self._stale = set(before)
        try:
            yield lambda: self._stale.difference_update(written)
            written |= before - self._stale
        finally:
            self._stale = before

    @torch.no_grad()
    def complete(self) -> None:
        """Zero the gradients to which no backward pass of this update has added.

        Call this method before reading any gradient. In stage 2, it also waits for reductions in
        flight. Buckets that have not been sent get their fingerprints now.
        """
        if self.plan.zero_stage == 2:
            self._reducer.receive()
        for stale in self._stale:
            bucket, span = self._spans[stale]
            span.of(self._reducer.whole(bucket)).zero_()
        self._stale.clear()
        self._reducer.note_remaining()

    def pop_fingerprints(self) -> list[Tensor]:
        """Return a fingerprint of each bucket that has been sent since the last call.

        A fingerprint is the sum of squares of this rank's gradients before reduction, fp32 []. The
        first call returns an empty list and starts recording.
        """
        fingerprints, self._reducer.fingerprints = self._reducer.fingerprints or [], []
        return fingerprints

    def micro_batch(self, *, is_last: bool, wave: Hashable = None) -> AbstractContextManager[None]:
        """Return a context manager for one backward pass, which sends completed buckets.

        Buckets are sent in the last backward pass with overlap, and in every backward pass in stage
        2. In these cases the block is collective over the replica axis, and over the tensor axis
        if there are partial gradients.

        Args:
            is_last: Whether this is the last backward pass of the update to reach these parameters.
            wave: The wave of the plan that this backward pass computes.
        """
        wave = wave if self._has_waves else None
        return self._reducer.micro_batch(is_last=is_last, wave=wave)

    @torch.no_grad()
    def reduce(self) -> None:
        """Sum partial gradients over the tensor axis, and average all over the replica axis.

        Collective over both axes.

        Every element is summed on one process and, in stage 0, sent to the others, so all of them
        have the same bits. Gradients are divided before they are summed, which keeps fp16 sums in
        range.
        """
        self.complete()
        self._reducer.reduce()

    @torch.no_grad()
    def collect(self, parameter: nn.Parameter) -> None:
        """Add a parameter's finished gradient (the sum over all its uses) to its bucket."""
        bucket, span = self._spans[id(parameter)]
        assert id(parameter) not in self._uses, "a parameter with slots is outside autograd"
        if parameter not in self._in_place:
            assert parameter.grad is not None
            span.of(self._reducer.whole(bucket)).view_as(parameter).add_(parameter.grad)
            parameter.grad = None
        self._reducer.finish(bucket, parameter)
