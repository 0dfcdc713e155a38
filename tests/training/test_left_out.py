"""`--iterations-to-skip`: what is skipped, and that nothing else changes."""

from __future__ import annotations

import json

import pytest

from megatron.config.run import evaluations_until
from megatron.parallel.layout import Layout
from megatron.training.batches import batches_from
from megatron.training.step import Updates
from tests.distributed import run_distributed
from tests.training.toy import build_toy, fingerprint, train_toy

_OUT = (0, 2, 3)  # of 6 iterations
_SKIP = ["--iterations-to-skip", *map(str, _OUT), "--eval-iters", "0"]
_RAMP = "--train-samples 24 --rampup-batch-size 2 2 8".split()


def _by_hand(layout: Layout, words: list[str]) -> str:
    """Train with single updates, each at its right place in the order and none started early.

    Return the fingerprint.
    """
    run = build_toy(layout, [*words, "--eval-iters", "0"])
    dataset = run.datasets[0]
    assert dataset is not None
    updates, progress = Updates(run), run.progress
    while not run.finished:
        if progress.iteration not in _OUT:
            updates.make(look_ahead=False)
            continue
        samples = run.batches.global_batch_at(progress.consumed_samples)
        progress.consumed_tokens += samples * run.config.data.seq_length
        progress.iteration += 1
        progress.consumed_samples += samples
        progress.skipped_samples += samples
        run.train_batches = batches_from(run, dataset, consumed=progress.consumed_samples)
    run.optimizer.wait_for_weights()
    return fingerprint(run)


def _both(layout: Layout, cases: list[list[str]]) -> list[tuple[str, str]]:
    return [
        (fingerprint(train_toy(layout, [*words, *_SKIP])[1]), _by_hand(layout, words))
        for words in cases
    ]


def test_the_rest_is_as_it_would_be_without_to_the_bit() -> None:
    cases = [["--bf16"], ["--fp16", "--initial-loss-scale", "64"], _RAMP]  # dropout is on
    for ours, expected in _both(Layout.single(), cases):
        assert ours == expected


@pytest.mark.parametrize(
    ("sizes", "cases"),
    [
        ({}, [[], ["--zero-stage", "2", "--overlap-grad-reduce", "--overlap-param-gather"], _RAMP]),
        ({"pipeline": 2}, [["--pipeline-model-parallel-size", "2"]]),
    ],
    ids=["data", "pipeline"],
)
def test_all_processes_leave_out_the_same(sizes: dict[str, int], cases: list[list[str]]) -> None:
    for rank in run_distributed(2, _both, cases, **sizes):
        for ours, expected in rank:
            assert ours == expected


def test_a_run_may_end_and_continue_anywhere(tmp_path, capsys) -> None:
    words = ["--iterations-to-skip", "1", "2", "4", "5", "--eval-iters", "0", "--save-interval"]
    _, run = train_toy(Layout.single(), [*words, "2", "--save", str(tmp_path / "whole")])
    # The second iteration is skipped with its checkpoint; the end is saved anyway.
    saved = sorted(path.name for path in (tmp_path / "whole").glob("iter_*"))
    assert saved == ["iter_0000004", "iter_0000006"]
    for interval, form in (("1", "native"), ("4", "legacy")):  # before and after the skipped ones
        folder = str(tmp_path / interval)
        leave = [*words, "1", "--save", folder, "--exit-interval", interval, "--ckpt-format", form]
        first = train_toy(Layout.single(), leave)[1]
        assert first.progress.iteration == int(interval)
        ours = train_toy(Layout.single(), [*words, "9", "--load", folder])[1]
        assert fingerprint(ours) == fingerprint(run)
    progress = ours.progress
    assert (progress.iteration, progress.consumed_samples) == (6, 24)
    assert (progress.skipped_samples, progress.scheduled_samples) == (16, 8)
    assert ours.optimizer.steps == 2
    out = capsys.readouterr().out
    line = " skipped iteration 3 of 6 (--iterations-to-skip 2): consumed its 4 samples "
    assert out.count(line + "without an update\n") == 3
    assert " iteration        3/" not in out
    assert " consumed samples:           16 | skipped samples:            8 | elapsed" in out


def test_the_sample_order_continues_and_the_ids_tell_what_was_trained_on(tmp_path) -> None:
    words = ["--log-sample-ids", "--save-interval", "100", "--save"]
    train_toy(Layout.single(), [*words, str(tmp_path / "all")])
    recorder, _ = train_toy(Layout.single(), [*words, str(tmp_path / "some"), *_SKIP])
    every, some = (
        [json.loads(line) for line in (tmp_path / name / "samples.jsonl").read_text().splitlines()]
        for name in ("all", "some")
    )
    assert some == [record for record in every if record["iteration"] - 1 not in _OUT]
    assert recorder.values("skipped-train-samples") == [4, 12, 12]


def test_an_update_to_be_left_out_is_not_begun() -> None:
    run = build_toy(Layout.single(), ["--bf16", "--iterations-to-skip", "1"])
    updates = Updates(run)
    updates.make(look_ahead=True)
    assert updates._next is None
    again = build_toy(Layout.single(), ["--bf16", "--iterations-to-skip", "2"])
    updates = Updates(again)
    updates.make(look_ahead=True)
    assert updates._next is not None


@pytest.mark.parametrize("flag", [[], ["--iterations-to-skip", "2"]])
def test_an_evaluation_that_is_left_out_leaves_its_samples_to_the_next(flag, monkeypatch) -> None:
    skipped: list[int] = []
    monkeypatch.setattr(
        "megatron.training.evaluation.evaluate",
        lambda run, dataset, *, skip: skipped.append(skip),
    )
    run = train_toy(Layout.single(), ["--train-iters", "9", *flag])[1]
    assert skipped == ([0, 4] if flag else [0, 4, 8])
    assert evaluations_until(run.config, 9) == len(skipped)


def test_a_profile_begins_and_ends_with_what_is_done(tmp_path) -> None:
    words = "--profile --profile-step-start 2 --profile-step-end 5 --iterations-to-skip 1 3".split()
    train_toy(Layout.single(), [*words, "--profile-dir", str(tmp_path)])
    (trace,) = tmp_path.glob("*.json")
    assert trace.name == "rank0.4.pt.trace.json"
    names = [str(event.get("name")) for event in json.loads(trace.read_text())["traceEvents"]]
    assert "iteration 3" in names
    assert not {"iteration 2", "iteration 4", "iteration 5"} & set(names)
