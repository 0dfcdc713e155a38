"""What we write as Megatron's files, against its own files and PyTorch's own reader."""


import pytest
import torch

from megatron.checkpoint.reader import open_checkpoint
from tests.checkpoint.legacy.test_golden import trees_of
from tests.checkpoint.states import read_whole
from tools.checkpoint import util

# What only Megatron's own run knows: Apex's optimizer has two settings that PyTorch's lacks, and
# `model_type` is an enum of its own.
OURS_ONLY = {"bias_correction", "step"}


def convert(loader, saver, load, save, *words):
    ends = ["--model-type", "GPT", "--load-dir", str(load), "--save-dir", str(save)]
    return util.main([*ends, "--loader", loader, "--saver", saver, *words])


def leaves(tree, path=()):
    """Every tensor with its path."""
    if isinstance(tree, torch.Tensor):
        yield path, tree
    elif isinstance(tree, dict):
        for key, value in tree.items():
            yield from leaves(value, (*path, key))
    elif isinstance(tree, list | tuple):
        for index, value in enumerate(tree):
            yield from leaves(value, (*path, index))


def assert_same_tensors(found, expected):
    """Same paths, types, shapes and bits; of random states not the bits."""
    found, expected = dict(leaves(found)), dict(leaves(expected))
    assert found.keys() == expected.keys()
    for path, tensor in expected.items():
        assert (found[path].dtype, found[path].shape) == (tensor.dtype, tensor.shape), path
        assert path[0] == "rng_state" or torch.equal(found[path], tensor), path


@pytest.mark.parametrize("run", ["gpt_fp32", "gpt_tp2pp2_fp32"])
def test_megatron_s_files_come_back_bit_for_bit(golden, tmp_path, run):
    original, native, again = golden / run / "ckpt", tmp_path / "native", tmp_path / "megatron"
    assert convert("megatron", "native", original, native, "--keep-optimizer") == 0
    assert convert("native", "megatron", native, again, "--keep-optimizer") == 0
    assert (again / "latest_checkpointed_iteration.txt").read_bytes() == (
        original / "latest_checkpointed_iteration.txt"
    ).read_bytes()
    found, expected = trees_of(again / "iter_0000020"), trees_of(original / "iter_0000020")
    assert found.keys() == expected.keys()
    for folder, tree in expected.items():
        assert found[folder].keys() == tree.keys()
        assert_same_tensors(found[folder], tree)
        assert found[folder]["opt_param_scheduler"] == tree["opt_param_scheduler"]
        groups = zip(
            found[folder]["optimizer"]["param_groups"], tree["optimizer"]["param_groups"],
            strict=True,
        )  # fmt: skip
        for group, theirs in groups:
            assert group.keys() - OURS_ONLY == theirs.keys()
            changed = {key for key in theirs if group[key] != theirs[key]}
            assert changed <= {"lr"}  # Megatron sets it from its schedule
        args, theirs = vars(found[folder]["args"]), vars(tree["args"])
        assert theirs.keys() - args.keys() == {"model_type"}
        # Scalars and flat lists are as they were.
        differing = {key for key in theirs if key in args and args[key] != theirs[key]}
        assert differing <= {"rank", "local_rank", "world_size"}, differing


def test_other_splits_hold_the_same_model(golden, tmp_path):
    original = golden / "gpt_fp32" / "ckpt"
    words = "--keep-optimizer --target-tensor-parallel-size 2 --target-pipeline-parallel-size 2"
    assert convert("megatron", "megatron", original, tmp_path / "split", *words.split()) == 0
    words += " --target-num-layers-per-virtual-pipeline-stage 1"
    assert convert("megatron", "megatron", original, tmp_path / "virtual", *words.split()) == 0
    one = open_checkpoint(original)
    for folder in ("split", "virtual"):
        other = open_checkpoint(tmp_path / folder)
        assert other.names() == one.names()
        assert all(torch.equal(read_whole(one, n), read_whole(other, n)) for n in one.names())
    shapes = {
        key: {path: tensor.shape for path, tensor in leaves(tree) if path[0] != "optimizer"}
        for key, tree in trees_of(tmp_path / "split" / "iter_0000020").items()
    }
    theirs = {
        key: {path: tensor.shape for path, tensor in leaves(tree) if path[0] != "optimizer"}
        for key, tree in trees_of(golden / "gpt_tp2pp2_fp32" / "ckpt" / "iter_0000020").items()
    }
    assert shapes == theirs
    tree = trees_of(tmp_path / "virtual" / "iter_0000020")["mp_rank_00_001"]
    assert {"model0", "model1"} <= tree.keys()
    assert tree["args"].virtual_pipeline_model_parallel_size == 2
    back = tmp_path / "whole"
    words = "--keep-optimizer --target-tensor-parallel-size 1 --target-pipeline-parallel-size 1"
    assert convert("megatron", "megatron", tmp_path / "virtual", back, *words.split()) == 0
    assert_same_tensors(
        trees_of(back / "iter_0000020")["mp_rank_00"],
        trees_of(original / "iter_0000020")["mp_rank_00"],
    )
