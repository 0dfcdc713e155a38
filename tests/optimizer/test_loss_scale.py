"""Transitions of the dynamic loss scale, and which scale the flags select."""

import pytest

from megatron.config.precision import PrecisionConfig
from megatron.optimizer.optimizer import LossScale, loss_scale_of


def _run(scale, events):
    """Return the scale after each event: x for an overflow, . for a clean iteration."""
    values = []
    for event in events:
        scale = scale.update(found_overflow=event == "x")
        values.append(scale.value)
    return values


def _start(**changes):
    fields = {"value": 16.0, "minimum": 1.0, "window": 3, "hysteresis": 2, "overflows_left": 2}
    return LossScale(**{"is_dynamic": True, **fields, **changes})


@pytest.mark.parametrize(
    ("events", "values"),
    [
        ("...", [16, 16, 32]),
        ("......", [16, 16, 32, 32, 32, 64]),
        ("x", [16]),
        ("xxx", [16, 8, 4]),  # once used up, every overflow halves
        ("x.x.x", [16, 16, 8, 8, 4]),  # clean iterations alone do not restore the hysteresis
        ("xx...xx", [16, 8, 8, 8, 16, 16, 8]),  # doubling does
        ("..x...", [16, 16, 16, 16, 16, 32]),  # an overflow restarts the window
        ("xxxxxxxx", [16, 8, 4, 2, 1, 1, 1, 1]),
    ],
)
def test_dynamic_scale(events, values):
    assert _run(_start(), events) == values


def test_can_shrink_until_the_minimum():
    assert _start().can_shrink
    assert not _start(value=1.0).can_shrink
    assert not LossScale(128.0).can_shrink


@pytest.mark.parametrize("split", range(9))
def test_state_continues_where_it_stopped(split):
    events = "x.x.....x"
    whole = _run(_start(), events)
    scale = _start()
    for event in events[:split]:
        scale = scale.update(found_overflow=event == "x")
    resumed = _start().with_state(scale.state())
    assert _run(resumed, events[split:]) == whole[split:]


def test_a_state_from_a_run_without_scale_starts_anew():
    assert _start().with_state(LossScale().state()) == _start()
    assert LossScale(2.0).with_state(_start().state()) == LossScale(2.0)


def test_scale_of_the_flags():
    assert LossScale() == LossScale(1.0, False, 1.0, 1000, 2, overflows_left=2, clean_iterations=0)
    for constant in (PrecisionConfig(), PrecisionConfig(bf16=True)):
        assert loss_scale_of(constant).value == 1.0
        assert not loss_scale_of(constant).is_dynamic
    assert loss_scale_of(PrecisionConfig(fp16=True, loss_scale=128.0)) == LossScale(128.0)
    dynamic = loss_scale_of(PrecisionConfig(fp16=True, min_loss_scale=4.0, hysteresis=3))
    assert dynamic == LossScale(2.0**32, True, 4.0, 1000, 3, overflows_left=3)
