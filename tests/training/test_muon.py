"""Runs with --optimizer muon: resuming, other layouts, adapters, frozen weights, memory."""

import pytest
import torch

from megatron.parallel.layout import Layout
from megatron.planner.memory import estimate_memory
from tests.distributed import run_distributed
from tests.parity.layouts import MUON, MUON_DISTRIBUTED, MUON_DUPLICATED
from tests.parity.resharding import Grid, all_pairs, relative_difference
from tests.training.toy import build_toy, fingerprint, losses_and_norms_of, train_toy

FLAGS = f"""
    --num-layers 3 --hidden-dropout 0 --attention-dropout 0 --global-batch-size 8 --eval-iters 0
    --swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear
    --untie-embeddings-and-output-weights --group-query-attention --num-query-groups 2
    --train-iters 4 {MUON}
"""


def test_matrices_have_one_state_and_other_parameters_two():
    recorder, run = train_toy(Layout.single(), FLAGS.split())
    assert min(recorder.values("lm loss")) < recorder.values("lm loss")[0]
    kinds = {}
    for name in run.optimizer.named_tensors():
        parameter, _, kind = name.rpartition(".")
        kinds.setdefault(parameter, set()).add(kind)
    layers = [name for name in kinds if name.endswith((".qkv.weight", ".up.weight"))]
    assert len(layers) == 6
    assert all(kinds[name] == {"momentum_buffer"} for name in layers)
    others = [n for n in kinds if "embedding" in n or n.startswith("output") or "norm" in n]
    assert len(others) >= 8
    assert all(kinds[name] == {"exp_avg", "exp_avg_sq"} for name in others)


@pytest.mark.parametrize("more", ["", "--bf16 --muon-fp32-matmul-prec medium"])
def test_resuming_is_exact(tmp_path, more):
    flags = [*FLAGS.split(), *more.split(), "--save", str(tmp_path), "--save-interval", "2"]
    recorder, run = train_toy(Layout.single(), flags)
    first, _ = train_toy(Layout.single(), [*flags, "--exit-interval", "2"])
    second, resumed = train_toy(
        Layout.single(), [*flags, "--load", str(tmp_path), "--ckpt-step", "2"]
    )
    losses = [*first.values("lm loss"), *second.values("lm loss")]
    assert losses == recorder.values("lm loss")
    assert fingerprint(resumed) == fingerprint(run)
    for name, (tensor, _) in run.optimizer.named_tensors().items():
        assert torch.equal(tensor, resumed.optimizer.named_tensors()[name][0]), name


def test_every_layouts_checkpoint_continues_in_every_other(tmp_path):
    network = f"{MUON_DISTRIBUTED} --clip-grad 0"
    sizes = ((1, 1, 2, 1), (1, 1, 2, 3), (2, 1, 1, 0), (2, 1, 2, 3))
    expected, found = all_pairs(tuple(Grid(*each, network) for each in sizes), tmp_path)
    assert len(found) == 16
    for (source, target), loaded in found.items():
        assert loaded.differing == 0, (source, target)
        assert relative_difference(loaded.loss, expected) < 1e-5


_TP = "--tensor-model-parallel-size 2"


@pytest.mark.parametrize(
    "flags",
    [
        "--zero-stage 1",
        "--zero-stage 3",
        f"{_TP} --sequence-parallel {MUON_DISTRIBUTED}",
        f"{_TP} {MUON_DUPLICATED}",
    ],
)
@pytest.mark.parametrize("what", ["--lora-rank 4 --lr 3e-2", "--freeze embedding layers.1"])
def test_adapters_and_frozen_weights(what, flags):
    losses, norms = losses_and_norms_of(Layout.single(), f"{FLAGS} {what}")
    sizes = {"tensor": 2} if _TP in flags else {}
    for ours in run_distributed(2, losses_and_norms_of, f"{FLAGS} {what} {flags}", **sizes):
        assert ours[0] == pytest.approx(losses, rel=1e-5)
        assert ours[1] == pytest.approx(norms, rel=1e-4)


def test_blockwise_depends_on_the_number_of_processes():
    losses, _ = losses_and_norms_of(Layout.single(), FLAGS)
    for ours, _ in run_distributed(2, losses_and_norms_of, f"{FLAGS} {_TP}", tensor=2):
        assert ours[0] == pytest.approx(losses[0], rel=1e-5)
        assert ours[-1] != pytest.approx(losses[-1], rel=1e-5)


@pytest.mark.parametrize("more", ["", "--bf16"])
def test_the_planner_counts_its_states(more):
    run = build_toy(Layout.single(), [*FLAGS.split(), *more.split()])
    states = sum(tensor.numel() for tensor, _ in run.optimizer.named_tensors().values())
    estimate = estimate_memory(run.config, run.plan, run.layout, 1)
    assert estimate.optimizer == pytest.approx(4 * states, abs=1)
