"""Gradients in contiguous buffers, averaged over the processes that hold the same weights.

One flat buffer for every pair of parameter and gradient dtype, cut into buckets (see `buckets`);
and of parameters that are not gathered as the others are.
Where the gradient dtype equals the parameter's, autograd adds straight into the buffer. Elsewhere
(16-bit parameters, fp32 gradients) a hook adds each finished gradient into it. Or whoever computes
a gradient asks for a `slot` and writes there himself: a product that adds to fp32 memory needs
neither a 16-bit gradient nor a buffer of zeros.

What a process holds of the gradients, for d processes and gradients of g bytes an element, by the
stage of ZeRO (Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter
Models", 2020):

    stage 0  all-reduce: everything, everywhere.                                 g bytes
    stage 1  reduce-scatter: everything until then; its own shard counts after.  g bytes
    stage 2  reduce-scatter in every micro-batch's backward: its own shard.      g / d bytes and
             two buckets at most, one being filled and one on its way

With overlap a bucket is sent as soon as all its gradients are complete, else after backward
(stage 2: when complete, but waited for). All processes send the buckets in the buffer's order,
whatever order their gradients come in.

In a pipeline a micro-batch's backward goes through the parts of the model that a process holds one
by one, with others' in between. Each such piece is a wave, and in stage 2 all gradients of a bucket
come in the same wave (of what several parts share, in the same ones): when that is over, nothing of
it is left but shards.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import groupby, pairwise

import torch
from torch import Tensor, nn

from megatron.parallel.buckets import ALIGNMENT_BYTES, BUCKET_BYTES, Span, plan_buckets
from megatron.parallel.flat import Flat
from megatron.parallel.fp8_products import Fp8Products
from megatron.parallel.layout import Layout
from megatron.parallel.reducer import PendingBucket, Reducer
from megatron.parallel.weights import WeightBuffer


class GradientSlot:
    """Where one use of a parameter adds its gradient, in place of autograd; once a backward."""

    def __init__(self, buffer: GradientBuffer, parameter: nn.Parameter) -> None:
        self._buffer = buffer
        self._parameter = parameter

    @contextmanager
    def open(self) -> Iterator[tuple[Tensor, bool]]:
        """The gradient [rows, columns], and whether to add to what it holds or to write over it.

        After the block it is complete as far as this use goes, and may be sent. Without autograd.
        """
        into, accumulate = self._buffer.begin(self._parameter)
        yield into.flatten(0, -2), accumulate
        self._buffer.end(self._parameter)


class GradientBuffer:
    """Where the gradients of a model live, and how they become averages.

    Below stage 2 each parameter's gradient is `parameter.main_grad`, a view of a flat buffer.

    Args:
        named_parameters: as `model.named_parameters()` gives them, each tensor once; those that
            need no gradient are left out.
        layout: gradients are averaged over its replica axis (context and data).
        accumulate_in_fp32: keep 16-bit parameters' gradients in fp32 (always so with bf16).
        bucket_bytes: smallest piece (but the last) that is reduced on its own.
        zero_stage: 0 to 2, see above. A single replica has nothing to share: always 0.
        overlap: reduce during the backward of the last micro-batch.
        late: parameters to whose `main_grad` something is added between the last backward and
            `reduce` (tied weights of a pipeline's two ends): their buckets and what follows wait
            for that. In stage 2 each has a bucket of its own, so that both ends cut it at the same
            rows, and `main_grad` is what this process keeps of the bucket.
        early: for stage 2, the late ones of which backward brings the gradient first: words that
            the output shares, though they are the model's first parameter.
        waves_of: for stage 2, the waves that each add to a parameter's gradient; None: there is one
            wave in all.
        apart: parameters that have flat buffers of their own, so that their weights can be gathered
            in another format.
        before_send: called once an update with the parameters of every bucket when backward is
            done with them, in one order on all ranks: what must happen to `main_grad` before it is
            averaged (sums over the tensor axis). With stage 2 once a micro-batch.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        layout: Layout,
        *,
        accumulate_in_fp32: bool,
        bucket_bytes: int = BUCKET_BYTES,
        zero_stage: int = 0,
        overlap: bool = False,
        late: Callable[[nn.Parameter], bool] | None = None,
        early: Callable[[nn.Parameter], bool] | None = None,
        waves_of: Callable[[nn.Parameter], tuple[Hashable, ...]] | None = None,
        apart: Callable[[nn.Parameter], bool] | None = None,
        before_send: Callable[[list[nn.Parameter]], None] | None = None,
    ) -> None:
        parameters = [p for _, p in named_parameters if p.requires_grad]
        assert len({id(p) for p in parameters}) == len(parameters), "a parameter came twice"
        self.axis = layout.replica
        self.zero_stage = zero_stage if self.axis.size > 1 else 0
        self._late = frozenset(id(p) for p in parameters if late is not None and late(p))
        self._waves_of = waves_of if self.zero_stage == 2 else None
        self._early = frozenset(id(p) for p in parameters if early is not None and early(p))
        apart = apart if self.axis.size > 1 else None  # alone there is nothing to gather
        self._apart = frozenset(id(p) for p in parameters if apart is not None and apart(p))
        self._storages: list[Tensor] = []
        self._in_place: list[tuple[nn.Parameter, Tensor]] = []
        self._owned: dict[int, tuple[Span, Tensor]] = {}
        self._places: dict[int, tuple[PendingBucket, slice]] = {}
        self._uses: dict[int, int] = {}  # slots handed out
        self._reducer = Reducer(
            self.axis,
            zero_stage=self.zero_stage,
            overlap=overlap,
            late=self._late,
            uses=self._uses,
            before_send=before_send,
        )
        self._unslotted: list[Tensor] | None = None  # what has none; None: not looked up
        self._stale: set[int] = set()  # gradients of an update before: to be written over
        self.flats = self._allocate_all(parameters[::-1], accumulate_in_fp32, bucket_bytes)
        self._reducer.expect_all()

    @property
    def is_sharded(self) -> bool:
        """Each process keeps and updates its own shard only."""
        return self.zero_stage > 0

    @property
    def shares_weights(self) -> bool:
        """Every process holds all weights of its part of the model."""
        return False

    def _allocate_all(
        self, parameters: list[nn.Parameter], in_fp32: bool, bucket_bytes: int
    ) -> list[Flat]:
        """Buffers of parameters in the order in which backward reaches them."""
        arranged = self._arrange(parameters)
        by_kind: dict[tuple[torch.dtype, torch.dtype, bool], list[nn.Parameter]] = {}
        for parameter in arranged:
            dtype = torch.float32 if in_fp32 else parameter.dtype
            kind = (parameter.dtype, dtype, id(parameter) in self._apart)
            by_kind.setdefault(kind, []).append(parameter)
        buckets: list[PendingBucket] = []
        flats = [
            self._allocate(members, dtype, bucket_bytes // dtype.itemsize, buckets)
            for (_, dtype, _), members in by_kind.items()
        ]
        # Sent as backward completes them, whichever flat they are of.
        place = {id(parameter): i for i, parameter in enumerate(arranged)}
        for bucket in sorted(buckets, key=lambda b: max(place[id(p)] for p, _ in b.members)):
            self._reducer.add(bucket)
        return flats

    def _arrange(self, parameters: list[nn.Parameter]) -> list[nn.Parameter]:
        """The parameters in the buffers' order."""
        if self.zero_stage < 2:
            return parameters
        order = list(dict.fromkeys(self._waves_that_bring(p) for p in parameters))

        def place(parameter: nn.Parameter) -> tuple[int, bool]:
            is_early = id(parameter) in self._early
            return order.index(self._waves_that_bring(parameter)), not is_early

        return sorted(parameters, key=place)

    def _ends(self, arranged: list[nn.Parameter], limit: int) -> list[int]:
        """The places in a buffer where a bucket must end."""
        if self.zero_stage < 2:
            return []
        groups = [
            (self._waves_that_bring(p), id(p) if id(p) in self._late else None) for p in arranged
        ]
        ends = {i for i, (a, b) in enumerate(pairwise(groups)) if a != b}
        if self._apart and id(arranged[0]) not in self._apart:
            # The first small vector would hold room for the words' gradients all through backward.
            ends |= {i for i, p in enumerate(arranged[1:]) if p.numel() >= limit}
        return sorted(ends)

    def _waves_that_bring(self, parameter: nn.Parameter) -> tuple[Hashable, ...]:
        return (None,) if self._waves_of is None else self._waves_of(parameter)

    def _allocate(
        self,
        parameters: list[nn.Parameter],
        dtype: torch.dtype,
        limit: int,
        pending_buckets: list[PendingBucket],
    ) -> Flat:
        """A buffer of these; its buckets are added to the list."""
        shards = self.axis.size if self.is_sharded else 1
        rank = self.axis.rank if self.is_sharded else 0
        smallest = 1 if id(parameters[0]) in self._apart else dtype.itemsize  # bytes of an element
        buckets = plan_buckets(
            [p.numel() for p in parameters],
            alignment=ALIGNMENT_BYTES // smallest,
            limit=limit,
            shards=self.axis.size,  # of equal sizes at every stage: sums are in one order then
            ends=self._ends(parameters, limit),
        )
        total = buckets[-1].span.end
        size = total // shards if self.zero_stage == 2 else total
        storage = torch.zeros(size, dtype=dtype, device=parameters[0].device)
        self._storages.append(storage)
        rest = iter(parameters)
        flat = Flat([], buckets, [])
        for plan in buckets:
            shard = plan.span.shard(rank, shards)
            inside = [(next(rest), slot) for slot in plan.slots]
            if self.zero_stage == 2:
                start = plan.span.start // shards
                whole, kept = None, storage[start : start + shard.size]
            else:
                whole = storage[plan.span.start : plan.span.end]
                kept = whole[shard.within(plan.span)]
            places = [(p, slot.within(plan.span)) for p, slot in inside]
            pending = PendingBucket(plan, places, self._waves_that_bring(inside[0][0]), kept, whole)
            for parameter, slot in inside:
                own = slot.intersect(shard) or Span(slot.start, slot.start)
                gradient = kept[own.within(shard)] if own.size else kept[:0]
                self._owned[id(parameter)] = (own.relative_to(slot), gradient)
                self._places[id(parameter)] = (pending, slot.within(plan.span))
                self._attach(parameter, slot.within(plan.span), pending)
            pending_buckets.append(pending)
            flat.members.extend(inside)
            flat.regions.append((shard, kept))
        return flat if self.is_sharded else Flat(flat.members, buckets, [(Span(0, total), storage)])

    def _attach(self, parameter: nn.Parameter, slot: slice, bucket: PendingBucket) -> None:
        is_in_place = False
        if bucket.whole is not None:
            view = bucket.whole[slot].view_as(parameter)
            parameter.main_grad = view  # type: ignore[attr-defined]
            is_in_place = view.dtype == parameter.dtype
            if is_in_place:
                parameter.grad = view
                self._in_place.append((parameter, view))
        elif id(parameter) in self._late:
            parameter.main_grad = bucket.kept  # type: ignore[attr-defined]
        if not is_in_place or self._reducer.overlap:
            # The parameter holds its hook where the garbage collector does not look, and the buffer
            # the parameter: with a way back neither would ever be freed.
            collect = partial(_collect, weakref.ref(self), is_in_place)
            parameter.register_post_accumulate_grad_hook(collect)

    def owned(self, parameter: nn.Parameter) -> Span:
        """Which elements of the flattened parameter this process updates; may be none."""
        return self._owned[id(parameter)][0]

    def part(self, parameter: nn.Parameter) -> Tensor:
        """The weights that are `owned`: the parameter, or where sharded a 1-D view of it."""
        if not self.is_sharded:
            return parameter.detach()
        own = self.owned(parameter)
        return parameter.detach().view(-1)[own.start : own.end]

    def compute_dtype(self, parameter: nn.Parameter) -> torch.dtype:
        """What forward computes in."""
        return parameter.dtype

    def gradient(self, parameter: nn.Parameter) -> Tensor:
        """The gradient of what is `owned`, in the buffer's dtype.

        In the parameter's shape; where the buffer is sharded, 1-D.
        """
        if self.is_sharded:
            return self._owned[id(parameter)][1]
        view: Tensor = parameter.main_grad  # type: ignore[attr-defined]
        return view

    def slot(self, parameter: nn.Parameter) -> GradientSlot | None:
        """A place for one use of the parameter, which must stand outside of autograd from now on.

        With several uses (tied embeddings) each asks for its own: the gradient is complete when
        all of them have added to it. None: no fp32 gradient of it is kept, autograd goes on.
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
        """For slots: the gradient, and whether it holds something of this update already."""
        bucket, place = self._places[id(parameter)]
        is_stale = id(parameter) in self._stale
        self._stale.discard(id(parameter))
        return self._reducer.whole(bucket)[place].view_as(parameter), not is_stale

    def end(self, parameter: nn.Parameter) -> None:
        """For slots: one use has added its part."""
        self._reducer.finish(self._places[id(parameter)][0], parameter)

    def views(self, select: Callable[[nn.Parameter], bool]) -> list[Tensor]:
        """As few 1-D tensors as hold what is owned of all selected parameters' gradients.

        Between two parameters there may be padding, which is zero.
        """
        return [run for flat in self.flats for run in flat.runs(select)]

    def share_weights(
        self,
        overlap_in: Sequence[nn.Module] | None,
        in_8_bits: Mapping[nn.Parameter, Fp8Products],
    ) -> WeightBuffer | None:
        """The other half of a sharded update; None where every process updates everything.

        Moves the parameters' values: call it before `part`.

        Args:
            overlap_in: see `WeightBuffer`.
            in_8_bits: likewise; some or all of those that lie `apart`.
        """
        if not self.is_sharded:
            return None
        return WeightBuffer(self.flats, self.axis, overlap_in=overlap_in, in_8_bits=in_8_bits)

    def zero(self) -> None:
        """Forget all gradients. Call before the first micro-batch of an update."""
        self._forget()
        for parameter, view in self._in_place:  # zero_grad(set_to_none=True) may have cut it
            parameter.grad = view
        self._reducer.expect_all()

    def _forget(self) -> None:
        """Zero what backward adds to. A slot's first use writes over what is there."""
        if self.zero_stage == 2 or not self._uses:
            for storage in self._storages:
                storage.zero_()
            return
        if self._unslotted is None:
            self._unslotted = self._runs_without_slot()
        if self._unslotted:  # one kernel: one for each took 2 ms, of a GPT of 1.7B
            torch._foreach_zero_(self._unslotted)
        self._stale = set(self._uses)

    def _runs_without_slot(self) -> list[Tensor]:
        """What backward adds to, as runs of neighbours."""
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
        """The parameters, by `id`, whose gradient the next backward writes over what is there."""
        return frozenset(self._stale)

    @contextmanager
    def recording(self) -> Iterator[Callable[[], None]]:
        """Around a backward of which a device only records the kernels: no gradient is there yet.

        Gives what to call whenever they have run, where `to_overwrite` was what it is now.
        """
        before, written = self._stale, set[int]()
        self._stale = set(before)
        yield lambda: self._stale.difference_update(written)
        written |= before - self._stale
        self._stale = before

    @torch.no_grad()
    def complete(self) -> None:
        """Zero the gradients that no backward of this update has reached. Before reading any."""
        if self.zero_stage == 2:
            self._reducer.receive()
        for stale in self._stale:
            bucket, place = self._places[stale]
            self._reducer.whole(bucket)[place].zero_()
        self._stale.clear()

    @contextmanager
    def micro_batch(self, *, is_last: bool, wave: Hashable = None) -> Iterator[None]:
        """Around each backward. With overlap the last one sends buckets as they are complete.

        Collective over the replica axis with overlap or stage 2.

        Args:
            is_last: no other one of this update reaches the same parameters.
            wave: the gradients that it brings, as `waves_of` has it.
        """
        wave = wave if self._waves_of is not None else None
        with self._reducer.micro_batch(is_last=is_last, wave=wave):
            yield

    @torch.no_grad()
    def reduce(self) -> None:
        """Average over the replica axis. Collective over it; alone, there is nobody to ask.

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
