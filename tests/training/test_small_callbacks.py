"""Callbacks one by one, on fake clocks, devices and results."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.device import MemoryStats
from megatron.errors import NumericsError, TransientFaultError
from megatron.parallel.layout import Axis, Layout
from megatron.training import timers
from megatron.training.callbacks import (
    checkpoints,
    logging,
    replica_hashes,
    stragglers,
    suspicious_updates,
)
from megatron.training.callbacks.checkpoints import Checkpoints, advice
from megatron.training.callbacks.logging import LogLine
from megatron.training.callbacks.replica_hashes import ReplicaHashes
from megatron.training.callbacks.scalars import Scalars
from megatron.training.callbacks.stragglers import Stragglers, StragglerWatch
from megatron.training.callbacks.suspicious_updates import SuspiciousUpdates, largest_difference
from megatron.training.loop import standard_callbacks
from megatron.training.rerun import Rerun
from megatron.training.timers import Timers
from tests.training.toy import Recorder, build_toy, toy_outcome, train_toy

_MIB = 2**20


def _names(words: str, layout: Layout | None = None) -> list[str]:
    run = build_toy(Layout.single(), words.split())
    run.layout = layout or run.layout
    return [type(callback).__name__ for callback in standard_callbacks(run, [])[0]]


def test_callbacks_run_in_this_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = ["SkippedUpdates", "Goodput", "Scalars", "GarbageCollection", "LogLine"]
    assert _names("--eval-iters 0") == usual
    (tmp_path / "prompts.txt").write_text("5 17\n")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    words = f"""--profile --rerun-mode report_stats --save {tmp_path} --save-interval 4
        --non-persistent-save-interval 2 --non-persistent-ckpt-type global --log-straggler
        --log-sample-ids --health-check --manual-gc --empty-unused-memory-level 1
        --check-weight-hash-across-dp-replicas-interval 3
        --sample-prompts {tmp_path}/prompts.txt"""
    assert _names(words) == [
        *("Profile", "ResultDifferences", "SkippedUpdates", "Goodput", "Scalars", "ReplicaHashes"),
        *("Stragglers", "SampleIds", "HealthCheck", "GarbageCollection", "EmptyCache"),
        *("LogLine", "ProgressBar", "Checkpoints", "NonPersistentCheckpoints", "Evaluation"),
        "SampleAnswers",
    ]
    others = "--rerun-mode validate_results --profile --profile-ranks 0 --eval-iters 0"
    assert _names(others, Layout.at(0, 2)) == ["Profile", "SuspiciousUpdates", *usual]
    assert _names(others, Layout.at(1, 2)) == ["SuspiciousUpdates", *usual, "ProgressBar"]


def test_memory_is_reported_once_on_the_first_data_rank(capsys: pytest.CaptureFixture[str]) -> None:
    memory = MemoryStats(3 * _MIB, 5 * _MIB // 2, 7 * _MIB, 8 * _MIB + 1000, 9)
    progress = SimpleNamespace(iteration=4)
    callback = LogLine()
    for layout in (Layout.at(1, 2), Layout.at(1, 2, tensor=2)):
        run: Any = SimpleNamespace(
            layout=layout, progress=progress, device=SimpleNamespace(memory=lambda: memory)
        )
        for _ in range(2):
            callback._report_memory(run)
    assert capsys.readouterr().out == (
        "[Rank 1] (after 4 iterations) memory (MB) | allocated: 3.0 | max allocated: 2.5 | "
        "reserved: 7.0 | max reserved: 8.0\n"
    )


def test_a_log_line_has_the_mfu_and_the_times_since_the_last(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    monkeypatch.setattr(logging.time, "perf_counter", lambda: now[0])
    run = build_toy(Layout.single(), "--log-interval 2 --timing-log-level 1".split())
    run.device = SimpleNamespace(peak_flops=1e6, memory=lambda: MemoryStats(0, 0, 0, 0, None))  # type: ignore[assignment]
    resets: list[int] = []
    run.timers = SimpleNamespace(  # type: ignore[assignment]
        over_ranks=lambda: {"optimizer": [1.0, 3.0]},
        reset=lambda: resets.append(run.progress.iteration),
    )
    callback = LogLine()
    callback.on_start(run)
    for run.progress.iteration in range(1, 5):
        callback.before_step(run)
        now[0] += 2.0 * run.progress.iteration
        callback.after_step(run, toy_outcome(flops=3e6), None)
    lines = capsys.readouterr().out.splitlines()
    assert [line.rpartition("MFU")[2] for line in lines if "MFU" in line] == [
        ": 100.0% |",  # 6e6 operations in 6 s
        ": 42.9% |",  # and in 14 s
    ]
    block = ["(min, max) time across ranks (ms):", f"    optimizer {'.' * 30}: (500.00, 1500.00)"]
    assert lines[1:3] == lines[5:7] == block
    assert resets == [2, 4]


def test_a_timer_waits_for_its_device_and_others_at_level_1_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, waited = [10.0], []

    def synchronize() -> None:
        waited.append("device")
        now[0] += 1.0

    monkeypatch.setattr(timers.time, "perf_counter", lambda: now[0])
    device: Any = SimpleNamespace(synchronize=synchronize)
    world: Any = SimpleNamespace(size=2, barrier=lambda: waited.append("ranks"))
    for barrier, level, expected in (
        (True, 0, ["device"] * 2),
        (True, 1, ["device", "ranks"] * 2),
        (False, 1, ["device"] * 2),
        (True, 2, ["device"] * 2),
        (True, 3, []),
    ):
        clock = Timers(2, device, world, barrier=barrier)
        for count in (1, 2):
            waited.clear()
            with clock.measure("part", level=level):
                now[0] += 4.0
            assert waited == expected
            assert clock._seconds == ({} if level == 3 else {"part": 5.0 * count})
        assert clock.resets == 0
        clock.reset()
        assert (clock._seconds, clock.resets) == ({}, 1)


def test_scalars_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    words = """--log-memory-to-tensorboard --log-timers-to-tensorboard --timing-log-level 1
        --log-batch-size-to-tensorboard --log-world-size-to-tensorboard --log-params-norm"""
    run, recorder, now = build_toy(Layout.single(), words.split()), Recorder(), [0.0]
    run.layout = Layout.at(1, 2)
    monkeypatch.setattr(logging.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(type(run), "parameters_norm", lambda _: 3.0)
    monkeypatch.setattr(type(run), "goodput", 0.5)
    run.device = SimpleNamespace(memory=lambda: MemoryStats(1, 2, 3, 4, 5))  # type: ignore[assignment]
    times = SimpleNamespace(resets=0, over_ranks=lambda: {"optimizer": [4.0, 8.0]})
    run.timers = times  # type: ignore[assignment]
    callback = Scalars([recorder])
    for run.progress.iteration, times.resets in ((1, 0), (2, 0), (3, 1)):
        callback.before_step(run)
        now[0] += 2.0
        callback.after_step(run, toy_outcome(layer_losses={"a": 1.0}, flops=4e12), None)
    record = {
        "consumed samples": 0,
        "lm loss": 2.0,
        "a": 1.0,
        "grad-norm": 1.0,
        "learning-rate": 0.0,
        "batch-size": 4,
        "loss-scale": 1.0,
        "world-size": 2,
        "params-norm": 3.0,
        "iteration-time": 2.0,
        "mem-reserved-bytes": 3,
        "mem-allocated-bytes": 1,
        "mem-max-allocated-bytes": 2,
        "mem-allocated-count": 5,
        "tokens-per-second-per-gpu": 16.0,
        "throughput": 1.0,
        "goodput": 0.5,
    }
    assert recorder.records == [
        {"iteration": 1, **record, "optimizer-time": 8.0},
        {"iteration": 2, **record, "optimizer-time": 4.0},  # the mean of two iterations
        {"iteration": 3, **record, "optimizer-time": 8.0},
    ]


def test_scalars_that_flags_turn_off() -> None:
    words = "--no-log-learnig-rate-to-tensorboard --no-log-loss-scale-to-tensorboard"
    run, recorder = build_toy(Layout.single(), words.split()), Recorder()
    callback = Scalars([recorder])
    callback.before_step(run)
    callback.after_step(run, toy_outcome(), None)
    speeds = {"tokens-per-second-per-gpu", "throughput"}
    assert recorder.records[0].keys() == {
        *("iteration", "consumed samples", "lm loss", "grad-norm"), *speeds
    }  # fmt: skip


def test_why_an_update_was_skipped() -> None:
    run, recorder = build_toy(Layout.single()), Recorder()
    callback = Scalars([recorder])
    callback.before_step(run)
    for changes in (
        {"found_nonfinite": True},
        {"found_nonfinite": True, "overflow": True, "loss_scale": 65536.0},
        {"found_spike": True, "spike": "lm loss 9 exceeds 3"},
    ):
        callback.after_step(run, toy_outcome(applied=False, **changes), None)
    callback.after_step(run, toy_outcome(), None)
    assert recorder.events == [
        (0, "skipped update", "the loss or the gradients were not finite"),
        (0, "skipped update", "the loss scale 65536 was too high"),
        (0, "skipped update", "lm loss 9 exceeds 3"),
    ]


def test_the_first_save_in_the_foreground_is_followed_by_advice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(checkpoints, "advice", lambda **facts: asked.append(facts) or "save rarely")
    words = f"--save {tmp_path} --save-interval 2 --train-iters 5 --eval-iters 0"
    train_toy(Layout.single(), [*words.split(), "--mean-hours-between-failures", "7"])
    (facts,) = asked
    assert 0 < facts.pop("cost") < 60
    assert 0 < facts.pop("step") < 60
    assert facts == {"processes": 1, "hours": 7.0, "remaining": 3}
    assert capsys.readouterr().out.count("save rarely\n") == 1


def test_the_clock_of_saves_starts_with_training(tmp_path: Path) -> None:
    words = ["--save", str(tmp_path), "--save-interval-in-mins", "5"]
    run = build_toy(Layout.single(), words)
    run.save_clock._since -= 300.0
    assert run.save_clock.is_due
    Checkpoints(Scalars([])).on_start(run)
    assert not run.save_clock.is_due


def test_the_advice_is_at_least_an_iteration() -> None:
    line = advice(cost=1.0, step=1e6, processes=1, hours=1.0, remaining=1)
    assert line is not None
    assert "(about --save-interval 1) loses the least time" in line


@pytest.mark.parametrize(
    ("count", "end"),
    [(5, "t3; t4. They were"), (6, "t3; t4; and 1 more tensors. They were")],
)
def test_replicas_that_differ_in_many_tensors(
    count: int, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, hashes = build_toy(Layout.single()), ReplicaHashes()
    lines = [f"t{index}" for index in range(count)]
    monkeypatch.setattr(replica_hashes, "_differences", lambda *_: lines)
    copies = [(Axis(2, 0, (0, 1)), {"a": None}), (Axis(2, 0, (0, 1)), {}), (Axis(), {"b": None})]
    monkeypatch.setattr(replica_hashes, "_copies", lambda _: copies)
    with pytest.raises(NumericsError) as refusal:
        hashes.compare(run)
    assert f"replicas differ: t0; t1; t2; {end} equal after iteration 0: " in str(refusal.value)


def test_a_straggler_is_reported_until_it_is_fast_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seconds = [1.0, 1.0, 1.0, 2.0]
    table = torch.tensor([[each, 0.0, 0.0, 2.0] for each in seconds])
    monkeypatch.setattr(stragglers, "all_gather", lambda *_: table)
    columns = ["compute", "loading", "rest", "update"]
    clock: Any = SimpleNamespace(axes={}, columns=columns, read=lambda: [0.0] * 4)
    logs = SimpleNamespace(log_interval=1000, straggler_minmax_count=1)
    run: Any = SimpleNamespace(
        progress=SimpleNamespace(iteration=0, consumed_samples=0),
        layout=Layout.at(3, 4),
        is_log_rank=True,
        config=SimpleNamespace(logging=logs),
    )
    recorder, outcome = Recorder(), toy_outcome()
    callback = Stragglers(clock, Scalars([recorder]))
    callback._watch, callback._hosts = StragglerWatch([0] * 4, {}), ["a", "a", "b", "b"]
    for run.progress.iteration in range(1, 41):
        if run.progress.iteration == 31:
            table[3, 0] = 1.0
        callback.after_step(run, outcome, None)
    told = (
        "slow: rank 3 (on b) in the forward and backward passes: 2000.0 ms per update instead of "
        "1000.0 ms, 2.0 times as long"
    )
    assert recorder.events == [(30, "straggler", told)]
    assert capsys.readouterr().out == (
        f"WARNING: iteration 30: {told}\n"
        " no longer slow: rank 3 in the forward and backward passes\n"
    )


@pytest.mark.parametrize(
    ("ranks", "hosts", "source"),
    [
        ([2], ["b"], "rank 2 (on b)"),
        ([2, 3], ["b"], "one of ranks 2-3 (on b)"),
        ([], ["a", "b"], "the communication between a, b"),
    ],
)
@pytest.mark.parametrize(
    ("iteration", "newest", "saves"),
    [(None, None, 0), (0, None, 0), (1, 1, 0), (5, 4, 1), (5, None, 1)],
)
def test_a_transient_error_names_its_source_and_saves_the_state_before_it(
    ranks: list[int],
    hosts: list[str],
    source: str,
    iteration: int | None,
    newest: int | None,
    saves: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    progress, saved = SimpleNamespace(iteration=6, consumed_samples=24), []
    run: Any = SimpleNamespace(progress=progress, is_log_rank=False)
    monkeypatch.setattr(suspicious_updates.checkpointing, "save_run", saved.append)
    saver: Any = SimpleNamespace(newest=lambda _: newest if newest is None else (Path(), newest))
    rerun = Rerun(
        {"lm loss": 2.0, "grad norm": math.nan},
        {"lm loss": 2.5, "grad norm": 1.0},
        is_same=False,
        ranks=ranks,
        hosts=hosts,
        undo=lambda: setattr(progress, "iteration", iteration),
    )
    recorder = Recorder()
    policy = SuspiciousUpdates(Scalars([recorder]), None if iteration is None else saver)
    with pytest.raises(TransientFaultError) as error:
        policy.after_step(run, toy_outcome(rerun=rerun), None)
    told = (
        "iteration 6: lm loss 2, grad norm nan, but lm loss 2.5, grad norm 1 when it was computed "
        f"again from the same samples and weights: a transient error of {source}"
    )
    clause = f", and the checkpoint of iteration {iteration} is saved" if iteration else ""
    assert str(error.value).startswith(f"{told}. The parameters are unchanged{clause}; test or")
    assert recorder.events == [(6, "rerun", told)]
    assert saved == [run] * saves


@pytest.mark.parametrize(
    ("first", "second", "is_same", "difference"),
    [
        ([2.0, 4.0], [2.0, 4.0], True, 0.0),
        ([2.0, 4.0], [2.5, 4.0], False, 0.2),
        ([2.0, -4.0], [2.5, 4.0], False, 2.0),
        ([0.0, 0.0], [0.0, 1.0], False, 1.0),
        ([2.0, math.nan], [2.5, 4.0], False, math.inf),
    ],
)
def test_the_largest_difference_of_two_computations(
    first: list[float], second: list[float], is_same: bool, difference: float
) -> None:
    values = (dict(zip("ab", numbers, strict=True)) for numbers in (first, second))
    assert largest_difference(Rerun(*values, is_same, [], [])) == difference
