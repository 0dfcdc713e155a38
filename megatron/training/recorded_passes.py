"""Recordings of a micro-batch's forward and backward passes, replayed for later micro-batches.

A GPU then receives all kernels of each pass in one call (a CUDA graph). In small models, the host
takes longer to launch a kernel than the kernel takes to run.

The recordings cover the passes of the whole model, from a micro-batch in fixed memory to its
losses, and from gradients of the losses to gradients of the weights. Everything else works as it
does without recordings: the seed (which a replay reads again), the sum and scale of the losses,
gradients shared with other processes, and the update. Every result is therefore bitwise identical
to the result without recordings.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.data.sample import LONGEST_SEGMENT
from megatron.device import GraphRecorder
from megatron.parallel.gradients import GradientBuffer
from megatron.parallel.journal import Journal
from megatron.training.forward import Losses, PartForward
from megatron.training.recipe import Batch

logger = logging.getLogger(__name__)

# Fields of a micro-batch that a recorded pass omits, because they differ each time.
_UNRECORDED = ("id", LONGEST_SEGMENT)
MAX_RECORDINGS = 8  # recording batches whose shapes keep changing is not worth the memory

_Key = tuple[Any, ...]


@dataclass(frozen=True)
class _Recording:
    """A recorded pass: the memory that its kernels read and write, and functions that run them.

    Attributes:
        inputs: The micro-batch.
        losses: The losses, scalars by log name.
        gradients: The gradients of the losses, in the order of `losses`.
        forward: A function that computes the losses from the inputs, and keeps the tensors that the
            backward pass reads.
        backward: A function that computes the weights' gradients from `gradients`.
        note_written: A function that tells the gradient buffer that the backward pass has run.
    """

    inputs: dict[str, Tensor]
    losses: dict[str, Tensor]
    gradients: list[Tensor]
    forward: Callable[[], None]
    backward: Callable[[], None]
    note_written: Callable[[], None]


class RecordedPasses:
    """Recordings of a model's passes, made when they are first needed.

    There is a recording for each micro-batch shape, and for each way in which its backward pass
    treats existing gradients: the first micro-batch of an update overwrites them, and the others
    add to them. At most `MAX_RECORDINGS` are made, and none after a failure that `may_fail` allows.
    All other passes run without recordings. Warm-up updates, and the first micro-batch of each
    kind, run without recordings, so that libraries can choose their kernels and allocate memory.

    Args:
        forward: The forward pass of the whole model, which returns losses by log name.
        gradients: The buffer to which the backward pass writes.
        recorder: The device's recorder.
        journal: The journal in which `forward` and its backward pass note their communication.
        forget: A function that discards whatever a pass leaves for later passes, such as weights in
            other number formats. Each recording creates these again, because a recording is not
            tied to one update.
        warm_up: The number of warm-up updates.
        may_fail: Whether passes that cannot be recorded run without recordings instead of ending
            the run.
    """

    may_run_ahead = True

    def __init__(
        self,
        forward: PartForward,
        gradients: GradientBuffer,
        recorder: GraphRecorder,
        *,
        journal: Journal,
        forget: Callable[[], None],
        warm_up: int,
        may_fail: bool = False,
    ) -> None:
        """Create the passes without recordings."""
        self._forward, self._gradients, self._recorder = forward, gradients, recorder
        self._journal, self._forget, self._warm_up = journal, forget, warm_up
        self._may_fail, self._can_record = may_fail, True
        self._seen_keys: set[_Key] = set()
        self._recordings: dict[_Key, _Recording] = {}
        self._anchor = torch.empty(0, requires_grad=True)  # so that backward reaches `_Replay`

    def begin_update(self) -> None:
        """Count the update toward the warm-up."""
        self._warm_up -= 1

    def __call__(self, part: Any, batch: Batch, /, *arguments: Any, is_last: bool) -> Losses:
        """Return the losses of a micro-batch. Differentiate them before the next micro-batch."""

        def forward(batch: Batch) -> Losses:
            losses = self._forward(part, batch, *arguments)
            assert not isinstance(losses, Tensor), "a rule refuses pipeline stages"
            return losses

        inputs = {name: value for name, value in batch.items() if name not in _UNRECORDED}
        shapes = tuple((name, value.shape, value.dtype) for name, value in inputs.items())
        key = (shapes, self._gradients.to_overwrite)
        recording = self._recordings.get(key)
        if recording is None:
            is_full = len(self._recordings) >= MAX_RECORDINGS
            if self._can_record and self._warm_up < 0 and key in self._seen_keys and not is_full:
                recording = self._record(forward, inputs)
            self._seen_keys.add(key)
            if recording is None:
                return forward(batch)
            self._recordings[key] = recording
        torch._foreach_copy_(list(recording.inputs.values()), list(inputs.values()))
        losses = _Replay.apply(self._anchor, recording)
        return dict(zip(recording.losses, losses, strict=True))

    def release(self) -> None:
        """Free the recordings after the last update; see `GraphRecorder.release`."""
        self._recordings.clear()
        self._recorder.release()

    def _record(
        self, forward: Callable[[Batch], Losses], like: Mapping[str, Tensor]
    ) -> _Recording | None:
        """Return a new recording, or `None` if recording fails and is allowed to fail."""
        self._forget()
        try:
            with self._journal.without_marks():
                inputs = {name: value.clone() for name, value in like.items()}
                losses, run_forward = self._recorder.record(lambda: forward(inputs))
                gradients = [torch.zeros_like(loss) for loss in losses.values()]
                with self._gradients.recording() as note_written:
                    _, backward = self._recorder.record(
                        lambda: torch.autograd.backward(list(losses.values()), gradients)
                    )
            values = {name: loss.detach() for name, loss in losses.items()}
            return _Recording(inputs, values, gradients, run_forward, backward, note_written)
        except RuntimeError as error:  # PyTorch and CUDA raise it for all kinds of failures
            if not self._may_fail:
                error.add_note("This pass could not be recorded: drop --cuda-graph-impl.")
                raise
            logger.warning(
                "--cuda-graph-impl auto: passes are not recorded, because recording failed: %s",
                error,
            )
            self._can_record = False
            return None
        finally:
            self._forget()  # tensors left by the pass are in the recording's memory


class _Replay(torch.autograd.Function):
    """A replay of a recording. It copies the losses, because the next replay overwrites them."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, recording: _Recording) -> tuple[Tensor, ...]:
        ctx.recording = recording
        recording.forward()
        return tuple(loss.clone() for loss in recording.losses.values())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None]:
        recording = ctx.recording
        torch._foreach_copy_(recording.gradients, list(gradients))
        recording.backward()
        recording.note_written()
        return None, None
