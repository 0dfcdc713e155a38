"""Recorded Megatron-LM 23.08 checkpoints, compared with PyTorch's own reader."""

import random
import shutil

import torch

from megatron.checkpoint.find import CheckpointFolder, list_checkpoints
from megatron.checkpoint.legacy.arguments import legacy_config
from megatron.checkpoint.loading import open_checkpoint, open_folder
from megatron.errors import CheckpointError
from tests.checkpoint.states import read_whole

FILE = "model_optim_rng.pt"


class _ModelType:
    """Megatron's enum, for PyTorch's reader."""

    def __init__(self, value):
        self.value = value


def trees_of(folder):
    """Return every rank's file as PyTorch reads it, by folder name."""
    from argparse import Namespace

    import numpy as np

    allowed = [
        Namespace,
        np.ndarray,
        np.dtype,
        np.dtypes.UInt32DType,
        np._core.multiarray._reconstruct,
        (_ModelType, "megatron.core.enums.ModelType"),
    ]
    with torch.serialization.safe_globals(allowed):
        return {
            path.name: torch.load(path / FILE, weights_only=True) for path in folder.glob("mp_*")
        }


def test_the_fp32_run_is_read_as_pytorch_reads_it(golden):
    root = golden / "gpt_fp32" / "ckpt"
    reader = open_checkpoint(root)
    (tree,) = trees_of(reader.path).values()
    language = tree["model"]["language_model"]
    encoder = language["encoder"]

    def same(name, tensor):
        return torch.equal(read_whole(reader, name), tensor)

    word = language["embedding"]["word_embeddings"]["weight"]
    assert same("model.embedding.word.weight", word)
    assert same(
        "model.embedding.position.weight", language["embedding"]["position_embeddings"]["weight"]
    )
    assert same("model.final_norm.bias", encoder["final_layernorm.bias"])
    for layer in range(4):
        for ours, theirs in {
            "attention_norm": "input_layernorm",
            "attention.qkv": "self_attention.query_key_value",
            "attention.output": "self_attention.dense",
            "mlp_norm": "post_attention_layernorm",
            "mlp.up": "mlp.dense_h_to_4h",
            "mlp.down": "mlp.dense_4h_to_h",
        }.items():
            for kind in ("weight", "bias"):
                tensor = encoder[f"layers.{layer}.{theirs}.{kind}"]
                assert same(f"model.layers.{layer}.{ours}.{kind}", tensor)
    state = tree["optimizer"]["state"]
    # Parameters with weight decay first, in the model's order; then biases and norms.
    assert same("optimizer.embedding.word.weight.exp_avg", state[0]["exp_avg"])
    assert same("optimizer.layers.0.attention.qkv.weight.exp_avg_sq", state[2]["exp_avg_sq"])
    assert same("optimizer.layers.3.mlp.down.weight.exp_avg", state[17]["exp_avg"])
    assert same("optimizer.layers.0.attention_norm.weight.exp_avg", state[18]["exp_avg"])
    assert same("optimizer.layers.0.attention_norm.bias.exp_avg", state[19]["exp_avg"])
    assert same("optimizer.layers.0.attention.qkv.bias.exp_avg", state[20]["exp_avg"])
    assert same("optimizer.final_norm.bias.exp_avg_sq", state[51]["exp_avg_sq"])


def test_where_the_fp32_run_stood(golden):
    reader = open_checkpoint(golden / "gpt_fp32" / "ckpt")
    meta = reader.meta
    assert reader.iteration == meta["iteration"] == 20
    assert meta["consumed_train_samples"] == 320
    assert meta["legacy_args"]["consumed_valid_samples"] == 80
    assert meta["optimizer"] == {"step": 20, "loss_scale": {}}
    assert meta["schedule"]["num_steps"] == 320
    assert meta["padded_vocab_size"] == 5120
    model = meta["config"]["model"]
    assert meta["config"] == legacy_config(meta["legacy_args"], "gpt")
    assert (model["num_layers"], model["hidden_size"], model["ffn_hidden_size"]) == (4, 64, 256)
    assert model["norm_epsilon"] == 1e-5
    assert model["bias_gelu_fusion"] is False


def test_the_split_run_joins_to_the_shapes_of_the_whole_one(golden):
    whole = open_checkpoint(golden / "gpt_fp32" / "ckpt")
    split = open_checkpoint(golden / "gpt_tp2pp2_fp32" / "ckpt")
    assert whole.names() == split.names()
    assert len(whole.names()) == 52 * 3
    for name in whole.names():
        assert whole.global_shape(name) == split.global_shape(name)
        assert whole.dtype(name) == split.dtype(name) == torch.float32
        values = read_whole(split, name)
        assert values.shape == whole.global_shape(name)
        assert values.isfinite().all()


def test_the_split_run_is_joined_along_the_right_dimension(golden):
    reader = open_checkpoint(golden / "gpt_tp2pp2_fp32" / "ckpt")
    trees = trees_of(reader.path)
    for layer in range(4):
        stage, local = divmod(layer, 2)
        parts = [
            trees[f"mp_rank_{rank:02d}_{stage:03d}"]["model"]["language_model"]["encoder"]
            for rank in (0, 1)
        ]
        for ours, theirs, dim in (
            ("attention.qkv.weight", "self_attention.query_key_value.weight", 0),
            ("attention.qkv.bias", "self_attention.query_key_value.bias", 0),
            ("attention.output.weight", "self_attention.dense.weight", 1),
            ("mlp.down.weight", "mlp.dense_4h_to_h.weight", 1),
        ):
            joined = torch.cat([part[f"layers.{local}.{theirs}"] for part in parts], dim)
            assert torch.equal(read_whole(reader, f"model.layers.{layer}.{ours}"), joined)


def test_the_bert_run_is_read_as_pytorch_reads_it(golden):
    reader = open_checkpoint(golden / "bert_fp32" / "ckpt")
    (tree,) = trees_of(reader.path).values()
    model, language = tree["model"], tree["model"]["language_model"]
    assert reader.meta["config"]["model"]["architecture"] == "bert"
    assert len(reader.names()) == 62 * 3
    types = language["embedding"]["tokentype_embeddings"]["weight"]
    for name, tensor in {
        "embedding.token_type.weight": types,
        "pooler.dense.bias": language["pooler"]["dense.bias"],
        "output.bias": model["lm_head"]["bias"],
        "head.norm.weight": model["lm_head"]["layernorm.weight"],
        "binary_head.weight": model["binary_head"]["weight"],
    }.items():
        assert torch.equal(read_whole(reader, f"model.{name}"), tensor), name
    state = tree["optimizer"]["state"]
    for name, index in {
        "binary_head.weight": 21,
        "output.bias": 57,
        "binary_head.bias": 61,
    }.items():
        found = read_whole(reader, f"optimizer.{name}.exp_avg_sq")
        assert torch.equal(found, state[index]["exp_avg_sq"]), name


def test_a_damaged_file_is_refused_or_reads_the_same(golden, tmp_path):
    """Zip headers contain bytes that nothing reads; any other flipped bit is refused."""
    (found,) = list_checkpoints(golden / "gpt_fp32" / "ckpt")
    shutil.copytree(found.path, tmp_path / "iter_0000020", copy_function=shutil.copyfile)
    (tmp_path / "iter_0000020").chmod(0o700)
    (tmp_path / "iter_0000020" / "mp_rank_00").chmod(0o700)
    copy = CheckpointFolder("legacy", 20, tmp_path / "iter_0000020")
    file = copy.path / "mp_rank_00" / FILE
    original, rng = file.read_bytes(), random.Random(0)
    reference = open_folder(found)
    expected = {name: read_whole(reference, name) for name in reference.names()}
    refused, records = 0, original.rindex(b"PK\x01\x02")
    for trial in range(60):
        data = bytearray(original)
        # A third of the damage is anywhere, a third in the pickled tree, a third in the directory.
        low, high = ((0, len(data)), (0, 40_000), (records - 9_000, len(data)))[trial % 3]
        if trial % 10 == 9:
            del data[rng.randrange(low, high) :]
        else:
            data[rng.randrange(low, high)] ^= 1 << rng.randrange(8)
        file.unlink()
        file.write_bytes(data)
        try:
            reader = open_folder(copy)
        except CheckpointError:
            refused += 1
            continue
        assert reader.meta == reference.meta
        assert reader.names() == reference.names()
        for name, tensor in expected.items():
            assert torch.equal(read_whole(reader, name), tensor)
    assert refused > 40
