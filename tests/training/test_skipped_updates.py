"""How many non-finite updates a run skips."""

from __future__ import annotations

import pytest

from megatron.errors import NumericsError
from megatron.parallel.layout import Layout
from megatron.training.callbacks.scalars import Scalars
from megatron.training.callbacks.skipped_updates import SkippedUpdates
from tests.training.toy import build_toy, toy_outcome

_SKIPS = "--on-nonfinite skip --max-nonfinite-skips 2".split()


@pytest.mark.parametrize(("count", "end"), [(64, "62, 63)"), (65, "62, 63, ...)")])
def test_a_message_names_up_to_64_samples(count: int, end: str) -> None:
    run = build_toy(Layout.single())
    bad = toy_outcome(
        applied=False,
        found_nonfinite=True,
        losses={"lm loss": float("nan")},
        sample_ids=[[i] for i in range(count)],
        ordinary=[True] * count,
    )
    with pytest.raises(NumericsError) as refusal:
        SkippedUpdates(Scalars([]), None).after_step(run, bad, None)
    assert "(training sample ids 0, 1, 2, " in str(refusal.value)
    assert f"{end}. The parameters are unchanged" in str(refusal.value)


@pytest.mark.parametrize(
    ("ordinary", "ids"),
    [
        ([True, False, True, False], "(training sample ids 1, 3)"),
        ([True] * 4, "(training sample ids 0, 1, 2, 3)"),
    ],
)
def test_samples_with_an_abnormal_loss_are_named(ordinary: list[bool], ids: str) -> None:
    run = build_toy(Layout.single(), ["--on-spike", "skip"])
    spike = toy_outcome(applied=False, found_spike=True, spike="too high", ordinary=ordinary)
    policy, limit = SkippedUpdates(Scalars([]), None), run.config.training.max_spikes
    for _ in range(limit):
        policy.after_step(run, spike, None)
    with pytest.raises(NumericsError) as refusal:
        policy.after_step(run, spike, None)
    assert f"too high {ids}" in str(refusal.value)
    assert f"exceed --max-spikes {limit}" in str(refusal.value)


def test_as_many_updates_in_a_row_as_the_flag_says_are_skipped() -> None:
    run, policy = build_toy(Layout.single(), _SKIPS), SkippedUpdates(Scalars([]), None)
    fine = toy_outcome()
    overflow = toy_outcome(applied=False, found_nonfinite=True, overflow=True)
    bad = toy_outcome(applied=False, found_nonfinite=True, losses={"lm loss": float("nan")})
    for outcome in (bad, bad, fine, bad, bad, overflow, bad, bad):
        policy.after_step(run, outcome, None)
    with pytest.raises(NumericsError) as refusal:
        policy.after_step(run, bad, None)
    assert "3 such iterations in a row exceed --max-nonfinite-skips 2" in str(refusal.value)
