"""Folders in Megatron Core's format load to the same values as ours, in every layout."""

import math
import random
import shutil
from dataclasses import replace

import pytest
import torch

from megatron.checkpoint.core.index import Index
from megatron.checkpoint.entries import Box, flatten
from megatron.checkpoint.loading import open_checkpoint
from megatron.config.parser import parse_config
from megatron.errors import CheckpointError
from megatron.training.checkpointing import state_of
from megatron.training.restoring import network_of
from tests.checkpoint.core.conftest import NETWORKS, SAVE
from tests.checkpoint.core.core_files import (
    Grid,
    core_tensors,
    embed_common,
    to_core_ranks,
    write_core,
)
from tests.checkpoint.states import read_whole
from tests.distributed import run_distributed
from tests.training.toy import TOY, build_toy


@pytest.mark.parametrize("form", ["stacked", "by layer"])
@pytest.mark.parametrize("network", NETWORKS)
def test_it_holds_the_same_tensors_and_position(folders, network, form):
    root = folders(network)
    ours, theirs = open_checkpoint(root / "native"), open_checkpoint(root / form)
    assert theirs.format == "core"
    assert theirs.names() == ours.names()
    for name in ours.names():
        assert theirs.dtype(name) == ours.dtype(name), name
        assert torch.equal(read_whole(theirs, name), read_whole(ours, name)), name
    for key in ("iteration", "consumed_train_samples", "padded_vocab_size", "optimizer"):
        assert theirs.meta[key] == ours.meta[key], key


def test_the_command_line_is_read_from_where_core_0_19_stores_it(folders, tmp_path):
    root = folders("mixture")
    shutil.copytree(root / "stacked", tmp_path / "embedded")
    embed_common(next((tmp_path / "embedded").glob("iter_*")))
    before, after = open_checkpoint(root / "stacked"), open_checkpoint(tmp_path / "embedded")
    assert after.meta == before.meta
    assert after.names() == before.names()
    for name in before.names():
        assert torch.equal(read_whole(after, name), read_whole(before, name)), name


def test_biases_of_routers_are_saved_with_the_weights(folders):
    ours = open_checkpoint(folders("mixture in every second layer") / "native")
    names = {name for name in ours.names() if name.endswith("expert_bias")}
    assert names == {f"model.layers.{layer}.mlp.router.expert_bias" for layer in (0, 2)}
    for name in names:
        assert read_whole(ours, name).abs().max() > 0


@pytest.mark.parametrize("form", ["stacked", "by layer"])
def test_any_box_is_read(folders, form):
    reader, rng = open_checkpoint(folders("mixture") / form), random.Random(1)
    for name in reader.names():
        whole = read_whole(reader, name)
        for _ in range(3):
            spans = [sorted(rng.sample(range(size + 1), 2)) for size in whole.shape]
            box = Box(tuple(a for a, _ in spans), tuple(b - a for a, b in spans))
            assert math.prod(box.shape)
            expected = whole[tuple(slice(a, b) for a, b in spans)]
            assert torch.equal(reader.read(name, box), expected), (name, box)


def test_only_the_chunks_that_cover_a_box_are_opened(folders, monkeypatch):
    reader, opened = open_checkpoint(folders("mixture") / "stacked"), []
    load = Index.load

    def noted(self, name, chunk, **options):
        opened.append(chunk.box)
        return load(self, name, chunk, **options)

    monkeypatch.setattr(Index, "load", noted)
    # Expert 3's gate in layer 2 is one half of its rows of linear_fc1.
    reader.read("model.layers.2.mlp.experts.up.weight", Box((3, 0, 0, 0), (1, 1, 12, 32)))
    assert opened == [Box((2, 3, 0, 0), (1, 1, 12, 32))]


_LAYOUTS = {
    "TP 2": ({"tensor": 2}, "--tensor-model-parallel-size 2"),
    "PP 2": ({"pipeline": 2}, "--pipeline-model-parallel-size 2"),
    "EP 2, ZeRO 1": ({"expert": 2}, "--expert-model-parallel-size 2 --use-distributed-optimizer"),
}


@pytest.mark.parametrize("layout", _LAYOUTS)
def test_every_layout_loads_it(folders, layout):
    sizes, flags = _LAYOUTS[layout]
    words = [*SAVE, *NETWORKS["mixture"], *flags.split()]
    assert run_distributed(2, _load, folders("mixture"), words, **sizes) == [True, True]


def test_shards_of_weights_are_filled(folders):
    words = [*SAVE, *NETWORKS["GPT-2"], "--zero-stage", "3"]
    assert run_distributed(2, _load, folders("GPT-2"), words) == [True, True]


def _load(layout, root, words):
    """Load, and return whether this rank then has the values of the native checkpoint."""
    run = build_toy(layout, [*words, "--load", str(root / "stacked")])
    ours = open_checkpoint(root / "native")
    for name, entry in flatten(state_of(run)):
        assert torch.equal(entry.tensor, ours.read(name, entry.box)), name
    return run.progress.iteration == 2


def test_its_network_is_taken_over_and_served(folders):
    root = folders("mixture in every second layer") / "by layer"
    words = [*SAVE[:-2], "--load", str(root), "--use-checkpoint-args"]
    parsed = parse_config(
        [*TOY, "--train-iters", "6", *words], world_size=1, read_checkpoint=network_of
    )
    model = parsed.config.model
    assert (model.num_layers, model.num_experts, model.moe_ffn_hidden_size) == (4, (4,), 12)
    assert model.moe_router_enable_expert_bias
    assert model.moe_layer_freq == "[1,0,1,0]"


_GRIDS = [Grid(1, 1, 1), Grid(2, 1, 2, grouped=True), Grid(1, 2, 2), Grid(2, 2, 4)]


@pytest.mark.parametrize("grid", _GRIDS, ids=str)
@pytest.mark.parametrize(
    "network", ["GPT-2", "mixture with biases", "mixture in every second layer"]
)
def test_files_of_each_rank_hold_the_same(folders, tmp_path, network, grid):
    """Read Megatron Core's format `torch` in its grids of tensor, pipeline and expert ranks."""
    if network == "GPT-2":
        grid = replace(grid, experts=1)
    ours = open_checkpoint(folders(network) / "native")
    to_core_ranks(ours, tmp_path, grid)
    theirs = open_checkpoint(tmp_path)
    assert (theirs.format, theirs.names()) == ("legacy", ours.names())
    for name in ours.names():
        assert torch.equal(read_whole(theirs, name), read_whole(ours, name)), name
    for key in ("iteration", "consumed_train_samples", "padded_vocab_size", "optimizer"):
        assert theirs.meta[key] == ours.meta[key], key


@pytest.mark.parametrize("missing", range(4))
def test_a_missing_rank_of_the_experts_is_refused(folders, tmp_path, missing):
    ours = open_checkpoint(folders("mixture with biases") / "native")
    to_core_ranks(ours, tmp_path, Grid(1, 1, 4))
    shutil.rmtree(tmp_path / "iter_0000002" / f"mp_rank_00_00{missing}")
    with pytest.raises(CheckpointError, match="mp_rank"):
        open_checkpoint(tmp_path)


def test_states_of_another_form_leave_the_weights(folders, tmp_path, capsys):
    ours = open_checkpoint(folders("mixture with biases") / "native")
    to_core_ranks(ours, tmp_path, Grid(1, 1, 2))
    for path in tmp_path.glob("*/mp_rank_00_001/*.pt"):
        tree = torch.load(path, weights_only=False)
        tree["optimizer"][0]["param_groups"].append({"params": [10000]})
        torch.save(tree, path)
    theirs = open_checkpoint(tmp_path)
    assert theirs.names() == [name for name in ours.names() if name.startswith("model.")]
    assert theirs.meta["optimizer"] is None
    assert "only the weights are read" in capsys.readouterr().err


def test_states_flattened_by_the_distributed_optimizer_leave_the_weights(folders, tmp_path, capsys):
    """Core up to 0.14 stores [L, 3h, h] with TP 2 as [L, 2, 1, 3h / 2 * h], one rank after
    another."""
    root = folders("mixture")
    tensors = core_tensors(open_checkpoint(root / "native"), stacked=True)
    for name in [name for name in tensors if name.startswith("optimizer.")]:
        layers = len(tensors[name]) if "decoder.layers" in name else 1
        ones = [1] * (tensors[name].dim() - 1)
        tensors[name] = tensors[name].reshape(layers, *ones, -1)
    theirs = open_checkpoint(root / "stacked")
    common = torch.load(theirs.path / "common.pt", weights_only=False)
    write_core(tmp_path / theirs.path.name, tensors, common)
    flat = open_checkpoint(tmp_path)
    assert flat.names() == [name for name in theirs.names() if name.startswith("model.")]
    for name in flat.names():
        assert torch.equal(read_whole(flat, name), read_whole(theirs, name)), name
    assert flat.meta["optimizer"] is None
    assert "only the weights are read" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argument", "value", "message"),
    [
        ("expert_tensor_parallel_size", 2, "save with --ckpt-format torch_dist"),
        ("multi_latent_attention", True, "latent attention is read only from"),
        ("experimental_attention_variant", "gated_delta_net", "delta nets are read only from"),
        ("rotary_interleaved", True, "rotations of neighboring channels are read only from"),
        ("hybrid_override_pattern", "M-M*", "hybrid models are read only from"),
    ],
)
def test_files_of_ranks_that_are_not_supported_are_refused_by_name(
    folders, tmp_path, argument, value, message
):
    ours = open_checkpoint(folders("mixture with biases") / "native")
    to_core_ranks(ours, tmp_path, Grid(1, 1, 1))
    for path in tmp_path.glob("*/mp_rank_00/*.pt"):
        tree = torch.load(path, weights_only=False)
        setattr(tree["args"], argument, value)
        torch.save(tree, path)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path)
