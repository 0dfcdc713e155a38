"""How many non-finite updates a run skips."""

from __future__ import annotations

import pytest

from megatron.errors import NumericsError
from megatron.parallel.layout import Layout
from megatron.training.callbacks.scalars import Scalars
from megatron.training.callbacks.skipped_updates import SkippedUpdates
from tests.training.toy import build_toy, toy_outcome

_SKIPS = "--on-nonfinite skip --max-nonfinite-skips 2".split()


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
