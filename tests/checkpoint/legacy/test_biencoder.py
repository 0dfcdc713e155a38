"""A bi-encoder in Megatron-LM 23.08's format: a BERT's tree for each tower, and projections."""

from __future__ import annotations

from argparse import Namespace

import pytest
import torch

from megatron.checkpoint.loading import open_checkpoint
from megatron.parallel.layout import Layout
from megatron.training.from_bert import StartFromBert
from tests.checkpoint.legacy.megatron_files import Form, optimizer_of
from tests.checkpoint.legacy.test_golden import trees_of
from tests.checkpoint.states import read_whole
from tests.training.toy import build_toy, train_toy

TOWERS = {False: ("query_model", "context_model"), True: ("shared_model",)}


def tower_of(generator):
    """Return a tower's tree, two layers of width 32, in Megatron's order of registration."""

    def draw(*shape):
        return torch.randn(*shape, generator=generator)

    def linear(name, outputs, inputs):
        return {f"{name}.weight": draw(outputs, inputs), f"{name}.bias": draw(outputs)}

    def norm(name):
        return {f"{name}.weight": draw(32), f"{name}.bias": draw(32)}

    encoder = {}
    for layer in (f"layers.{i}." for i in range(2)):
        encoder |= norm(f"{layer}input_layernorm")
        encoder |= linear(f"{layer}self_attention.query_key_value", 96, 32)
        encoder |= linear(f"{layer}self_attention.dense", 32, 32)
        encoder |= norm(f"{layer}post_attention_layernorm")
        encoder |= linear(f"{layer}mlp.dense_h_to_4h", 128, 32)
        encoder |= linear(f"{layer}mlp.dense_4h_to_h", 32, 128)
    encoder |= norm("final_layernorm")
    tables = {"word": 104, "position": 16, "tokentype": 2}
    embedding = {f"{name}_embeddings": {"weight": draw(rows, 32)} for name, rows in tables.items()}
    return {
        "language_model": {"embedding": embedding, "encoder": encoder},
        "projection_enc": {"weight": draw(8, 32), "bias": draw(8)},
    }


def write(root, *, shared):
    generator = torch.Generator().manual_seed(4)
    tree = {tower: tower_of(generator) for tower in TOWERS[shared]}
    leaves = {}

    def walk(node, path):
        for key, value in node.items():
            if isinstance(value, dict):
                walk(value, (*path, key))
            else:
                leaves[".".join((*path, key))] = ((*path, key), value)

    walk(tree, ())
    arguments = {
        "num_layers": 2,
        "hidden_size": 32,
        "ffn_hidden_size": 128,
        "num_attention_heads": 4,
        "max_position_embeddings": 16,
        "biencoder_projection_dim": 8,
        "biencoder_shared_query_context_model": shared,
        "consumed_train_samples": 12,
    }
    folder = root / "iter_0000003" / "mp_rank_00"
    folder.mkdir(parents=True)
    parts = {name: value for name, (_, value) in leaves.items()}
    paths = {name: path for name, (path, _) in leaves.items()}
    content = {
        "args": Namespace(**arguments),
        "checkpoint_version": 3.0,
        "iteration": 3,
        "model": tree,
        "optimizer": optimizer_of(Form(), parts, paths),
        "opt_param_scheduler": {"num_steps": 12},
    }
    torch.save(content, folder / "model_optim_rng.pt")
    (root / "latest_checkpointed_iteration.txt").write_text("3")
    return tree


@pytest.mark.parametrize("shared", [False, True])
def test_weights_and_moments_of_every_tower_are_read(tmp_path, shared):
    tree = write(tmp_path, shared=shared)
    reader = open_checkpoint(tmp_path)
    flag = ["--biencoder-shared-query-context-model"] if shared else []
    run = build_toy(Layout.single(), ["--biencoder-projection-dim", "8", *flag], "ict")
    names = {name for name, _ in run.named_parameters()}
    assert {name for name in reader.names() if name.startswith("model.")} == {
        f"model.{name}" for name in names
    }
    moments = {f"optimizer.{name}.{kind}" for name in names for kind in ("exp_avg", "exp_avg_sq")}
    assert moments < set(reader.names())
    for tower in TOWERS[shared]:
        language = tree[tower]["language_model"]
        for ours, theirs in {
            "embedding.token_type.weight": language["embedding"]["tokentype_embeddings"]["weight"],
            "layers.1.attention.qkv.weight": language["encoder"][
                "layers.1.self_attention.query_key_value.weight"
            ],
            "final_norm.bias": language["encoder"]["final_layernorm.bias"],
            "projection.weight": tree[tower]["projection_enc"]["weight"],
        }.items():
            assert torch.equal(read_whole(reader, f"model.{tower}.{ours}"), theirs)
            state = read_whole(reader, f"optimizer.{tower}.{ours}.exp_avg")
            assert torch.equal(state, 2 * theirs)


def test_training_continues_from_it(tmp_path):
    tree = write(tmp_path, shared=False)
    words = ["--biencoder-projection-dim", "8", "--load", str(tmp_path), "--finetune"]
    run = build_toy(Layout.single(), words, "ict")
    weights = dict(run.named_parameters())
    theirs = tree["context_model"]["projection_enc"]["bias"]
    assert torch.equal(weights["context_model.projection.bias"], theirs)
    train_toy(Layout.single(), [*words, "--train-iters", "1", "--eval-iters", "0"], "ict")


def test_towers_start_from_the_recorded_bert(golden):
    """The real Megatron-LM 23.08 wrote the checkpoint."""
    root = golden / "bert_fp32" / "ckpt"
    words = "--num-layers 4 --hidden-size 64 --seq-length 128 --max-position-embeddings 128"
    words += " --vocab-size 4999 --make-vocab-size-divisible-by 128 --no-bias-gelu-fusion"
    run = build_toy(Layout.single(), [*words.split(), "--bert-load", str(root)], "ict")
    StartFromBert().begin(run)
    (file,) = trees_of(open_checkpoint(root).path).values()
    encoder = file["model"]["language_model"]["encoder"]
    weights = dict(run.named_parameters())
    for tower in TOWERS[False]:
        ours = weights[f"{tower}.layers.3.mlp.down.weight"]
        assert torch.equal(ours, encoder["layers.3.mlp.dense_4h_to_h.weight"])
