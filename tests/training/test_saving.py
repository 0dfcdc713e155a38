"""When a run saves, and what it does when a background save fails."""

import errno
import os
import re
import threading
from types import SimpleNamespace

import pytest

from megatron.checkpoint import background, store
from megatron.checkpoint.find import TRACKER
from megatron.device import CopyStream, Device, QueuedCopy
from megatron.errors import StorageError
from megatron.parallel.layout import Layout
from megatron.training import timers
from megatron.training.callbacks import checkpoints
from megatron.training.callbacks.base import Callback
from megatron.training.callbacks.checkpoints import Checkpoints, advice, best_interval
from megatron.training.callbacks.non_persistent import NonPersistentCheckpoints
from megatron.training.checkpointing import meta_of
from megatron.training.loop import standard_callbacks, train
from megatron.training.timers import SaveClock
from tests.checkpoint.states import save_state
from tests.distributed import run_distributed
from tests.training.toy import build_toy, losses_of, train_toy

EVERY_TWO = ["--save-interval", "2", "--eval-iters", "0"]


def _digests(folder):
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


@pytest.mark.parametrize("flags", [[], ["--zero-stage", "1"], ["--zero-stage", "3"]])
def test_saving_in_the_background_changes_no_bit(tmp_path, flags):
    losses = []
    for name, more in (("now", []), ("later", ["--async-save"])):
        words = [*EVERY_TWO, "--save", str(tmp_path / name), *flags, *more]
        losses.append(run_distributed(2, losses_of, words)[-1])
    assert losses[0] == losses[1]
    for iteration in (2, 4, 6):
        now, later = (_digests(tmp_path / n / f"iter_{iteration:07d}") for n in ("now", "later"))
        assert now == later
        assert len(now) == 2


class _LateCopy(QueuedCopy):
    """Copies that are made when the weights are about to change, as late as they can be."""

    def __init__(self, pairs):
        super().__init__(None)
        self.pairs, self.done = pairs, threading.Event()

    def delay_device(self):
        for target, source in self.pairs:
            target.copy_(source)
        self.done.set()

    def wait(self):
        assert self.done.wait(240), "the weights have changed and nobody waited for their copy"


class _LateStream(CopyStream):
    copied = 0

    def copy_all(self, targets, sources):
        _LateStream.copied += len(targets)
        return _LateCopy(list(zip(targets, sources, strict=True)))


_BIASED_EXPERTS = """--num-experts 4 --moe-router-topk 2 --moe-router-score-function sigmoid
    --moe-router-enable-expert-bias --moe-router-bias-update-rate 0.1"""
_PACKED_STATES = "--use-precision-aware-optimizer --exp-avg-dtype fp8 --exp-avg-sq-dtype fp8"
_EVALUATES_THE_AVERAGE = "--ema-decay 0.5 --eval-interval 1 --eval-iters 1"


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--bf16",
        "--zero-stage 1 --overlap-grad-reduce --overlap-param-gather --bf16",
        "--zero-stage 3 --bf16",
        _BIASED_EXPERTS,
        _EVALUATES_THE_AVERAGE,
        "--lawa-interval 1 --lawa-window 3",
        _PACKED_STATES,
        "--ckpt-format torch_dist --bf16",
        f"{_PACKED_STATES} --zero-stage 3 --bf16",
    ],
)
def test_the_next_passes_run_while_weights_are_copied(tmp_path, flags):
    run_distributed(2, losses_of, [*EVERY_TWO, "--save", str(tmp_path / "now"), *flags.split()])
    later = [*EVERY_TWO, "--save", str(tmp_path / "later"), "--async-save", *flags.split()]
    assert min(run_distributed(2, _count_late_copies, later)) > 0
    for iteration in (2, 4):
        now, later = (
            {
                path.name: path.read_bytes()
                for path in (tmp_path / name / f"iter_{iteration:07d}").iterdir()
                if path.suffix in (".safetensors", ".distcp")
            }
            for name in ("now", "later")
        )
        assert now == later
        assert len(now) >= 2


def _count_late_copies(layout, flags):
    background.CopyStream = _LateStream  # this process ends with the function
    losses_of(layout, flags)
    return _LateStream.copied


def test_a_run_continues_from_a_save_in_the_background(tmp_path):
    words = ["--save", str(tmp_path), *EVERY_TWO, "--async-save"]
    whole = losses_of(Layout.single(), words)
    (tmp_path / TRACKER).write_text("4")
    assert losses_of(Layout.single(), ["--load", str(tmp_path), "--eval-iters", "0"]) == whole[4:]


@pytest.mark.parametrize(
    ("more", "kept"),
    [
        ([], [4, 8, 9]),
        (["--async-save"], [4, 8, 9]),
        (["--async-save", "--ckpt-format", "legacy"], [4, 8, 9]),
        (["--async-save", "--ckpt-format", "torch_dist"], [4, 8, 9]),
        (["--keep-latest", "3"], [4, 6, 8, 9]),
    ],
)
def test_a_run_keeps_what_save_retain_interval_says(tmp_path, more, kept):
    words = ["--save", str(tmp_path), *EVERY_TWO, "--save-retain-interval", "4", *more]
    run_distributed(2, losses_of, [*words, "--train-iters", "9"])
    assert sorted(int(path.name[5:]) for path in tmp_path.glob("iter_*")) == kept
    assert (tmp_path / TRACKER).read_text() == "9"


def _full_disk_at(patch, *iterations):
    """Make writing fail for the checkpoints of these iterations."""
    write, doomed = store.write_shard, {f"iter_{iteration:07d}" for iteration in iterations}

    def fail(path, *rest):
        if path.parent.name.split(".")[0] in doomed:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(path, *rest)

    patch.setattr(store, "write_shard", fail)


def test_after_a_failed_save_the_next_is_waited_for(tmp_path, monkeypatch, capsys):
    _full_disk_at(monkeypatch, 2)
    losses_of(Layout.single(), ["--save", str(tmp_path), *EVERY_TWO, "--async-save"])
    said = capsys.readouterr().out
    assert "WARNING: the checkpoint of iteration 2 could not be written" in said
    assert "No space left on device" in said
    assert sorted(path.name for path in tmp_path.glob("iter_*")) == ["iter_0000004", "iter_0000006"]
    assert (tmp_path / TRACKER).read_text() == "6"


def test_a_second_failed_save_ends_the_run(tmp_path, monkeypatch):
    _full_disk_at(monkeypatch, 4, 6)
    with pytest.raises(StorageError, match="No space left"):
        losses_of(Layout.single(), ["--save", str(tmp_path), *EVERY_TWO, "--async-save"])
    assert (tmp_path / TRACKER).read_text() == "2"


class _Mistake(Callback):
    def after_step(self, run, outcome, leave):
        if run.progress.iteration == 3:
            raise KeyError("a bug")


def test_an_error_does_not_cost_the_save_under_way(tmp_path, monkeypatch):
    words = ["--save", str(tmp_path), *EVERY_TWO, "--async-save"]
    run = build_toy(Layout.single(), words)
    write = store.write_shard

    def slow(*arguments):
        timers.time.sleep(0.3)
        return write(*arguments)

    monkeypatch.setattr(store, "write_shard", slow)
    callbacks, _ = standard_callbacks(run, [])
    with pytest.raises(KeyError, match="a bug"):
        train(run, [*callbacks, _Mistake()])
    assert (tmp_path / TRACKER).read_text() == "2"


def _one_clock_is_due(layout, folder, flags):
    words = ["--save", str(folder), "--save-interval-in-mins", "5", "--eval-iters", "0", *flags]
    run = build_toy(layout, words)
    seen = []

    class Late(Callback):
        def after_step(self, run, outcome, leave):
            seen.append(outcome.save_due)
            if run.progress.iteration == 2 and layout.world.rank == 1:
                run.save_clock._since -= 300.0

    train(run, [*standard_callbacks(run, [])[0], Late()])
    return seen


@pytest.mark.parametrize("flags", [[], ["--zero-stage", "3"], ["--async-save"]])
def test_all_ranks_save_when_one_clock_says_so(tmp_path, flags):
    """Nobody knows in advance: the next update's forward pass has begun, which changes nothing."""
    seen = run_distributed(2, _one_clock_is_due, tmp_path / "minutes", flags)
    assert seen == [[False, False, True, False, False, False]] * 2
    words = ["--save", str(tmp_path / "count"), "--save-interval", "3", "--eval-iters", "0", *flags]
    run_distributed(2, losses_of, words)
    for name in ("iter_0000003", "iter_0000006"):
        by_minutes, by_count = (_digests(tmp_path / way / name) for way in ("minutes", "count"))
        assert by_minutes == by_count
        assert len(by_count) == 2
    assert len(list((tmp_path / "minutes").glob("iter_*"))) == 2


def test_the_clock_starts_again_with_each_save(monkeypatch):
    now = 100.0
    monkeypatch.setattr(timers, "time", SimpleNamespace(monotonic=lambda: now))
    clock = SaveClock(0.5)
    now += 29.0
    assert not clock.is_due
    now += 1.0
    assert clock.is_due
    clock.restart()
    assert not clock.is_due
    assert not SaveClock(None).is_due


def test_the_interval_that_loses_least():
    """Try all; the share of lost time is cost / interval + interval / (2 x time to failure)."""
    cost, failure = 12.0, 3600.0 * 24
    lost = {seconds: cost / seconds + seconds / (2 * failure) for seconds in range(60, 10000, 10)}
    assert best_interval(cost, failure) == pytest.approx(min(lost, key=lost.get), abs=10)


def test_advice_is_one_line_with_its_assumption():
    line = advice(cost=12.0, step=2.0, processes=8, hours=24.0, remaining=720)
    assert "saving every 24.0 minutes (about --save-interval 720) loses the least time" in line
    assert "a failure every 24 h (--mean-hours-between-failures)" in line
    unknown = advice(cost=1.0, step=1.0, processes=8, hours=None, remaining=10**6)
    assert "every 6,250 h (as in Llama 3's" in unknown
    assert "\n" not in line


def test_a_run_that_ends_before_the_first_such_save_gets_no_advice():
    assert advice(cost=12.0, step=2.0, processes=8, hours=24.0, remaining=719) is None


def test_a_checkpoint_names_the_run_that_saved_it(tmp_path):
    """Another start of the run continues its useful time, and finds its other checkpoints."""
    run = build_toy(Layout.single(), [*EVERY_TWO, "--save", str(tmp_path)])
    assert run.record.run
    assert meta_of(run)["run"] == run.record.run
    assert meta_of(build_toy(Layout.single()))["run"] is None


def _short_of_memory(layout, flags):
    """Train while only the first copy of the state finds host memory on rank 1."""
    allocate, count = Device.host_buffer, 0

    def short(device, size):
        nonlocal count
        count += 1
        if count > 1 and layout.world.rank == 1:
            raise MemoryError("no memory")
        return allocate(device, size)

    Device.host_buffer = short
    try:
        return losses_of(layout, flags)
    finally:
        Device.host_buffer = allocate


def test_an_average_for_whose_copy_memory_is_short_is_saved_while_training_waits(tmp_path, capfd):
    words = ["--save", str(tmp_path), *EVERY_TWO, "--async-save", "--ema-decay", "0.5"]
    run_distributed(2, _short_of_memory, words)
    said = capfd.readouterr().out
    assert "more host memory for --async-save than there is: no memory. From now on" in said
    assert said.count("successfully saved checkpoint") == 3
    assert (tmp_path / TRACKER).read_text() == "6"


def test_times_and_sizes_of_saves_are_those_of_this_run(tmp_path, capsys):
    words = ["--save", str(tmp_path), "--save-interval", "2", "--mean-hours-between-failures"]
    words += ["1e-7", "--non-persistent-save-interval", "1", "--non-persistent-ckpt-type", "global"]
    recorder, _ = train_toy(Layout.single(), words)
    times = [
        (iteration, kind, float(text.removeprefix("saved in ").removesuffix(" s")))
        for iteration, kind, text in recorder.events
        if text.startswith("saved in ")
    ]
    fast, durable = "non-persistent checkpoint", "checkpoint"
    assert [(iteration, kind) for iteration, kind, _ in times] == [
        (iteration, (fast, durable)[iteration % 2 == 0]) for iteration in range(1, 7)
    ]
    assert all(0 <= seconds < 60 for *_, seconds in times)
    told = capsys.readouterr().out
    (said,) = re.findall(r"first non-persistent checkpoint: .* \((\S+) GB in (\S+) s\)", told)
    written = next((tmp_path / "non_persistent").glob("iter_*"))
    size = sum(path.stat().st_size for path in written.glob("*.safetensors"))
    assert float(said[0]) == pytest.approx(size / 1e9, rel=0.2)
    assert float(said[1]) < 60
    (waits,) = re.findall(r"training waits (\S+) s for a save", told)
    assert float(waits) < 60


@pytest.mark.parametrize(
    ("interval", "durable", "due"),
    [(2, 6, [2, 8, 10]), (3, 4, [3, 6, 9]), (2, None, [2, 6, 8, 10, 12]), (None, 6, [])],
)
def test_a_durable_checkpoint_replaces_one_that_is_not(interval, durable, due):
    """A durable one is also saved after iteration 4, the end of an epoch."""
    options = SimpleNamespace(non_persistent_save_interval=interval, save_interval=durable)
    run = SimpleNamespace(config=SimpleNamespace(checkpoint=options), save_at={4})
    found = []
    for iteration in range(12):
        run.progress = SimpleNamespace(iteration=iteration)
        if NonPersistentCheckpoints(None).interrupts(run):
            found.append(iteration + 1)
    assert found == due


@pytest.mark.parametrize(
    ("changes", "iteration", "found"),
    [
        ({}, 5, 4),
        ({}, 4, 4),
        ({}, 1, 1),  # it resumes from a checkpoint that is not durable
        ({}, 0, None),
        ({"load": None}, 5, None),
        ({"finetune": True}, 5, None),
        ({"no_load_optim": True}, 5, None),
    ],
)
def test_the_checkpoint_from_which_a_run_continues(tmp_path, changes, iteration, found):
    for saved in (2, 4, 6):
        save_state(tmp_path, saved)
    options = {"load": str(tmp_path), "finetune": False, "no_load_optim": False, **changes}
    run = SimpleNamespace(
        config=SimpleNamespace(checkpoint=SimpleNamespace(**options)),
        progress=SimpleNamespace(iteration=iteration),
        layout=Layout.single(),
    )
    assert checkpoints._continued(run) == (None if found is None else (tmp_path, found))


@pytest.mark.parametrize(
    ("changes", "is_due"),
    [
        ({}, False),
        ({"iteration": 6}, True),
        ({"iteration": 4}, True),  # the end of an epoch
        ({"save_due": True}, True),
        ({"finished": True}, True),
        ({"early_exit": object()}, True),
        ({"iteration": 6, "save": None}, False),
    ],
)
def test_when_a_save_is_due(changes, is_due):
    given = {"iteration": 5, "save_due": False, "finished": False, "early_exit": None}
    given |= {"save": "here", **changes}
    options = SimpleNamespace(save_interval=3, save=given["save"])
    run = SimpleNamespace(
        config=SimpleNamespace(checkpoint=options),
        progress=SimpleNamespace(iteration=given["iteration"]),
        finished=given["finished"],
        save_at={4},
    )
    outcome = SimpleNamespace(save_due=given["save_due"])
    assert checkpoints.is_save_due(run, outcome, given["early_exit"]) == is_due


def test_the_first_save_gives_advice_once(capsys):
    run = SimpleNamespace(
        config=SimpleNamespace(checkpoint=SimpleNamespace(mean_hours_between_failures=24.0)),
        progress=SimpleNamespace(iteration=280),
        layout=Layout.single(),
        train_iterations=1000,
    )
    callback = Checkpoints(None)
    callback._step_seconds = 2.0
    for _ in range(2):
        callback._advise(run, 12.0)
    told = capsys.readouterr().out
    assert told == advice(cost=12.0, step=2.0, processes=1, hours=24.0, remaining=720) + "\n"
