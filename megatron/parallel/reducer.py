"""Buckets of gradients on their way from backward to their average: when each is sent, and where
the sum goes.

Buckets are sent in one order on all processes, whatever order their gradients come in: a bucket
waits for those before it. `gradients` says what the stages of ZeRO and waves are.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from megatron.parallel.buckets import Bucket
from megatron.parallel.collectives import (
    Pending,
    mean_of,
    start_all_reduce,
    start_reduce_scatter,
)
from megatron.parallel.layout import Axis


@dataclass
class PendingBucket:
    """A bucket on its way from backward to the reduced gradient.

    Attributes:
        plan: its place in the buffer.
        members: the parameters in it, each with its place in the bucket.
        waves: each adds to the gradients of the bucket, and of others together with them.
        kept: where the reduced gradients go: the whole bucket or this process's shard.
        whole: all gradients of the bucket; with stage 2 None until the first one arrives.
        missing: parameters whose gradient is not complete yet, and how often it will be added to.
    """

    plan: Bucket
    members: list[tuple[nn.Parameter, slice]]
    waves: tuple[Hashable, ...]
    kept: Tensor
    whole: Tensor | None
    missing: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class _Sent:
    """A reduction under way; `whole` and `received` live at least as long."""

    bucket: PendingBucket
    work: Pending
    whole: Tensor
    received: Tensor


class Reducer:
    """Sends buckets of gradients and receives their averages.

    Args:
        axis: the processes to average over.
        zero_stage: 0 to 2; 0 where the axis is of one process.
        overlap: send during the backward of the last micro-batch.
        late: by `id`, parameters to whose `main_grad` something is added after backward.
        uses: by `id`, how often a backward adds to the gradients of parameters that have slots;
            once to the others'. Read again whenever buckets are expected.
        before_send: see `GradientBuffer`.

    Attributes:
        buckets: all of them, in the buffer's order.
        overlap: as given, but False alone.
    """

    def __init__(
        self,
        axis: Axis,
        *,
        zero_stage: int,
        overlap: bool,
        late: frozenset[int],
        uses: Mapping[int, int],
        before_send: Callable[[list[nn.Parameter]], None] | None,
    ) -> None:
        self.buckets: list[PendingBucket] = []
        self.overlap = overlap and axis.size > 1
        self._axis = axis
        self._zero_stage = zero_stage
        self._late = late
        self._uses = uses
        self._before_send = before_send
        self._waves: dict[Hashable, list[PendingBucket]] = {}
        self._collecting = False  # whether finished gradients may be sent
        self._expected: list[PendingBucket] = []  # buckets that this wave or update fills
        self._next = 0  # of them, to be sent
        self._wave_now: Hashable = None
        self._sent: list[_Sent] = []

    def add(self, bucket: PendingBucket) -> None:
        """Take on a bucket, the next of the buffer."""
        self.buckets.append(bucket)
        for wave in bucket.waves:
            self._waves.setdefault(wave, []).append(bucket)

    def expect_all(self) -> None:
        """Every gradient is missing, no bucket is sent."""
        self._expect(self.buckets)

    @contextmanager
    def micro_batch(self, *, is_last: bool, wave: Hashable) -> Iterator[None]:
        """See `GradientBuffer.micro_batch`."""
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
        """Where backward adds the bucket's gradients, [elements of the bucket]."""
        if bucket.whole is None:
            assert self._collecting, "backward outside of micro_batch()"
            assert self._wave_now in bucket.waves, "a gradient came in another one's wave"
            bucket.whole = _new_whole(bucket)
        return bucket.whole

    def finish(self, bucket: PendingBucket, parameter: nn.Parameter) -> None:
        """Note that a parameter's gradient was added to, and send the buckets that are complete."""
        if not self._collecting:
            return
        assert id(parameter) in bucket.missing, "a gradient came twice in one backward"
        if id(parameter) in self._late and self._zero_stage < 2:
            return
        bucket.missing[id(parameter)] -= 1
        if bucket.missing[id(parameter)] == 0:
            del bucket.missing[id(parameter)]
        while self._next < len(self._expected) and not self._expected[self._next].missing:
            self._send(self._expected[self._next])

    def reduce(self) -> None:
        """Send what backward left, and wait for all averages. Collective over the axis."""
        if self._axis.size == 1:
            for bucket in self.buckets:
                self._call_before_send(bucket)
            return
        if self._zero_stage < 2:
            self._send_rest()
        self.receive()
        self.expect_all()

    def receive(self) -> None:
        """Wait for all that is under way."""
        for sent in self._sent:
            sent.work.wait()
            if self._zero_stage == 2:
                sent.bucket.kept.add_(sent.received)
        self._sent.clear()

    def _expect(self, buckets: list[PendingBucket]) -> None:
        """Every gradient of these is missing, none of them is sent."""
        self._expected, self._next = buckets, 0
        for bucket in buckets:
            bucket.missing = {id(p): self._uses.get(id(p), 1) for p, _ in bucket.members}

    def _send_rest(self) -> None:
        """Send what backward left: parameters without a gradient count as zero."""
        for bucket in self._expected[self._next :]:
            self._send(bucket)

    def _send(self, bucket: PendingBucket) -> None:
        self._next += 1
        if bucket.whole is None:
            bucket.whole = _new_whole(bucket)
        self._call_before_send(bucket)
        whole, received = bucket.whole, bucket.kept
        if self._zero_stage == 2:
            self.receive()  # so that one bucket at most is on its way
            bucket.whole, received = None, torch.empty_like(bucket.kept)
        mean = mean_of(whole, self._axis)
        if self._zero_stage > 0:
            work = start_reduce_scatter(whole, self._axis, into=received, op=mean)
        else:
            work = start_all_reduce(whole, self._axis, mean)
        self._sent.append(_Sent(bucket, work, whole, received))
        if self._zero_stage == 2 and not self.overlap:
            self.receive()

    def _call_before_send(self, bucket: PendingBucket) -> None:
        if self._before_send is None:
            return
        assert bucket.whole is not None
        if self._zero_stage == 2:  # for the moment
            for parameter, slot in bucket.members:
                parameter.main_grad = bucket.whole[slot].view_as(parameter)  # type: ignore[attr-defined]
        self._before_send([parameter for parameter, _ in bucket.members])
        if self._zero_stage == 2:
            for parameter, _ in bucket.members:
                if id(parameter) in self._late:
                    parameter.main_grad = bucket.kept  # type: ignore[attr-defined]
                else:
                    del parameter.main_grad  # type: ignore[attr-defined]


def _new_whole(bucket: PendingBucket) -> Tensor:
    return bucket.kept.new_zeros(bucket.plan.span.size)
