"""Delayed fp8 scaling in a run: its history is part of the training state."""

import pytest
import torch

from megatron.checkpoint.entries import flatten
from megatron.checkpoint.loading import open_checkpoint
from megatron.checkpoint.store import state_of as converted_state
from megatron.parallel.layout import Layout
from megatron.training.batches import batches_from
from megatron.training.callbacks.scalars import Scalars
from megatron.training.checkpointing import save_run, state_of
from megatron.training.evaluation import evaluate_and_report
from megatron.training.loop import standard_callbacks, train
from megatron.training.restoring import rewind_run
from megatron.training.step import Updates
from tests.checkpoint.states import read_whole
from tests.distributed import run_distributed, run_sharing_memory
from tests.training.toy import build_toy, train_toy

RUN = "--bf16 --train-iters 5 --save-interval 100 --eval-interval 2".split()
FP8 = [*RUN, *"--fp8-format hybrid --fp8-recipe delayed".split()]
HISTORY = "--fp8-amax-history-len 3 --fp8-amax-compute-algo max --fp8-interval 2".split()
FLAGS = [*FP8, *HISTORY]
LAYERS = [
    f"layers.{layer}.{name}"
    for layer in (0, 1)
    for name in ("attention.qkv", "attention.output", "mlp.up", "mlp.down")
]


def _tensors(run):
    return {name: entry.tensor.to("cpu", copy=True) for name, entry in flatten(state_of(run))}


@pytest.fixture(scope="module")
def uninterrupted():
    """Return the losses and state of a run."""
    recorder, run = train_toy(Layout.single(), FLAGS)
    return recorder.values("lm loss"), _tensors(run)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return a folder with a checkpoint after two iterations, and the losses until then."""
    folder = tmp_path_factory.mktemp("saved")
    words = [*FLAGS, "--save", str(folder), "--exit-interval", "2"]
    recorder, _ = train_toy(Layout.single(), words)
    return folder, recorder.values("lm loss")


def test_going_back_to_a_checkpoint_without_history_clears_it(tmp_path, capsys):
    words = [*FP8, "--save", str(tmp_path), "--exit-interval", "2", "--ckpt-format", "torch_dist"]
    _, run = train_toy(Layout.single(), words)
    history = run.amax_history.named_tensors()
    assert all(tensor.any() for tensor in history.values())
    rewind_run(run, open_checkpoint(tmp_path))
    assert "fp8 history: the first iteration uses current scales" in capsys.readouterr().out
    assert not any(tensor.any() for tensor in history.values())


def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(saved, uninterrupted):
    folder, first = saved
    recorder, run = train_toy(Layout.single(), [*FLAGS, "--load", str(folder)])
    losses, expected = uninterrupted
    assert first + recorder.values("lm loss") == losses
    assert len(set(losses)) == 5
    found = _tensors(run)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    histories = [name for name in expected if name.endswith(".history")]
    assert sorted(histories) == sorted(f"fp8.{layer}.history" for layer in LAYERS)
    assert all((expected[name] > 0).all() for name in histories)
    reader = open_checkpoint(folder)
    before = read_whole(reader, histories[0])
    assert not torch.equal(before, expected[histories[0]])
    assert set(converted_state(reader, keep_optimizer=True)) == set(expected)
    assert not set(converted_state(reader, keep_optimizer=False)) & set(histories)


def test_scales_are_those_of_the_update_before_whatever_runs_between(uninterrupted):
    # Timers prevent the next update from starting early, evaluation runs the model in between, and
    # recomputed values are found again.
    words = "--timing-log-level 1 --eval-interval 1 --recompute-granularity full".split()
    recorder, run = train_toy(Layout.single(), [*FLAGS, *words, "--recompute-method", "uniform"])
    losses, expected = uninterrupted
    assert recorder.values("lm loss") == losses
    for name, tensor in _tensors(run).items():
        assert torch.equal(tensor, expected[name]), name


def test_the_first_update_is_that_of_current_scaling(uninterrupted):
    recorder, run = train_toy(Layout.single(), [*FP8, "--fp8-recipe", "tensorwise"])
    assert not run.amax_history.layers
    assert not [name for name in _tensors(run) if name.startswith("fp8.")]
    ours, theirs = uninterrupted[0], recorder.values("lm loss")
    assert ours[0] == theirs[0]
    assert ours[2:] != theirs[2:]
    assert ours == pytest.approx(theirs, rel=0.02)


def _load_and_continue(layout, folder, flags):
    """Load a checkpoint, make an update, and save if the flags ask for it.

    Return the history's names here, whether it was loaded whole, the loss, and the newest
    magnitudes after the update.
    """
    run = build_toy(layout, [*FLAGS, *flags, "--load", str(folder)])
    reader = open_checkpoint(folder)
    names = [name for name in _tensors(run) if name.startswith("fp8.")]
    is_same = all(torch.equal(_tensors(run)[name], read_whole(reader, name)) for name in names)
    dataset = run.datasets[0]
    run.train_batches = batches_from(run, dataset, consumed=run.progress.consumed_samples)
    loss = Updates(run).make(look_ahead=False).losses["lm loss"]
    if run.config.checkpoint.save:
        save_run(run)
    histories = [name for name in names if name.endswith(".history")]
    return names, is_same, loss, {name: _tensors(run)[name][:, 0] for name in histories}


def test_a_history_goes_from_layout_to_layout(saved, tmp_path):
    names, is_same, expected, newest = _load_and_continue(Layout.single(), saved[0], [])
    assert is_same
    words = "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2"
    words = [*words.split(), "--save", str(tmp_path)]
    answers = run_distributed(4, _load_and_continue, saved[0], words, tensor=2, pipeline=2)
    assert {name for answer in answers for name in answer[0]} == set(names)
    for names_here, is_same, loss, newest_here in answers:
        assert is_same
        assert len(names_here) == len(names) / 2  # those of a stage
        assert loss == pytest.approx(expected, rel=0.01)
        for name, found in newest_here.items():
            torch.testing.assert_close(found, newest[name], rtol=0.3, atol=0)
            assert found[1] == newest[name][1]  # from the same weights
    for one, other in (answers[:2], answers[2:]):
        torch.testing.assert_close(one[3], other[3], rtol=0, atol=0)
    assert _load_and_continue(Layout.single(), tmp_path, [])[1]


def test_another_length_keeps_the_newest_and_a_16_bit_run_has_none(saved, tmp_path, capsys):
    folder, name = saved[0], f"fp8.{LAYERS[0]}.history"
    held = read_whole(open_checkpoint(folder), name)
    for length in (1, 5):
        words = ["--fp8-amax-history-len", str(length), "--load", str(folder)]
        run = build_toy(Layout.single(), [*FLAGS, *words])
        expected = torch.zeros(3, length)
        expected[:, : min(3, length)] = held[:, :length]
        assert torch.equal(_tensors(run)[name], expected)
    fresh = build_toy(Layout.single(), [*FLAGS, "--load", str(folder), "--finetune"])
    assert not _tensors(fresh)[name].any()
    save_run(build_toy(Layout.single(), [*RUN, "--save", str(tmp_path)]))
    capsys.readouterr()
    run = build_toy(Layout.single(), [*FLAGS, "--load", str(tmp_path), "--exit-interval", "1"])
    assert not _tensors(run)[name].any()
    assert "holds no fp8 history" in capsys.readouterr().out
    train(run, standard_callbacks(run, [])[0])
    assert _tensors(run)[name][:, 0].all()


def _histories(layout, flags, evaluates):
    run = build_toy(layout, [*FP8, *flags.split(), "--ema-decay", "0.9", "--eval-averaged-weights"])
    updates = Updates(run)
    updates.make(look_ahead=False)
    for tensors in run.optimizer.average.tensor_sets().values():
        for tensor in tensors:
            tensor.mul_(10)
    if evaluates:
        evaluate_and_report(run, "validation", Scalars([]), where="here", skip=0)
    updates.make(look_ahead=False)
    return [tensor.tolist() for tensor in run.amax_history.named_tensors().values()]


@pytest.mark.parametrize(("size", "flags"), [(1, ""), (2, "--fp8-param-gather --zero-stage 1")])
def test_evaluation_of_the_average_leaves_the_history_alone(size, flags):
    expected, found = (run_sharing_memory(size, _histories, flags, on) for on in (False, True))
    assert found == expected
