"""The training loop end to end at toy size: layouts, resuming, exiting, bad numbers."""

import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron.errors import CheckpointError, ConfigError, NumericsError
from megatron.parallel.layout import Layout
from megatron.processes import ending
from megatron.training.callbacks.base import Callback
from megatron.training.loop import standard_callbacks, train
from megatron.training.step import Updates
from tests.distributed import run_distributed
from tests.training.toy import Recorder, build_toy, fingerprint, train_toy


def _losses(layout, arguments=()):
    recorder, _ = train_toy(layout, arguments)
    return recorder.values("lm loss"), recorder.values("grad-norm")


@pytest.mark.parametrize("size", [2, 4])
def test_data_parallel_processes_give_the_same_losses(size):
    """This includes dropout: masks follow the sample, not the process."""
    losses, norms = _losses(Layout.single())
    assert len(losses) == 6
    for rank_losses, rank_norms in run_distributed(size, _losses):
        assert rank_losses == pytest.approx(losses, rel=1e-5)
        assert rank_norms == pytest.approx(norms, rel=1e-4)


def test_micro_batch_size_changes_nothing_without_dropout():
    no_dropout = ["--hidden-dropout", "0", "--attention-dropout", "0"]
    small, _ = _losses(Layout.single(), no_dropout)
    large, _ = _losses(Layout.single(), [*no_dropout, "--micro-batch-size", "4"])
    assert large == pytest.approx(small, rel=1e-5)


@pytest.mark.parametrize(
    "flags",
    [
        (),
        ("--bf16",),
        ("--fp16", "--initial-loss-scale", "65536", "--loss-scale-window", "2"),
        ("--optimizer", "sgd"),
        ("--train-samples", "40", "--rampup-batch-size", "2", "1", "12"),
        ("--train-samples", "40", "--step-batch-size-schedule", "0:2 128:4 400:3"),
        ("--recompute-granularity", "full", "--recompute-method", "uniform",
         "--recompute-num-layers", "1"),
        ("--dataloader-type", "cyclic"),
    ],
    ids=lambda flags: " ".join(flags[:1]) or "fp32",
)  # fmt: skip
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(tmp_path, flags):
    flags = list(flags)
    whole, whole_run = train_toy(Layout.single(), flags)
    save = [*flags, "--save", str(tmp_path), "--save-interval", "100"]
    first, _ = train_toy(Layout.single(), [*save, "--exit-interval", "2"])
    second, resumed_run = train_toy(Layout.single(), [*save, "--load", str(tmp_path)])
    joined = first.values("lm loss") + second.values("lm loss")
    assert len(first.values("lm loss")) == 2
    assert joined == whole.values("lm loss")
    assert fingerprint(resumed_run) == fingerprint(whole_run)


@pytest.mark.parametrize("kind", ["bert", "t5"])
@pytest.mark.parametrize("flags", [(), ("--bf16",)], ids=["fp32", "bf16"])
def test_so_does_a_resumed_bert_or_t5(tmp_path, kind, flags):
    whole, whole_run = train_toy(Layout.single(), flags, kind)
    save = [*flags, "--save", str(tmp_path), "--save-interval", "100"]
    train_toy(Layout.single(), [*save, "--exit-interval", "2"], kind)
    second, resumed_run = train_toy(Layout.single(), [*save, "--load", str(tmp_path)], kind)
    assert second.values("lm loss") == whole.values("lm loss")[2:]
    assert fingerprint(resumed_run) == fingerprint(whole_run)


def test_a_checkpoint_of_another_kind_is_refused_by_name(tmp_path):
    save = ["--save", str(tmp_path), "--save-interval", "1", "--exit-interval", "1"]
    train_toy(Layout.single(), save, "bert")
    with pytest.raises(CheckpointError, match="architecture is gpt here and bert in the check"):
        build_toy(Layout.single(), ["--load", str(tmp_path)])


def _resume_on_two(layout, arguments):
    recorder, run = train_toy(layout, arguments)
    return recorder.values("lm loss"), run.progress.iteration


def test_resuming_on_another_number_of_processes_keeps_the_losses(tmp_path):
    whole, _ = train_toy(Layout.single())
    save = ["--save", str(tmp_path), "--save-interval", "3"]
    train_toy(Layout.single(), [*save, "--exit-interval", "3"])
    for losses, iteration in run_distributed(2, _resume_on_two, ["--load", str(tmp_path)]):
        assert iteration == 6
        assert losses == pytest.approx(whole.values("lm loss")[3:], rel=1e-5)


class _Poison(Callback):
    """Makes the gradients of one iteration NaN on one rank."""

    def __init__(self, iteration):
        self.iteration = iteration

    def before_step(self, run):
        weight = next(p for p in run.parameters() if p.dim() == 1)  # autograd sees this kind
        poisoned = run.progress.iteration + 1 == self.iteration and run.layout.world.rank == 0
        self.hook = weight.register_hook(lambda g: g * float("nan")) if poisoned else None

    def after_step(self, run, outcome, leave):
        if self.hook is not None:
            self.hook.remove()


def _poisoned(layout, policy):
    run, recorder = build_toy(layout, ["--on-nonfinite", policy]), Recorder()
    callbacks, _ = standard_callbacks(run, [recorder])
    poison = _Poison(3)
    before = {}

    class Watch(Callback):
        def before_step(self, run):
            before[run.progress.iteration] = fingerprint_parameters(run)

    try:
        train(run, [poison, Watch(), *callbacks])
    except NumericsError as error:
        return "stopped", str(error), before[2] == fingerprint_parameters(run)
    assert run.progress.consumed_samples == 24
    rates = recorder.values("learning-rate")
    assert rates[2] == rates[1]  # the schedule waits too
    assert (run.progress.scheduled_samples, run.optimizer.steps) == (20, 5)
    return "finished", len(recorder.values("lm loss")), before[2] == before[3]


def fingerprint_parameters(run):
    return torch.cat([p.detach().flatten() for p in run.parameters()]).cpu().numpy().tobytes()


@pytest.mark.parametrize("size", [1, 2])
def test_nonfinite_gradients_stop_all_ranks_and_name_the_samples(size):
    for what, message, unchanged in run_distributed(size, _poisoned, "stop"):
        assert what == "stopped"
        assert "iteration 3" in message
        assert "sample ids 8, 9, 10, 11" in message
        assert "--on-nonfinite skip" in message
        assert unchanged


@pytest.mark.parametrize("size", [1, 2])
def test_nonfinite_gradients_can_be_skipped(size):
    for what, iterations, unchanged in run_distributed(size, _poisoned, "skip"):
        assert (what, iterations) == ("finished", 6)
        assert unchanged


def _signalled(layout, folder):
    arguments = ["--exit-signal-handler", "--save", folder, "--save-interval", "100"]
    run = build_toy(layout, arguments)
    callbacks, _ = standard_callbacks(run, [])

    class Signal(Callback):
        def before_step(self, run):
            if run.progress.iteration == 1 and run.layout.world.is_last:
                os.kill(os.getpid(), signal.SIGTERM)

    leave = train(run, [Signal(), *callbacks])
    return leave is not None, run.progress.iteration


def test_a_signal_to_one_rank_saves_and_leaves_on_all(tmp_path):
    assert run_distributed(2, _signalled, str(tmp_path)) == [(True, 2), (True, 2)]
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "2"


def _timed(layout, folder):
    """Let each update take 5 s by the first process's clock and 25 s by the second's."""
    seconds = 5 + 20 * layout.world.rank
    passed = [1000.0 * layout.world.rank]  # the clocks also started at different times
    ending.time = SimpleNamespace(monotonic=lambda: passed[0])
    arguments = ["--save", folder, "--save-interval", "100", "--exit-duration-in-mins", "1"]
    run = build_toy(layout, arguments)
    callbacks, _ = standard_callbacks(run, [])

    class Clock(Callback):
        def before_step(self, run):
            passed[0] += seconds

    leave = train(run, [Clock(), *callbacks])
    return leave.reason, leave.is_immediate, run.progress.iteration


def test_a_time_that_is_up_on_one_clock_saves_and_leaves_on_all(tmp_path):
    first, second = run_distributed(2, _timed, str(tmp_path))
    assert first == ("another rank asked to exit", False, 3)
    assert second == ("--exit-duration-in-mins 1 has elapsed", False, 3)
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "3"


def _switched(layout, folder):
    """Let only the second process see the kill switch; another run starts while it exists."""
    switch = Path(folder) / f"stop{layout.world.rank}"
    arguments = ["--save", folder, "--save-interval", "100", "--kill-switch-file", str(switch)]
    results = []
    for _ in range(2):
        run = build_toy(layout, arguments)
        callbacks, _ = standard_callbacks(run, [])

        class Operator(Callback):
            def before_step(self, run):
                if run.progress.iteration == 1 and layout.world.rank == 1:
                    switch.touch()
                    run.exit._next_poll = 0.0

        leave = train(run, [Operator(), *callbacks])
        results.append((leave.reason, leave.code, run.progress.iteration))
    return results


def test_a_file_that_one_rank_sees_ends_this_run_and_the_next(tmp_path):
    first, second = run_distributed(2, _switched, str(tmp_path))
    assert first == [("another rank asked to exit", 0, 2), ("another rank asked to exit", 0, 0)]
    reason = f"--kill-switch-file {tmp_path}/stop1 exists"
    assert second == [(reason, 0, 2), (reason, 0, 0)]
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "2"


def test_a_missing_checkpoint_is_an_error_where_asked(tmp_path):
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        build_toy(Layout.single(), ["--load", str(tmp_path), "--exit-on-missing-checkpoint"])


def test_a_load_that_does_not_exist_is_an_error_unless_the_run_saves_there(tmp_path, capsys):
    """Random weights would be trained silently. A run that resumes itself may start once."""
    missing = str(tmp_path / "typo")
    with pytest.raises(ConfigError, match=rf"^--load {missing} does not exist: correct the path"):
        build_toy(Layout.single(), ["--load", missing])
    save = ["--save", str(tmp_path / "other"), "--save-interval", "9"]
    with pytest.raises(ConfigError, match="does not exist"):
        build_toy(Layout.single(), ["--load", missing, *save])
    save[1] = f"{tmp_path}/../{tmp_path.name}/typo"
    assert build_toy(Layout.single(), ["--load", missing, *save]).progress.iteration == 0
    said = capsys.readouterr().out
    assert f"--load {missing} holds no checkpoint yet: this is the run's first start" in said
    assert "WARNING" not in said


@pytest.mark.parametrize("files", [[], ["notes.txt"], ["iter_0000001.tmp-0123456789abcdef/a"]])
def test_a_load_without_a_checkpoint_is_an_error_unless_the_run_saves_there(tmp_path, files):
    """A wrong path that exists is the same mistake as one that does not."""
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("no checkpoint")
    load = ["--load", str(tmp_path)]
    told = rf"^--load {tmp_path} holds no checkpoint: correct the path, or drop --load to start "
    with pytest.raises(ConfigError, match=told) as refusal:
        build_toy(Layout.single(), load)
    assert refusal.value.exit_code == 9
    with pytest.raises(ConfigError, match=told):
        build_toy(
            Layout.single(), [*load, "--save", str(tmp_path / "other"), "--save-interval", "9"]
        )
    save = ["--save", str(tmp_path), "--save-interval", "9"]
    assert build_toy(Layout.single(), [*load, *save]).progress.iteration == 0


@pytest.mark.parametrize("name", ["missing", "empty"])
def test_there_must_be_weights_to_finetune(tmp_path, name):
    """The folder of --save is no exception: --finetune asks for existing weights."""
    (tmp_path / "empty").mkdir()
    folder = str(tmp_path / name)
    words = ["--finetune", "--load", folder]
    what = "does not exist" if name == "missing" else "holds no checkpoint"
    for save in ([], ["--save", folder, "--save-interval", "9"]):
        with pytest.raises(ConfigError, match=rf"^--finetune: --load {folder} {what}: give the "):
            build_toy(Layout.single(), [*words, *save])


def test_another_network_is_refused_by_name(tmp_path):
    save = ["--save", str(tmp_path), "--save-interval", "1"]
    train_toy(Layout.single(), [*save, "--exit-interval", "1"])
    with pytest.raises(CheckpointError, match=r"--num-layers is 3 here and 2 in the checkpoint"):
        build_toy(Layout.single(), ["--load", str(tmp_path), "--num-layers", "3"])
    with pytest.raises(CheckpointError) as refusal:
        build_toy(Layout.single(), ["--load", str(tmp_path), "--swiglu", "--disable-bias-linear"])
    lines = str(refusal.value).splitlines()
    assert "  --swiglu is on here and off in the checkpoint" in lines
    assert "  --disable-bias-linear is on here and off in the checkpoint" in lines


@pytest.mark.parametrize(("flags", "expected"), [((), 1234), (("--no-load-rng",), 99)])
def test_dropout_continues_from_the_checkpoint_unless_told_otherwise(tmp_path, flags, expected):
    save = ["--save", str(tmp_path), "--save-interval", "1"]
    train_toy(Layout.single(), [*save, "--exit-interval", "1"])
    run = build_toy(Layout.single(), ["--load", str(tmp_path), "--seed", "99", *flags])
    assert run.progress.dropout_seed == expected


def test_a_forward_pass_begun_early_changes_no_bit():
    def ended(look_ahead):
        run = build_toy(Layout.single(), ["--bf16", "--train-iters", "4"])  # dropout is on
        updates = Updates(run)
        outcomes = [updates.make(look_ahead=look_ahead) for _ in range(4)]
        return fingerprint(run), [o.losses for o in outcomes], [o.sample_ids for o in outcomes]

    assert ended(look_ahead=True) == ended(look_ahead=False)


def test_modules_are_told_to_train_only_where_they_do_not(monkeypatch):
    """Calling it for 400 modules takes a millisecond, in which no kernel is started."""
    run = build_toy(Layout.single())
    (part,), told = run.parts, []
    real = part.train
    monkeypatch.setattr(part, "train", lambda mode=True: told.append(mode) or real(mode))
    updates = Updates(run)
    updates.make(look_ahead=True)
    updates.make(look_ahead=False)
    assert not told
    part.eval()
    updates.make(look_ahead=False)
    assert told == [False, True]
    assert all(module.training for module in part.modules())


def test_where_a_forward_pass_is_begun_early():
    def begun(*flags):
        run = build_toy(Layout.single(), flags)
        updates = Updates(run)
        updates.make(look_ahead=True)
        return updates._next is not None

    assert begun("--bf16")
    assert not begun("--fp16")  # its loss scale may change
    assert not begun("--timing-log-level", "1")
    assert not begun("--train-iters", "1")


def test_weight_decay_reaches_the_norms_of_queries_and_keys_alone():
    flags = "--qk-layernorm --train-iters 1 --lr 0.125 --min-lr 0 --lr-decay-style constant"
    flags = [*flags.split(), "--lr-warmup-fraction", "0", "--weight-decay", "0.5"]

    def weights(*more):
        _, run = train_toy(Layout.single(), [*flags, *more])
        return {name: p.detach() for name, p in run.named_parameters()}

    plain, decayed = weights(), weights("--apply-wd-to-qk-layernorm")
    changed = {name for name in plain if not torch.equal(plain[name], decayed[name])}
    # The weights begin at 1, which decays by lr x weight decay.
    assert {name.rsplit(".", 2)[-2] for name in changed} == {"query_norm", "key_norm"}
    weights_changed = [name for name in changed if name.endswith(".weight")]
    assert len(weights_changed) == 4
    for name in weights_changed:
        difference = plain[name] - decayed[name]
        torch.testing.assert_close(difference, torch.full_like(difference, 0.125 * 0.5))
