"""How many non-finite updates a run skips."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.errors import NumericsError
from megatron.parallel.layout import Layout
from megatron.training.callbacks import skipped_updates
from megatron.training.callbacks.scalars import Scalars
from megatron.training.callbacks.skipped_updates import SkippedUpdates
from megatron.training.run import Run
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


def _rewinding(tmp_path: Path, policy: SkippedUpdates) -> tuple[Run, Callable[[], None]]:
    flags = f"--on-spike rewind --max-spikes 2 --save {tmp_path} --save-interval 2"
    run = build_toy(Layout.single(), flags.split())
    spike = toy_outcome(applied=False, found_spike=True, spike="too high", ordinary=[True] * 4)

    def strike() -> None:
        policy.after_step(run, spike, None)
        policy.after_step(run, toy_outcome(), None)

    return run, strike


def test_a_run_goes_back_as_often_as_the_flag_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    newest: list[Any] = [None]
    monkeypatch.setattr(SkippedUpdates, "_newest", lambda *_: newest[0])
    monkeypatch.setattr(skipped_updates, "rewind_run", lambda run, reader: 10 * reader.iteration)
    events: list[tuple[str, str]] = []
    scalars: Any = SimpleNamespace(event=lambda run, *words: events.append(words))
    _, strike = _rewinding(tmp_path, SkippedUpdates(scalars, None))
    capsys.readouterr()
    strike()
    told = capsys.readouterr().out
    assert told.startswith(" skipped the update: iteration 0: too high (training sample ids ")
    assert told.endswith("); there is no checkpoint yet to go back to\n")
    for iteration in (4, 6, 4, 6):
        newest[0] = SimpleNamespace(iteration=iteration)
        strike()
        told = capsys.readouterr().out
        assert told.startswith(f" went back to the weights of iteration {iteration}: iteration 0: ")
        assert told.endswith(
            f"; the {10 * iteration} samples read since then are not trained on again\n"
        )
    assert events == [("rewind", f"to the weights of iteration {i}") for i in (4, 6, 4, 6)]
    with pytest.raises(NumericsError) as refusal:
        strike()
    assert "has gone back to the checkpoint of iteration 6 2 times (--max-spikes): resume" in str(
        refusal.value
    )


@pytest.mark.parametrize(
    ("durable", "fast", "found"),
    [
        (None, None, None),
        (None, 3, ("fast", -1)),
        ((Path("here"), 4), None, ("durable", Path("here"), 4)),
        ((Path("here"), 4), 5, ("fast", 4)),
    ],
)
def test_a_run_goes_back_to_its_newest_checkpoint(
    durable: tuple[Path, int] | None,
    fast: int | None,
    found: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def open_root(root: Path, *, step: int, layout: Layout, allow_foreign: bool) -> Any:
        assert (layout, allow_foreign) == (run.layout, False)
        return "durable", root, step

    monkeypatch.setattr(skipped_updates, "open_root", open_root)
    checkpoints: Any = SimpleNamespace(newest=lambda _: durable)
    non_persistent: Any = SimpleNamespace(
        open_newest=lambda after: None if fast is None else ("fast", after)
    )
    policy = SkippedUpdates(Scalars([]), checkpoints, non_persistent)
    run, _ = _rewinding(tmp_path, policy)
    assert policy._newest(run) == found
    if fast is None:
        assert SkippedUpdates(Scalars([]), checkpoints)._newest(run) == found
    assert SkippedUpdates(Scalars([]), None)._newest(run) is None
