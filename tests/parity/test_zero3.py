"""Sharded weights (ZeRO stage 3): the losses of one process, and checkpoints for any layout."""

import pytest
import torch

from megatron.config.parser import parse_config
from megatron.errors import ConfigError
from megatron.parallel.layout import Layout
from megatron.training.checkpointing import save_run
from tests.checkpoint.states import read_all
from tests.distributed import run_distributed, run_sharing_memory
from tests.parity.mixtures import MixtureCase
from tests.training.toy import TOY, build_toy, train_toy

FLAGS = """
    --hidden-dropout 0 --attention-dropout 0 --num-layers 4 --global-batch-size 8
    --eval-interval 3 --eval-iters 1 --log-params-norm --log-num-zeros-in-grad --zero-stage 3
""".split()
NAMES = {
    "tensor": "--tensor-model-parallel-size",
    "pipeline": "--pipeline-model-parallel-size",
    "context": "--context-parallel-size",
}
LLAMA = (
    "--swiglu --disable-bias-linear --untie-embeddings-and-output-weights --normalization RMSNorm"
)
LLAMA += " --position-embedding-type rope"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2"

# Processes, axes, network flags, other flags. More layouts, with fewer numbers each, are in
# `layouts`.
LAYOUTS = [
    (2, "", "", ""),
    (4, "", LLAMA, FULL),
    (4, "tensor=2", LLAMA, "--global-batch-size 8 --micro-batch-size 2"),
    (4, "pipeline=2", "", FULL),
    (4, "pipeline=2", "--swiglu", "--num-layers-per-virtual-pipeline-stage 1"),
    (8, "tensor=2 pipeline=2", "", "--sequence-parallel --pipeline-schedule gpipe"),
]


def _train(layout, flags):
    recorder, _ = train_toy(layout, flags)
    names = ("lm loss", "lm loss validation", "grad-norm", "params-norm")
    return [recorder.values(name) for name in names]


def _words(axes):
    pairs = (axis.split("=") for axis in axes.split())
    return [word for name, size in pairs for word in (NAMES[name], size)]


def _sizes(axes):
    return {name: int(size) for name, size in (axis.split("=") for axis in axes.split())}


@pytest.mark.parametrize(("world", "axes", "network", "more"), LAYOUTS)
def test_losses_and_norms_equal_the_single_process(world, axes, network, more):
    flags = [*FLAGS, *network.split()]
    losses, validation, norms, weights = _train(Layout.single(), flags)
    split = [*flags, *more.split(), *_words(axes)]
    for ours in run_sharing_memory(world, _train, split, **_sizes(axes)):
        assert ours[0] == pytest.approx(losses, rel=1e-5)
        assert ours[1] == pytest.approx(validation, rel=1e-5)
        assert ours[2] == pytest.approx(norms, rel=1e-4)
        assert ours[3] == pytest.approx(weights, rel=1e-5)


FP16 = ["--fp16", "--initial-loss-scale", "1024"]


@pytest.mark.parametrize(
    "precision",
    [["--bf16"], FP16, [*FP16, "--accumulate-allreduce-grads-in-fp32"]],
    ids=["bf16", "fp16", "fp16 sums in fp32"],
)
def test_16_bits_stay_close_to_the_single_process(precision):
    losses, _, norms, _ = _train(Layout.single(), [*FLAGS, *precision])
    for ours in run_distributed(2, _train, [*FLAGS, *precision]):
        assert ours[0] == pytest.approx(losses, rel=1e-3)
        assert ours[2] == pytest.approx(norms, rel=1e-2)


def _count_zeros(layout, flags):
    recorder, _ = train_toy(layout, flags)
    return recorder.values("num-zeros")


def test_zeros_count_once():
    """Positions beyond the sequence have no gradient: 8 rows of 32."""
    flags = [*FLAGS, "--max-position-embeddings", "24", "--tensor-model-parallel-size", "2"]
    for zeros in run_sharing_memory(4, _count_zeros, flags, tensor=2):
        assert zeros == pytest.approx([256] * 6, abs=2)


def _overflow(layout, flags):
    recorder, run = train_toy(layout, flags)
    return recorder.values("loss-scale"), run.optimizer.steps


def test_an_overflow_is_seen_by_all_and_changes_nothing():
    """fp16 gradients overflow at the initial scale; the scale shrinks until they fit."""
    flags = [*FLAGS, "--fp16", "--initial-loss-scale", "67108864", "--hysteresis", "1"]
    flags += ["--check-for-nan-in-loss-and-grad"]
    (scales, steps), *others = run_distributed(2, _overflow, flags)
    assert others == [(scales, steps)]
    assert steps < 6
    assert scales[-1] < scales[0]


def _steps(folder):
    return ["--save", str(folder), "--save-interval", "3", "--exit-interval", "3"]


def _final(layout, flags, folder):
    """Return the losses; the final checkpoint is in `folder`."""
    recorder, run = train_toy(layout, [*flags, "--save", str(folder), "--save-interval", "3"])
    return recorder.values("lm loss")


@pytest.mark.parametrize(
    ("world", "axes", "more"),
    [(2, "", ["--bf16"]), (4, "tensor=2", ["--sequence-parallel", "--swiglu"])],
    ids=["bf16", "tensor"],
)
def test_resuming_in_the_same_layout_is_bit_for_bit(tmp_path, world, axes, more):
    flags, sizes = [*FLAGS, *more, *_words(axes)], _sizes(axes)
    whole = run_sharing_memory(world, _final, flags, tmp_path / "whole", **sizes)
    first = run_sharing_memory(world, _train, [*flags, *_steps(tmp_path / "half")], **sizes)
    load = [*flags, "--load", str(tmp_path / "half")]
    second = run_sharing_memory(world, _final, load, tmp_path / "joined", **sizes)
    for a, b, joined in zip(first, second, whole, strict=True):
        assert len(a[0]) == 3
        assert a[0] + b == joined
    ours, theirs = read_all(tmp_path / "joined"), read_all(tmp_path / "whole")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def _build_and_save(layout, flags, folder):
    save_run(build_toy(layout, [*flags, "--save", str(folder), "--save-interval", "1"]))


@pytest.mark.parametrize("precision", [[], ["--bf16"]], ids=["fp32", "bf16"])
def test_first_weights_and_their_names_are_those_of_one_process(tmp_path, precision):
    flags = [*FLAGS, *precision, "--swiglu"]
    _build_and_save(Layout.single(), flags, tmp_path / "one")
    split = [*flags, "--tensor-model-parallel-size", "2"]
    run_sharing_memory(4, _build_and_save, split, tmp_path / "four", tensor=2)
    ours, theirs = read_all(tmp_path / "four"), read_all(tmp_path / "one")
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert ours[name].dtype == theirs[name].dtype
        assert torch.equal(ours[name], theirs[name]), name


ONE = (1, "", ["--zero-stage", "0"])
FIRST = (4, "tensor=2", ["--zero-stage", "1"])
THIRD = (4, "", [])
PIPED = (4, "pipeline=2", [])


def _run(layout, *flags):
    world, axes, more = layout
    words = [*FLAGS, *more, *_words(axes), *flags]
    return run_sharing_memory(world, _train, words, **_sizes(axes))[-1][0]


@pytest.mark.parametrize(
    ("before", "after"),
    [(THIRD, FIRST), (FIRST, THIRD), (PIPED, ONE), (ONE, PIPED)],
    ids=["3-1", "1-3", "3-one", "one-3"],
)
def test_losses_continue_in_another_layout(tmp_path, before, after):
    uninterrupted = _train(Layout.single(), FLAGS)[0]
    first = _run(before, *_steps(tmp_path))
    second = _run(after, "--load", str(tmp_path))
    assert [*first, *second] == pytest.approx(uninterrupted, rel=1e-5)


def test_a_checkpoint_with_masters_reshards_without_loss(tmp_path):
    """In bf16, stage 3 saves, stage 1 loads and saves, stage 3 loads again: not one bit changes."""
    run_distributed(2, _train, [*FLAGS, "--bf16", *_steps(tmp_path / "a")])
    saved = read_all(tmp_path / "a")
    kinds = {name.rpartition(".")[2] for name in saved if name.startswith("optimizer.")}
    assert kinds == {"exp_avg", "exp_avg_sq", "master"}
    for source, target, stage, world in (("a", "b", "1", 4), ("b", "c", "3", 2)):
        flags = [*FLAGS, "--bf16", "--zero-stage", stage, "--load", str(tmp_path / source)]
        run_sharing_memory(world, _build_and_save, flags, tmp_path / target)
        again = read_all(tmp_path / target)
        assert again.keys() == saved.keys()
        assert all(torch.equal(again[name], saved[name]) for name in saved)


@pytest.mark.parametrize("precision", [[], ["--bf16"]], ids=["fp32", "bf16"])
def test_weights_alone_start_a_fresh_optimizer(tmp_path, precision):
    flags = [*FLAGS, *precision, "--eval-iters", "0"]
    run_distributed(2, _train, [*flags, *_steps(tmp_path), "--no-save-optim"])
    flags += ["--load", str(tmp_path), "--finetune"]
    losses = _train(Layout.single(), flags)[0]
    for ours in run_distributed(2, _train, flags):
        assert ours[0] == pytest.approx(losses, rel=1e-3 if precision else 1e-5)


def _experts_collectives(layout, words):
    """Return the number of collectives of the expert replica group, which only experts use."""
    train_toy(layout, words)
    return layout.journal.started[layout.expert_replica.ranks]


@pytest.mark.parametrize("more", [[], FULL.split()], ids=["kept", "recomputed"])
def test_experts_are_gathered_twice_and_reduced_once_in_a_micro_batch(more):
    """Three of four layers have experts; two passes run, and one more forward is left over."""
    case = MixtureCase(4, expert=2, flags="--zero-stage 3", iterations=2)
    words = [*case.words, *more]
    assert run_sharing_memory(4, _experts_collectives, words, **case.sizes) == [3 * 7] * 4


def _parse(*flags, world_size=2):
    return parse_config([*TOY, "--train-iters", "1", *flags], world_size=world_size)


def test_a_deferred_weight_gradient_finds_no_weight():
    flags = ["--zero-stage", "3", "--pipeline-schedule", "zero-bubble"]
    flags += ["--pipeline-model-parallel-size", "2"]
    with pytest.raises(ConfigError, match="--zero-stage 3 with --pipeline-schedule zero-bubble"):
        _parse(*flags)


def test_what_stage_3_does_anyway_is_reported():
    parsed = _parse("--zero-stage", "3", "--overlap-grad-reduce", "--overlap-param-gather")
    notices = [line for line in parsed.notices if "--zero-stage 3 always" in line]
    assert len(notices) == 2
