"""Kinds of files other than 23.08's plain ones, with the same model."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest
import torch

from megatron.checkpoint.loading import open_checkpoint
from megatron.errors import CheckpointError
from tests.checkpoint.legacy.megatron_files import Form, whole_model, write
from tests.checkpoint.states import read_whole

FILE = "model_optim_rng.pt"
KINDS = {"exp_avg": 2, "exp_avg_sq": 3}


def rewrite(path: Path, change) -> None:
    """Rewrite every file of a checkpoint."""
    for file in path.glob(f"mp_rank_*/{FILE}"):
        tree = torch.load(file, weights_only=False)
        change(tree, file.parent)
        torch.save(tree, file)


def assert_read(root: Path, model: dict, kinds=KINDS) -> None:
    """Check that the whole model was read, and moments that are its multiples."""
    reader = open_checkpoint(root)
    assert reader is not None
    expected = {f"model.{name}": tensor for name, tensor in model.items()}
    for name, tensor in model.items():
        expected |= {f"optimizer.{name}.{kind}": by * tensor for kind, by in kinds.items()}
    assert reader.names() == sorted(expected)
    assert (reader.meta["optimizer"] is not None) == bool(kinds)
    for name, tensor in expected.items():
        assert torch.equal(read_whole(reader, name), tensor), name


def test_virtual_stages(tmp_path):
    """Two stages of two chunks: layers 0 and 2 on the first, 1 and 3 on the second."""
    model = whole_model(layers=4)
    path = write(tmp_path, Form(stages=4), model)
    trees = [torch.load(path / f"mp_rank_00_{i:03d}" / FILE, weights_only=False) for i in range(4)]
    shutil.rmtree(path)
    for stage in range(2):
        first, second = trees[stage], trees[stage + 2]
        tree = dict(first)
        tree["model0"], tree["model1"] = tree.pop("model"), second["model"]
        tree["optimizer"] = merge(first["optimizer"], second["optimizer"])
        (path / f"mp_rank_00_{stage:03d}").mkdir(parents=True)
        torch.save(tree, path / f"mp_rank_00_{stage:03d}" / FILE)
    assert_read(tmp_path, model)


def merge(one: dict, other: dict) -> dict:
    """Merge two chunks' optimizers: each group has the first's parameters, then the second's."""
    states, groups = {}, []
    for mine, theirs in zip(one["param_groups"], other["param_groups"], strict=True):
        values = [one["state"][index] for index in mine["params"]]
        values += [other["state"][index] for index in theirs["params"]]
        numbers = range(len(states), len(states) + len(values))
        states |= dict(zip(numbers, values, strict=True))
        groups.append({**mine, "params": list(numbers)})
    return {"state": states, "param_groups": groups}


def test_names_of_the_llama_fork(tmp_path):
    model = whole_model()

    def rename(tree, _):
        encoder = tree["model"]["language_model"]["encoder"]
        for name in list(encoder):
            encoder[name.replace("layernorm", "norm")] = encoder.pop(name)

    rewrite(write(tmp_path, Form(stages=2), model), rename)
    assert_read(tmp_path, model)


@pytest.mark.parametrize("buckets", [1, 3])
@pytest.mark.parametrize("tensor", [1, 2])
def test_the_distributed_optimizer_s_file(tmp_path, tensor, buckets):
    """23.08 has one flat tensor, the fork has buckets."""
    model, ranks = whole_model(), 4

    def flatten(tree, folder):
        parameters = list(leaves(tree["model"]))
        states = {
            key: pack([by * parameter for parameter in parameters], ranks, buckets)
            for key, by in {"param": 1, **KINDS}.items()
        }
        torch.save({0: {torch.float32: states}}, folder / "distrib_optim.pt")
        groups = [{"lr": 0.1, "step": 3}, {"lr": 0.1, "step": 3}]
        tree["optimizer"] = {"optimizer": {"param_groups": groups}}

    path = write(tmp_path, Form(tensor=tensor), model)
    rewrite(path, flatten)
    assert_read(tmp_path, model)
    assert open_checkpoint(tmp_path).meta["optimizer"]["step"] == 3
    file = path / "mp_rank_00" / "distrib_optim.pt"
    tree = torch.load(file, weights_only=False)
    tree[0][torch.float32]["exp_avg"] = torch.zeros(7)
    torch.save(tree, file)
    with pytest.raises(CheckpointError, match="shorter than the parameters"):
        open_checkpoint(tmp_path)


def leaves(tree):
    for value in tree.values():
        yield from leaves(value) if isinstance(value, dict) else [value]


def pack(parameters, ranks, buckets):
    """Pack the last parameter first, each bucket padded to a multiple of the ranks; a single
    bucket is not in a list."""
    order = [parameter.flatten() for parameter in reversed(parameters)]
    size = math.ceil(len(order) / buckets)
    packed = []
    for start in range(0, len(order), size):
        values = torch.cat(order[start : start + size])
        packed.append(torch.cat([values, torch.zeros(-len(values) % ranks)]))
    return packed if buckets > 1 else packed[0]


def test_a_distributed_optimizer_without_its_file(tmp_path, capsys):
    model = whole_model()
    path = write(tmp_path, Form(tensor=2), model, optimizer={"optimizer": {"param_groups": []}})
    assert_read(tmp_path, model, kinds={})
    assert "distrib_optim.pt is missing: only the weights are read" in capsys.readouterr().err
    for has_none, told in (("mp_rank_01", True), ("mp_rank_00", False)):
        tree = torch.load(path / has_none / FILE, weights_only=False)
        del tree["optimizer"]
        torch.save(tree, path / has_none / FILE)
        assert_read(tmp_path, model, kinds={})
        assert ("is missing" in capsys.readouterr().err) == told


@pytest.mark.parametrize("tensor", [1, 2])
def test_files_of_23_04(tmp_path, capsys, tensor):
    """A data rank's folder is named like a pipeline stage's."""
    model = whole_model()
    path = write(tmp_path, Form(tensor=tensor), model)
    for folder in list(path.iterdir()):
        tree = torch.load(folder / FILE, weights_only=False)
        states = tree.pop("optimizer")
        torch.save(tree, folder / "model_rng.pt")
        (folder / FILE).unlink()
        for rank in range(2):
            (path / f"{folder.name}_{rank:03d}").mkdir()
            torch.save(states, path / f"{folder.name}_{rank:03d}" / "optim.pt")
    assert_read(tmp_path, model, kinds={})
    assert "as Megatron-LM 23.04 wrote them: only the weights" in capsys.readouterr().err


CORE = {
    "input_layernorm": "self_attention.linear_qkv.layer_norm_",
    "self_attention.query_key_value": "self_attention.linear_qkv.",
    "self_attention.dense": "self_attention.linear_proj.",
    "post_attention_layernorm": "mlp.linear_fc1.layer_norm_",
    "mlp.dense_h_to_4h": "mlp.linear_fc1.",
    "mlp.dense_4h_to_h": "mlp.linear_fc2.",
}
LOCAL = {"input_layernorm": "input_layernorm.", "post_attention_layernorm": "pre_mlp_layernorm."}


@pytest.mark.parametrize("changes", [{}, LOCAL], ids=["transformer engine", "local"])
def test_names_of_megatron_core(tmp_path, capsys, changes):
    """The last stage's `output_layer` is a copy of the tied word embeddings."""
    model, names = whole_model(swiglu=True), {**CORE, **changes}

    def to_core(tree, _):
        language, flat = tree["model"]["language_model"], {}
        for kind, value in language.get("embedding", {}).items():
            flat[f"embedding.{kind}.weight"] = value["weight"]
        for name, value in language["encoder"].items():
            if name.startswith("final"):
                flat[f"decoder.{name}"] = value
                continue
            _, layer, rest = name.split(".", 2)
            module, _, kind = rest.rpartition(".")
            flat[f"decoder.layers.{layer}.{names[module]}{kind}"] = value
            flat[f"decoder.layers.{layer}.mlp.linear_fc1._extra_state"] = None
        if "word_embeddings_for_head" in tree["model"]:
            flat["output_layer.weight"] = tree["model"]["word_embeddings_for_head"]["weight"]
        tree["model"] = flat

    rewrite(write(tmp_path, Form(tensor=2, stages=2, swiglu=True), model), to_core)
    assert_read(tmp_path, model)
    assert "only the weights are read" not in capsys.readouterr().err


def test_the_first_version_s_keys(tmp_path):
    """Version 1 has `total_iters`, `lr_scheduler`, and other names for the optimizer's states."""
    model = {name: tensor.half().float() for name, tensor in whole_model().items()}

    def age(tree, _):
        tree["total_iters"] = tree.pop("iteration")
        tree["lr_scheduler"] = {"start_lr": 0.1, "num_iters": 40}
        del tree["opt_param_scheduler"]
        states = tree["optimizer"]
        states["optimizer_state_dict"] = states.pop("optimizer")
        states["fp32_from_fp16"] = states.pop("fp32_from_fp16_params")
        tree["args"].batch_size, tree["args"].world_size = 4, 2
        tree["args"].model_parallel_size = 2
        del tree["args"].consumed_train_samples

    form = Form(tensor=2, version=0, dtype=torch.float16, old_names=True)
    rewrite(write(tmp_path, form, model), age)
    reader = open_checkpoint(tmp_path)
    assert (reader.iteration, reader.meta["consumed_train_samples"]) == (3, 12)
    assert reader.meta["schedule"] == {"start_lr": 0.1, "num_iters": 40}
    for name, tensor in model.items():
        assert torch.equal(read_whole(reader, f"model.{name}").float(), tensor)
        assert torch.equal(read_whole(reader, f"optimizer.{name}.master"), tensor)
