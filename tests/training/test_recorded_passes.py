"""Which passes are recorded, which run unrecorded, and what a recording must not change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.data.sample import LONGEST_SEGMENT
from megatron.parallel.build import BuildContext
from megatron.parallel.journal import Journal
from megatron.parallel.layers import Linear
from megatron.parallel.layout import Layout
from megatron.parallel.parameter import ZEROS
from megatron.training import recorded_passes
from megatron.training.recorded_passes import RecordedPasses
from tests.parallel.buffers import new_buffer


class _CountingRecorder:
    """Replaces a device's recorder: its recordings have no kernels and count their runs."""

    def __init__(self) -> None:
        self.recorded = 0
        self.replayed = 0
        self.released = False

    def record(self, work: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        self.recorded += 1
        return work(), self._replay

    def _replay(self) -> None:
        self.replayed += 1

    def release(self) -> None:
        self.released = True


class _Passes:
    """A linear layer whose loss is the sum of its outputs, and its passes."""

    def __init__(self, *, warm_up: int, may_fail: bool = False) -> None:
        context = BuildContext(Layout.single())
        self.layer = Linear(4, 3, context, split=None, init=ZEROS)
        nn.init.ones_(self.layer.weight)
        nn.init.zeros_(self.layer.get_parameter("bias"))
        self.gradients = new_buffer(
            self.layer.named_parameters(), Layout.single(), accumulate_in_fp32=True
        )
        context.registry.bind_slots(self.gradients)
        self.recorder = _CountingRecorder()
        self.computed = 0
        self.run = RecordedPasses(
            self._forward,
            self.gradients,
            self.recorder,  # type: ignore[arg-type]
            journal=Journal(),
            forget=lambda: None,
            warm_up=warm_up,
            may_fail=may_fail,
        )

    def _forward(self, part: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        self.computed += 1
        return {"loss": self.layer(batch["x"][:, None]).sum()}

    def update(self, *rows: int) -> list[float]:
        """Make an update with one micro-batch for each number of rows; return the losses."""
        self.gradients.zero()
        self.run.begin_update()
        losses = []
        for count in rows:
            batch = {"id": torch.arange(count), "x": torch.ones(count, 4)}
            loss = self.run(None, batch, is_last=False)["loss"]
            with self.gradients.micro_batch(is_last=False):
                loss.backward()
            losses.append(loss.item())
        self.gradients.reduce()
        return losses


def test_first_and_later_micro_batches_are_recorded_once_each_after_warming_up() -> None:
    passes = _Passes(warm_up=2)
    for _ in range(2):
        passes.update(2, 2, 2)
    assert (passes.computed, passes.recorder.recorded) == (6, 0)
    passes.update(2, 2, 2)
    # One forward and one backward for the first micro-batch, and for later ones.
    assert (passes.computed, passes.recorder.recorded, passes.recorder.replayed) == (8, 4, 6)
    passes.update(2, 2)
    assert (passes.computed, passes.recorder.recorded, passes.recorder.replayed) == (8, 4, 10)


@pytest.mark.parametrize("which", [1, 2], ids=["forward", "backward"])
def test_passes_that_cannot_be_recorded_run_as_they_are(
    which: int, caplog: pytest.LogCaptureFixture
) -> None:
    passes = _Passes(warm_up=1, may_fail=True)
    expected = [passes.update(2, 2) for _ in range(3)][-1]
    passes, calls = _Passes(warm_up=1, may_fail=True), 0
    record = passes.recorder.record

    def fails(work: Callable[[], Any]) -> Any:
        nonlocal calls
        calls += 1
        if calls == which:
            raise RuntimeError("operation not permitted")
        return record(work)

    passes.recorder.record = fails  # type: ignore[method-assign]
    for _ in range(3):
        assert passes.update(2, 2) == expected
    assert calls == which
    assert passes.recorder.replayed == 0
    assert "--cuda-graph-impl auto: passes are not recorded" in caplog.text
    assert torch.equal(passes.layer.weight.main_grad, torch.full((3, 4), 4.0))


def test_a_micro_batch_of_a_new_kind_runs_once_as_it_is() -> None:
    passes = _Passes(warm_up=1)
    passes.update(2)
    passes.update(2, 2)  # nothing has been added to a gradient yet
    assert (passes.computed, passes.recorder.recorded) == (3, 2)
    assert passes.update(3) == [36.0]  # another shape: the other one's memory is not read
    assert (passes.computed, passes.recorder.recorded) == (4, 2)
    passes.update(3)
    assert (passes.computed, passes.recorder.recorded) == (5, 4)


def test_not_every_shape_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded_passes, "MAX_RECORDINGS", 2)
    passes = _Passes(warm_up=1)
    for _ in range(3):
        for rows in (1, 2, 3):
            passes.update(rows)
    assert passes.recorder.recorded == 4
    assert passes.update(3) == [36.0]


def test_each_micro_batch_goes_where_its_recording_reads_it() -> None:
    passes = _Passes(warm_up=1)
    passes.update(2)
    passes.update(2)
    (recording,) = passes.run._recordings.values()
    assert recording.inputs.keys() == {"x"}  # sample ids stay on the host
    passes.gradients.zero()
    passes.run(None, {"id": torch.arange(2), "x": torch.full((2, 4), 7.0)}, is_last=True)
    assert torch.equal(recording.inputs["x"], torch.full((2, 4), 7.0))


def test_a_run_that_cannot_be_recorded_is_told_what_to_drop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(work: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    passes = _Passes(warm_up=1)
    passes.update(2)
    monkeypatch.setattr(passes.recorder, "record", fail)
    with pytest.raises(RuntimeError, match="not permitted") as caught:
        passes.update(2)
    assert caught.value.__notes__ == ["This pass could not be recorded: drop --cuda-graph-impl."]


def test_recording_a_backward_leaves_gradients_to_be_written_over() -> None:
    passes = _Passes(warm_up=1)
    passes.update(2)
    passes.gradients.zero()
    with passes.gradients.recording() as note_written:
        passes._forward(passes.layer, {"x": torch.ones(1, 4)})["loss"].backward()
        assert not passes.gradients.to_overwrite
    assert passes.gradients.to_overwrite == {id(passes.layer.weight)}
    note_written()
    assert not passes.gradients.to_overwrite


def test_released_recordings_do_not_run_again() -> None:
    passes = _Passes(warm_up=0)
    for _ in range(3):
        passes.update(2)
    replayed = passes.recorder.replayed
    assert replayed
    passes.run.release()
    assert passes.recorder.released
    passes.update(2)
    assert passes.recorder.recorded == 4, "recorded anew, forward and backward"


def test_the_longest_document_makes_no_further_recording() -> None:
    passes = _Passes(warm_up=0)
    for longest in (1, 2, 3, 4):
        passes.gradients.zero()
        passes.run.begin_update()
        batch = {"x": torch.ones(2, 4), LONGEST_SEGMENT: torch.empty(longest, 0)}
        with passes.gradients.micro_batch(is_last=False):
            passes.run(None, batch, is_last=False)["loss"].backward()
        passes.gradients.reduce()
    assert passes.recorder.recorded == 2  # a forward and a backward pass
    assert passes.recorder.replayed > 2
