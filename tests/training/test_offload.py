"""`--optimizer-cpu-offload`: the update in host memory is the update."""

import pytest
import torch

from megatron.parallel.layout import Layout
from tests.distributed import run_sharing_memory
from tests.training.toy import build_toy, train_toy

FLAGS = "--hidden-dropout 0 --attention-dropout 0 --global-batch-size 8 --eval-iters 0".split()
OFFLOAD = "--optimizer-cpu-offload"


def _train(layout, flags):
    recorder, run = train_toy(layout, flags)
    state = {name: tensor.tolist() for name, (tensor, _) in run.optimizer.named_tensors().items()}
    return recorder.values("lm loss"), recorder.values("grad-norm"), state


def _with_and_without(layout, flags):
    return _train(layout, [*flags, OFFLOAD]), _train(layout, flags)


@pytest.mark.parametrize("precision", ["--fp16 --initial-loss-scale 1024", "--bf16", ""])
@pytest.mark.parametrize("stage", ["0", "1", "2", "3"])
def test_losses_are_the_same_to_the_bit(stage, precision):
    flags = [*FLAGS, "--zero-stage", stage, *precision.split()]
    for offloaded, plain in run_sharing_memory(2, _with_and_without, flags):
        assert offloaded == plain


def test_weights_and_their_copies_share_no_memory():
    run = build_toy(Layout.single(), [*FLAGS, OFFLOAD])
    before = [p.detach().clone() for p in run.parameters()]
    places = {p.untyped_storage().data_ptr() for p in run.parameters()}
    (group, _) = run.optimizer._owned
    assert all(w.untyped_storage().data_ptr() not in places for w in group.weights)
    assert all(torch.equal(a, b) for a, b in zip(before, run.parameters(), strict=True))


@pytest.mark.parametrize("precision", [[], ["--bf16"]], ids=["fp32", "bf16"])
def test_offloading_may_begin_and_end_at_a_checkpoint(tmp_path, precision):
    flags = [*FLAGS, *precision]
    losses, _, state = _train(Layout.single(), flags)
    steps = ["--save-interval", "2", "--exit-interval", "2"]
    for part, options in enumerate([[], [OFFLOAD], []]):
        load = ["--load", str(tmp_path / str(part - 1))] if part else []
        words = [*flags, *options, *load, "--save", str(tmp_path / str(part)), *steps]
        ours, _, last = _train(Layout.single(), words)
        assert ours == losses[2 * part : 2 * part + 2]
    assert last == state
