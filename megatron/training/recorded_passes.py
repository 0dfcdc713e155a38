"""A micro-batch's forward and backward, recorded once and run again.

A GPU then gets all kernels of each in one call (a CUDA graph). In small models the host needs
longer to start a kernel than the kernel takes.

What is recorded are the passes of the whole model, from a micro-batch in fixed memory to its
losses, and from gradients of the losses to those of the weights. What surrounds them happens as it
does without: the seed (a recording reads it anew), the losses' sum and scale, gradients shared with
other processes, the update. So everything has the same bits as without.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron.device import Recorder
from megatron.parallel.gradients import GradientBuffer
from megatron.parallel.journal import Journal
from megatron.training.recipe import Batch

MOST_RECORDINGS = 8  # batches of ever other shapes are not worth the memory

Losses = Mapping[str, Tensor]
PartForward = Callable[..., Tensor | Losses]
"""`Recipe.forward`: from a part, a micro-batch and others to hidden states or losses."""


class TrainingForward(Protocol):
    """How a micro-batch goes through a part of the model in training."""

    may_run_ahead: bool
    """Whether a pass may begin before the update before it is known to have ended."""

    def begin_update(self) -> None:
        """Prepare for an update's first micro-batch."""

    def __call__(self, part: Any, batch: Batch, /, *others: Any, is_last: bool) -> Tensor | Losses:
        """Return what `Recipe.forward` returns; `is_last` of an update's micro-batches."""
        ...

    def release(self) -> None:
        """Free what only training needs, after the last update."""


class DirectForward:
    """The recipe's forward, as it is."""

    may_run_ahead = True

    def __init__(self, forward: PartForward) -> None:
        """Choose the forward."""
        self._forward = forward

    def begin_update(self) -> None:
        """Do nothing."""

    def __call__(self, part: Any, batch: Batch, /, *others: Any, is_last: bool) -> Tensor | Losses:
        """Return hidden states or losses."""
        return self._forward(part, batch, *others)

    def release(self) -> None:
        """Do nothing."""


_Key = tuple[Any, ...]


@dataclass(frozen=True)
class _Recording:
    """Memory that its kernels read and write, and what runs them.

    Attributes:
        inputs: the micro-batch.
        losses: scalars, by log name.
        gradients: of the losses, in their order.
        forward: from inputs to losses. Keeps what backward reads.
        backward: from `gradients` to those of the weights.
        note_written: tells the gradients' buffer that backward has run.
    """

    inputs: dict[str, Tensor]
    losses: dict[str, Tensor]
    gradients: list[Tensor]
    forward: Callable[[], None]
    backward: Callable[[], None]
    note_written: Callable[[], None]


class RecordedPasses:
    """Recordings of a model's passes, made when they are first needed.

    There is one for each shape of a micro-batch, and for what its backward does with the gradients
    that are there: the first of an update writes over them, the others add. Updates that warm up,
    and the first micro-batch of each kind, run as they would without: libraries then choose their
    kernels, and allocate.

    Args:
        forward: of the whole model: to losses, by log name.
        gradients: what backward writes to.
        recorder: of the device.
        journal: where `forward` and its backward note their communication.
        forget: drops what passes leave for later ones, such as weights in other number formats.
            Each recording makes its own, as it knows of no update.
        warm_up: updates.
    """

    may_run_ahead = True

    def __init__(
        self,
        forward: PartForward,
        gradients: GradientBuffer,
        recorder: Recorder,
        *,
        journal: Journal,
        forget: Callable[[], None],
        warm_up: int,
    ) -> None:
        """Begin without recordings."""
        self._forward = forward
        self._gradients = gradients
        self._recorder = recorder
        self._journal = journal
        self._forget = forget
        self._warm_up = warm_up
        self._met: set[_Key] = set()
        self._recordings: dict[_Key, _Recording] = {}
        self._anchor = torch.empty(0, requires_grad=True)  # so that backward comes to `_Replay`

    def begin_update(self) -> None:
        """Count the updates that warm up."""
        self._warm_up -= 1

    def __call__(self, part: Any, batch: Batch, /, *others: Any, is_last: bool) -> Losses:
        """Return the losses of a micro-batch, to be differentiated before the next one comes."""

        def forward(batch: Batch) -> Losses:
            losses = self._forward(part, batch, *others)
            assert not isinstance(losses, Tensor), "a rule refuses pipeline stages"
            return losses

        inputs = {name: value for name, value in batch.items() if name != "id"}
        shapes = tuple((name, value.shape, value.dtype) for name, value in inputs.items())
        key = (shapes, self._gradients.to_overwrite)
        recording = self._recordings.get(key)
        if recording is None:
            if self._warm_up >= 0 or key not in self._met or self._is_full:
                self._met.add(key)
                return forward(batch)
            recording = self._recordings[key] = self._record(forward, inputs)
        torch._foreach_copy_(list(recording.inputs.values()), list(inputs.values()))
        losses = _Replay.apply(self._anchor, recording)
        return dict(zip(recording.losses, losses, strict=True))

    def release(self) -> None:
        """Free the recordings, after the last update: see `Recorder.release`."""
        self._recordings.clear()
        self._recorder.release()

    @property
    def _is_full(self) -> bool:
        return len(self._recordings) >= MOST_RECORDINGS

    def _record(self, forward: Callable[[Batch], Losses], like: Mapping[str, Tensor]) -> _Recording:
        self._forget()
        try:
            with self._journal.without_marks():
                return self._record_both(forward, like)
        except RuntimeError as error:  # PyTorch's and CUDA's, of any kind
            error.add_note("This pass could not be recorded: drop --cuda-graph-impl.")
            raise
        finally:
            self._forget()  # its memory is the recording's

    def _record_both(
        self, forward: Callable[[Batch], Losses], like: Mapping[str, Tensor]
    ) -> _Recording:
        inputs = {name: value.clone() for name, value in like.items()}
        losses, run_forward = self._recorder.record(lambda: forward(inputs))
        gradients = [torch.zeros_like(loss) for loss in losses.values()]
        with self._gradients.recording() as note_written:
            _, backward = self._recorder.record(
                lambda: torch.autograd.backward(list(losses.values()), gradients)
            )
        values = {name: loss.detach() for name, loss in losses.items()}
        return _Recording(inputs, values, gradients, run_forward, backward, note_written)


class _Replay(torch.autograd.Function):
    """Copies of the losses, which the next micro-batch overwrites."""

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
