"""`--DDP-impl torch`: PyTorch averages the gradients, with the losses of one process."""

import pytest
from torch.nn.parallel import DistributedDataParallel

from megatron.config.parser import parse_config
from megatron.errors import ConfigError
from megatron.parallel.layout import Layout
from megatron.training.passes import Passes
from tests.distributed import run_distributed
from tests.training.toy import TOY, build_toy, train_toy

FLAGS = """
    --hidden-dropout 0 --attention-dropout 0 --global-batch-size 8 --eval-iters 0 --DDP-impl torch
""".split()
TENSOR = ["--tensor-model-parallel-size", "2", "--sequence-parallel"]
CONTEXT = ["--context-parallel-size", "2"]


def _train(layout, flags):
    reductions = []
    original = DistributedDataParallel.no_sync
    DistributedDataParallel.no_sync = lambda self: reductions.append(1) or original(self)
    recorder, _ = train_toy(layout, flags)
    return recorder.values("lm loss"), recorder.values("grad-norm"), len(reductions)


@pytest.mark.parametrize(
    ("world", "sizes", "more"),
    [(2, {}, []), (4, {"tensor": 2}, TENSOR), (4, {"context": 2}, CONTEXT)],
    ids=["data", "tensor", "context"],
)
def test_losses_and_norms_equal_the_single_process(world, sizes, more):
    losses, norms, _ = _train(Layout.single(), FLAGS)
    micro_batches = 8 // (world // 2 if sizes else world)
    for ours in run_distributed(world, _train, [*FLAGS, *more], **sizes):
        assert ours[0] == pytest.approx(losses, rel=1e-5)
        assert ours[1] == pytest.approx(norms, rel=1e-4)
        assert ours[2] == 6 * (micro_batches - 1)  # one reduction per update


def _waits_seen(layout):
    """Return what the watchdog could see of an update that rank 1 joins late."""
    run, seen = build_toy(layout, FLAGS), []
    begin_wait = run.layout.journal.begin_wait
    run.layout.journal.begin_wait = lambda transfer: seen.append(transfer) or begin_wait(transfer)
    Passes(run, run.train_batches, 4, forward=run.forward).forward_backward()
    return [(t.kind, t.ranks) for t in seen], run.layout.journal.started


def test_what_pytorch_waits_for_is_in_the_journal():
    for seen, started in run_distributed(2, _waits_seen):
        assert seen == [("all-reduce", (0, 1))] * len(seen)
        assert seen
        assert started[0, 1] > len(seen)  # construction also has a collective


def test_fp16_stays_close():
    flags = [*FLAGS, "--fp16", "--initial-loss-scale", "1024"]
    losses, *_ = _train(Layout.single(), flags)
    for ours, *_ in run_distributed(2, _train, flags):
        assert ours == pytest.approx(losses, rel=1e-3)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--use-distributed-optimizer", "--zero-stage 1: it shards nothing"),
        ("--bf16", "it sums gradients in the weights' format"),
        ("--pipeline-model-parallel-size 2", "it supports one backward pass at a time"),
    ],
)
def test_what_does_not_go_together_is_refused(flags, message):
    words = [*TOY, "--train-iters", "1", "--DDP-impl", "torch", *flags.split()]
    with pytest.raises(ConfigError, match=f"--DDP-impl torch cannot be combined with .*{message}"):
        parse_config(words, world_size=2)
