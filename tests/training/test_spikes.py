"""Spikes of the loss and gradient norm: found by medians, then skipped or rewound."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from megatron.checkpoint.entries import flatten
from megatron.checkpoint.shard import memory_of
from megatron.config.training import TrainingConfig
from megatron.errors import NumericsError
from megatron.parallel.layout import Layout
from megatron.training.callbacks.base import Callback
from megatron.training.checkpointing import state_of
from megatron.training.loop import standard_callbacks, train
from megatron.training.run import Run
from megatron.training.spikes import NORM, SpikeWatch
from megatron.training.step import Updates
from tests.distributed import run_distributed
from tests.training import toy
from tests.training.toy import SpoiledRecipe, build_toy, fingerprint, train_toy

_ON = "--spike-window 4 --train-iters 12 --eval-iters 0 --log-interval 1".split()


def _watch(window: int = 4) -> SpikeWatch:
    options = {"micro_batch_size": 1, "global_batch_size": 4, "spike_window": window}
    return SpikeWatch(
        TrainingConfig(**options, spike_loss_threshold=10.0, spike_grad_norm_threshold=2.0)
    )


def test_a_limit_follows_from_the_median_and_the_median_deviation() -> None:
    watch = _watch()
    for loss in (7.0, 1.0, 4.0, 2.0):
        assert watch.limit("lm loss") == math.inf
        watch.add({"lm loss": loss, NORM: 2 * loss})
    assert watch.limit("lm loss") == pytest.approx(3 + 10 * 1.4826 * 1.5)  # off 3 by 4, 2, 1, 1
    assert watch.limit(NORM) == pytest.approx(6 + 2 * 1.4826 * 3)
    watch.add({"lm loss": 3.0})  # the 7 has left the window
    assert watch.limit("lm loss") == pytest.approx(2.5 + 10 * 1.4826 * 1.0)
    assert watch.limit("another") == math.inf
    told = watch.describe({"lm loss": 17.4, NORM: watch.limit(NORM)})
    assert told == "lm loss 17.4 exceeds 17.326 (the median of 4 updates is 2.5)"


def test_values_that_hardly_vary_make_no_spikes_of_others() -> None:
    watch = _watch()
    for _ in range(4):
        watch.add({"lm loss": 2.0, "negative": -1.0})
    assert watch.limit("lm loss") == pytest.approx(2.2)
    assert watch.limit("negative") == pytest.approx(-0.9)


def test_a_window_that_was_saved_continues() -> None:
    watch, other = _watch(), _watch()
    for loss in (5.0, 6.0, 9.0, 7.0, 7.5):
        watch.add({"lm loss": loss})
    other.load_state(watch.state())
    assert other.limit("lm loss") == watch.limit("lm loss") < math.inf
    shorter = _watch(2)
    shorter.add({"lm loss": 1.0, "another": 1.0})
    shorter.load_state(watch.state())
    assert shorter.state() == {"lm loss": [7.0, 7.5]}


@pytest.fixture(name="spoil")
def _spoil(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Spoil samples, which are read in order: iteration i starts at sample 4 (i - 1)."""

    def spoil(samples: Iterable[int]) -> None:
        monkeypatch.setitem(toy.RECIPES, "gpt", SpoiledRecipe(frozenset(samples)))

    return spoil


def _state(run: Run) -> str:
    """Return a digest of weights and moments, whatever the counters are."""
    digest = hashlib.sha256()
    for name, entry in sorted(flatten(state_of(run)), key=lambda pair: (pair[0], pair[1].offset)):
        digest.update(f"{name} {entry.offset}".encode())
        digest.update(memory_of(entry.tensor))
    return digest.hexdigest()


def _skipping(layout: Layout, cases: list[list[str]]) -> list[bool]:
    """Return whether each run equals one that skips the spike, with the same counters."""
    answers = []
    for words in cases:
        recorder, ours = train_toy(layout, [*_ON, *words, "--on-spike", "skip"])
        _, expected = train_toy(layout, [*_ON, *words, "--iterations-to-skip", "7"])
        counts = ours.progress.scheduled_samples, ours.progress.consumed_samples
        assert counts == (44, 48)
        assert ours.optimizer.steps == 11
        assert recorder.values("lm loss")[7] > 2 * recorder.values("lm loss")[6]
        answers.append(_state(ours) == _state(expected))
    return answers


def test_an_update_with_a_spike_changes_nothing(spoil: Any, capsys: Any) -> None:
    spoil({29})
    per_token = ["--eod-mask-loss", "--calculate-per-token-loss", "--micro-batch-size", "2"]
    assert all(_skipping(Layout.single(), [["--bf16"], per_token]))
    out = capsys.readouterr().out
    assert out.count(" skipped the update: iteration 8: lm loss ") == 2
    assert ", grad norm " in out  # the norm is a spike too
    assert "(training sample ids 29)" in out
    assert "(training sample ids 28, 29)" in out  # those of the micro-batch
    assert "number of skipped iterations:   1" in out


@pytest.mark.parametrize(
    ("sizes", "cases"),
    [
        ({}, [[], ["--use-distributed-optimizer", "--overlap-grad-reduce"], ["--zero-stage", "3"]]),
        ({"pipeline": 2}, [["--pipeline-model-parallel-size", "2"]]),
    ],
    ids=["data", "pipeline"],
)
def test_all_processes_skip_the_same(sizes: Any, cases: list[list[str]], spoil: Any) -> None:
    spoil({29})
    for answers in run_distributed(2, _skipping, cases, **sizes):
        assert all(answers)


def test_a_gradient_norm_alone_is_a_spike_too() -> None:
    class Enlarge(Callback):
        def before_step(self, run: Run) -> None:
            weight = next(p for p in run.parameters() if p.dim() == 1)
            factor = 1e4 if run.progress.iteration == 7 else 1.0
            self.hook = weight.register_hook(lambda g: g * factor)

        def after_step(self, run: Run, outcome: Any, leave: Any) -> None:
            self.hook.remove()
            found.append(outcome.spike)

    found: list[str] = []
    run = build_toy(Layout.single(), [*_ON, "--on-spike", "skip"])
    train(run, [Enlarge(), *standard_callbacks(run, [])[0]])
    assert [bool(text) for text in found] == [number == 8 for number in range(1, 13)]
    assert found[7].startswith("grad norm ")
    assert run.optimizer.steps == 11


def _rewinding(layout: Layout, words: list[str], folder: str) -> tuple[bool, int, int]:
    save = ["--save", f"{folder}/ours", "--save-interval", "3"]
    ours = train_toy(layout, [*_ON, *words, *save, "--on-spike", "rewind"])[1]
    # Iterations 7 and 8; the flag counts from 0.
    expected = train_toy(layout, [*_ON, *words, "--iterations-to-skip", "6", "7"])[1]
    progress = ours.progress
    assert progress == expected.progress
    return _state(ours) == _state(expected), progress.skipped_samples, progress.iteration


@pytest.mark.parametrize("words", [["--bf16", "--async-save"], ["--ckpt-format", "torch_dist"]])
def test_a_run_goes_back_to_its_last_checkpoint(
    words: list[str], spoil: Any, tmp_path: Path, capsys: Any
) -> None:
    spoil({29})
    assert _rewinding(Layout.single(), words, str(tmp_path)) == (True, 8, 12)
    out = capsys.readouterr().out
    assert " went back to the weights of iteration 6: iteration 8: lm loss 1" in out
    assert "; the 8 samples read since then are not trained on again\n" in out


def test_going_back_drops_the_amaxes_of_later_weights(spoil: Any, tmp_path: Path) -> None:
    """Weights that are gathered in 8 bits are cast for the next update before the run goes back."""
    spoil({29})
    words = "--bf16 --fp8-format hybrid --fp8-recipe delayed --fp8-param-gather --zero-stage 1"
    found = run_distributed(2, _rewinding, words.split(), str(tmp_path))
    assert found == [(True, 8, 12)] * 2


def test_a_run_goes_back_to_a_newer_checkpoint_that_is_not_durable(
    spoil: Any, tmp_path: Path, capsys: Any
) -> None:
    spoil({29, 44})  # in iterations 8 and 12
    fast = tmp_path / "fast"
    often = ["--non-persistent-save-interval", "1", "--non-persistent-ckpt-type", "local"]
    often += ["--non-persistent-local-ckpt-dir", str(fast)]
    save = ["--save", str(tmp_path / "save"), "--save-interval", "6"]

    class Damage(Callback):
        def after_step(self, run: Run, outcome: Any, leave: Any) -> None:
            if run.progress.iteration == 10:  # the next spike is in 12, and 11 is damaged too
                self.is_due = True
            for shard in fast.glob("iter_*/*.safetensors") if self.is_due else ():
                shard.write_bytes(shard.read_bytes()[:-1] + b"x")

        is_due = False

    run = build_toy(Layout.single(), [*_ON, *save, *often, "--on-spike", "rewind"])
    callbacks = standard_callbacks(run, [])[0]
    train(run, [*callbacks, Damage()])
    out, errors = capsys.readouterr()
    assert " went back to the weights of iteration 7: iteration 8: lm loss" in out
    assert "the non-persistent checkpoint of iteration 11 is not used" in errors
    assert " went back to the weights of iteration 6: iteration 12: lm loss" in out
    # Counted from 0: all since iteration 6.
    skipped = ["--iterations-to-skip", "6", "7", "8", "9", "10", "11"]
    expected = train_toy(Layout.single(), [*_ON, *skipped])[1]
    assert _state(run) == _state(expected)


def _several_rewinds(layout: Layout, folder: str) -> list[tuple[bool, int, int]]:
    cases = ["--zero-stage 3 --bf16", "--zero-stage 1 --bf16 --overlap-grad-reduce "
             "--overlap-param-gather", "--zero-stage 2"]  # fmt: skip
    return [
        _rewinding(layout, words.split(), f"{folder}/{number}")
        for number, words in enumerate(cases)
    ]


def test_sharded_weights_and_moments_come_back(spoil: Any, tmp_path: Path) -> None:
    spoil({29})
    for of_rank in run_distributed(2, _several_rewinds, str(tmp_path)):
        assert of_rank == [(True, 8, 12)] * 3


def test_a_run_that_is_killed_after_it_went_back_does_so_again(spoil: Any, tmp_path: Path) -> None:
    class Kill(Callback):
        def before_step(self, run: Run) -> None:
            if run.progress.iteration == 8:
                raise InterruptedError

    spoil({29, 44})  # the second one in the last iteration
    words = [*_ON, "--on-spike", "rewind", "--save-interval", "3", "--save"]
    whole = train_toy(Layout.single(), [*words, str(tmp_path / "whole")])[1]
    assert whole.progress.skipped_samples == 20
    folder = str(tmp_path / "killed")
    run = build_toy(Layout.single(), [*words, folder])
    with pytest.raises(InterruptedError):
        train(run, [Kill(), *standard_callbacks(run, [])[0]])
    ours = train_toy(Layout.single(), [*words, folder, "--load", folder])[1]
    assert fingerprint(ours) == fingerprint(whole)


def test_without_a_checkpoint_the_update_is_skipped(
    spoil: Any, tmp_path: Path, capsys: Any
) -> None:
    spoil({29})
    save = ["--save", str(tmp_path), "--save-interval", "100"]
    run = train_toy(Layout.single(), [*_ON, *save, "--on-spike", "rewind"])[1]
    assert run.optimizer.steps == 11
    assert "; there is no checkpoint yet to go back to\n" in capsys.readouterr().out


def test_a_loss_that_stays_high_ends_the_run(spoil: Any) -> None:
    spoil(range(28, 100))
    with pytest.raises(NumericsError, match="3 such iterations in a row exceed --max-spikes 2"):
        train_toy(Layout.single(), [*_ON, "--on-spike", "skip", "--max-spikes", "2"])


def test_a_run_that_goes_back_again_and_again_ends(
    spoil: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil({24, 32, 40})
    save = ["--save", str(tmp_path), "--save-interval", "6", "--max-spikes", "2"]
    told = r"gone back to the checkpoint of iteration 6 2 times \(--max-spikes\)"
    with pytest.raises(NumericsError, match=told):
        train_toy(Layout.single(), [*_ON, *save, "--on-spike", "rewind"])
    assert capsys.readouterr().out.count("went back to the weights of iteration 6") == 2


def test_the_next_update_is_not_begun_where_weights_may_come_back(tmp_path: Path) -> None:
    save = ["--save", str(tmp_path), "--save-interval", "3"]
    for action, begins in (("skip", True), ("rewind", False)):
        run = build_toy(Layout.single(), [*_ON, *save, "--on-spike", action])
        updates = Updates(run)
        updates.make(look_ahead=True)
        assert (updates._next is not None) == begins
