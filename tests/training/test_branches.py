"""Branches of a run with a WSD schedule, each decaying from one of its checkpoints."""

import pytest

from megatron.errors import CheckpointError
from megatron.parallel.layout import Layout
from tests.config.command import problems
from tests.distributed import run_sharing_memory
from tests.training.toy import build_toy, fingerprint, train_toy

BASE = "--hidden-dropout 0 --attention-dropout 0 --eval-iters 0 --bf16 --lr-decay-style WSD"
LINEAR = "--lr-wsd-decay-style linear --lr-wsd-decay-iters"


def _train(layout, text):
    recorder, run = train_toy(layout, f"{BASE} {text}".split())
    rates = recorder.values("learning-rate")
    return {"loss": recorder.values("lm loss"), "rate": rates, "state": fingerprint(run)}


def _build(text):
    return build_toy(Layout.single(), f"{BASE} {text}".split())


@pytest.fixture(scope="module")
def trunk(tmp_path_factory):
    """Save a run of 10 planned iterations after 2, 4, 6 and 9, and return its folder."""
    folder = tmp_path_factory.mktemp("trunk")
    save = f"--save {folder} --save-interval 2"
    _train(Layout.single(), f"{LINEAR} 2 --train-iters 10 {save} --exit-interval 6")
    _train(Layout.single(), f"{LINEAR} 2 --train-iters 10 {save} --load {folder} --exit-interval 9")
    return folder


def test_a_branch_is_what_a_schedule_had_planned(trunk, tmp_path):
    """Two branches from one checkpoint and one from another each match a run of that length."""
    for step, decay in ((4, 3), (6, 2), (6, 4)):
        end = step + decay
        warm = f"--lr-warmup-fraction {2 / end}"  # 2 iterations, as in the trunk
        planned = _train(Layout.single(), f"{LINEAR} {decay} --train-iters {end} {warm}")
        words = f"--lr-wsd-branch-from {trunk} --lr-wsd-branch-step {step}"
        folder = tmp_path / f"{step}-{decay}"
        words += f" {LINEAR} {decay} --save {folder} --save-interval 100"
        branch = _train(Layout.single(), words)
        assert branch["rate"] == pytest.approx(planned["rate"][step:])
        assert branch["loss"] == planned["loss"][step:]
        assert branch["state"] == planned["state"]
        assert branch["rate"][-1] < branch["rate"][0]


def test_a_branch_that_is_started_again_continues(trunk, tmp_path, capsys):
    words = f"--lr-wsd-branch-from {trunk} --lr-wsd-branch-step 6 {LINEAR} 4"
    expected = _train(Layout.single(), f"{words} --save {tmp_path}/whole --save-interval 100")
    words += f" --save {tmp_path}/stops --save-interval 1"
    first = _train(Layout.single(), f"{words} --exit-interval 8")
    second = _train(Layout.single(), words)
    assert first["loss"] + second["loss"] == expected["loss"]
    assert second["state"] == expected["state"]
    assert f"loaded checkpoint from {tmp_path}/stops/iter_0000008" in capsys.readouterr().out
    run = _build(words)
    assert run.finished
    assert run.train_iterations == 10


def test_a_branch_in_samples_and_on_two_processes(trunk, tmp_path):
    common = f"--lr-wsd-branch-from {trunk} --lr-wsd-branch-step 6 --save-interval 100"
    samples = f"--lr-wsd-decay-style linear --lr-wsd-decay-samples 12 --save {tmp_path}/samples"
    ours = _train(Layout.single(), f"{common} {samples}")
    iters = _train(Layout.single(), f"{common} {LINEAR} 3 --save {tmp_path}/iters")
    assert ours == iters
    both = run_sharing_memory(
        2, _train, f"{common} {LINEAR} 3 --save {tmp_path}/two --zero-stage 1"
    )
    assert both[0]["loss"] == pytest.approx(iters["loss"], rel=1e-3)


def test_a_constant_rate_is_a_stable_phase(tmp_path):
    constant = f"--lr-decay-style constant --train-iters 20 --save {tmp_path}/0 --save-interval 5"
    _train(Layout.single(), f"{constant} --exit-interval 5")
    words = f"--lr-wsd-branch-from {tmp_path}/0 {LINEAR} 2 --save {tmp_path}/1 --save-interval 9"
    run = _build(words)
    assert (run.progress.iteration, run.train_iterations) == (5, 7)
    assert run.schedules.learning_rate.at(20) == pytest.approx(1e-2)
    assert run.schedules.learning_rate.at(28) == pytest.approx(1e-3)


def test_what_is_no_stable_phase(trunk, tmp_path):
    save = f"--save {tmp_path}/branch --save-interval 5"
    words = f"--lr-wsd-branch-from {trunk} {LINEAR} 2 {save}"
    with pytest.raises(CheckpointError, match="in the final decay, which began at 32"):
        _build(words)  # the newest, after 9 iterations
    with pytest.raises(CheckpointError, match="--ckpt-step 3: "):
        _build(f"{words} --lr-wsd-branch-step 3")
    with pytest.raises(CheckpointError, match="--lr is 0.02 here and 0.01 in the checkpoint"):
        _build(f"{words} --lr-wsd-branch-step 4 --lr 2e-2")
    with pytest.raises(CheckpointError, match="--lr-wsd-branch-from .*: there is no checkpoint"):
        _build(f"--lr-wsd-branch-from {tmp_path} {LINEAR} 2 {save}")
    cosine = f"--lr-decay-style cosine --save {tmp_path}/cosine --save-interval 6"
    _train(Layout.single(), cosine)
    with pytest.raises(CheckpointError, match="has --lr-decay-style cosine, without a stable"):
        _build(f"--lr-wsd-branch-from {tmp_path}/cosine {LINEAR} 2 {save}")
    slow = f"{LINEAR} 1 --train-iters 9 --lr-warmup-fraction 0.8 --save {tmp_path}/slow"
    _train(Layout.single(), f"{slow} --save-interval 6 --exit-interval 6")
    with pytest.raises(CheckpointError, match="in the warm-up, which ends at 29"):
        _build(f"--lr-wsd-branch-from {tmp_path}/slow {LINEAR} 2 {save}")


BRANCH = "--lr-decay-style WSD --lr-wsd-decay-iters 5 --lr-wsd-branch-from trunk"


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (BRANCH, "--lr-wsd-branch-from trunk requires --save: give the branch's own folder"),
        (
            f"{BRANCH} --save trunk/ --save-interval 1",
            "--lr-wsd-branch-from trunk: give --save another folder",
        ),
        (
            f"{BRANCH} --save b --save-interval 1 --load trunk",
            "--lr-wsd-branch-from trunk with --load trunk: a branch that is started again",
        ),
        (
            f"{BRANCH} --save b --save-interval 1 --train-iters 9",
            "--train-iters 9 with --lr-wsd-branch-from: the branch ends with its decay",
        ),
        (
            f"{BRANCH} --save b --save-interval 1 --lr-decay-iters 9",
            "--lr-decay-iters 9 with --lr-wsd-branch-from: the branch ends with its decay",
        ),
        (
            f"{BRANCH} --save b --save-interval 1 --finetune",
            "--finetune cannot be combined with --lr-wsd-branch-from",
        ),
        (
            f"{BRANCH} --save b --save-interval 1 --ckpt-step 4",
            "--ckpt-step 4 cannot be combined with --lr-wsd-branch-from",
        ),
        (
            "--lr-wsd-branch-from trunk --train-iters 9",
            "--lr-wsd-branch-from trunk requires --lr-decay-style WSD",
        ),
        (
            "--lr-wsd-branch-step 4 --train-iters 9",
            "--lr-wsd-branch-step 4 requires --lr-wsd-branch-from",
        ),
    ],
)
def test_refusals(flags, problem):
    found = problems(flags, without=["--train-iters"])
    assert any(line.startswith(problem) for line in found), found
