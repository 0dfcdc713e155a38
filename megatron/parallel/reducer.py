"""Buckets of gradients on their way from backward to their average.

Buckets are sent in the plan's order on all processes, whatever order their gradients come in: a
bucket waits for those before it. `gradients` explains the stages of ZeRO and the waves.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from megatron.parallel.collectives import (
    Pending,
    add_over_ranks,
    mean_of,
    start_all_reduce,
    start_reduce_scatter,
)
from megatron.parallel.layout import Axis


@dataclass
class PendingBucket:
    """A bucket on its way from backward to the reduced gradient.

    Attributes:
        axis: the processes to average over.
        members: the parameters in it, each with its place in the bucket.
        tied: those of them, by `id`, whose gradients are added to after backward.
        partial: places of gradients that tensor ranks add up first.
        waves: each adds to the gradients of the bucket, and of others together with them.
        kept: where the reduced gradients go: the whole bucket or this process's shard.
        whole: all gradients of the bucket. In stage 2 it is `None` until the first one arrives.
        elements: number of elements of the whole bucket.
        missing: how often each parameter's gradient will still be added to. A parameter leaves it
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
    """Sends buckets of gradients and receives their averages.

    Args:
        buckets: all of them, in the order of sending.
        tensor: the axis over which partial gradients are added.
        zero_stage: 0 to 2; 0 if nobody else holds the same weights.
        overlap: send during the backward of the last micro-batch.
        uses: by `id`, how often a backward adds to the gradients of parameters that have slots.
            The other parameters' gradients are added to once. It is read again whenever buckets
            are expected.

    Attributes:
        overlap: as given, but always off if nobody else holds the same weights.
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
        """Note that every gradient is missing and no bucket is sent."""
        self._expect(self.buckets)

    @contextmanager
    def micro_batch(self, *, is_last: bool, wave: Hashable) -> Iterator[None]:
        """Send what a backward completes: in the last one of an update, and in all in stage 2.

        Args:
            is_last: no other backward of this update reaches the same parameters.
            wave: what this backward brings.
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
        """Return where backward adds the bucket's gradients, [elements of the bucket]."""
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
        """Send what backward left, and wait for all averages. Collective over the replicas."""
        if self._is_alone:
            for bucket in self.buckets:
                self._add_partial_gradients(bucket)
            return
        if self._zero_stage < 2:
            self._send_rest()
        self.receive()
        self.expect_all()

    def receive(self) -> None:
        """Wait for all that is under way."""
        for sent in self._sent:
            received = sent.work.wait()
            if self._zero_stage == 2:
                sent.bucket.kept.add_(received)
        self._sent.clear()

    def _expect(self, buckets: list[PendingBucket]) -> None:
        """Note that every gradient of these is missing and none of them is sent."""
        self._expected, self._next = buckets, 0
        for bucket in buckets:
            bucket.missing = {id(p): self._uses.get(id(p), 1) for p, _ in bucket.members}

    def _send_rest(self) -> None:
        """Send what backward left. Parameters without a gradient count as zero."""
        for bucket in self._expected[self._next :]:
            self._send(bucket)

    def _send(self, bucket: PendingBucket) -> None:
        self._next += 1
        if bucket.whole is None:
            bucket.whole = bucket.kept.new_zeros(bucket.elements)
        self._add_partial_gradients(bucket)
        whole, into = bucket.whole, bucket.kept
        if self._zero_stage == 2:
            self.receive()  # so that one bucket at most is on its way
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
