"""Megatron-LM's names of parameters, and how tensor-parallel ranks split them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.checkpoint.legacy.names import (
    Arrangement,
    Parameter,
    architecture_of,
    count_layers,
    list_parameters,
    megatron_path,
    native_name,
)
from megatron.checkpoint.legacy.unpickler import StorageRef, TensorRef
from megatron.errors import CheckpointError

FIRST = {"encoder": 2, "decoder": 5}
# Our name, Megatron's path in a stage that begins with these layers, and the dimension that tensor
# ranks split in networks without and with gated MLPs.
PATHS: list[tuple[str, str, int | None, int | None]] = [
    ("embedding.word.weight", "language_model/embedding/word_embeddings/weight", 0, 0),
    (
        "embedding.position.weight",
        "language_model/embedding/position_embeddings/weight",
        None,
        None,
    ),
    ("layers.2.attention_norm.bias", "encoder/layers.0.input_layernorm.bias", None, None),
    ("layers.13.attention.qkv.bias", "encoder/layers.11.self_attention.query_key_value.bias", 0, 0),
    ("layers.2.attention.output.weight", "encoder/layers.0.self_attention.dense.weight", 1, 1),
    ("layers.2.attention.output.bias", "encoder/layers.0.self_attention.dense.bias", None, None),
    ("layers.2.mlp_norm.weight", "encoder/layers.0.post_attention_layernorm.weight", None, None),
    ("layers.2.mlp.up.weight", "encoder/layers.0.mlp.dense_h_to_4h.weight", 0, 1),
    ("layers.2.mlp.down.weight", "encoder/layers.0.mlp.dense_4h_to_h.weight", 1, 1),
    ("final_norm.weight", "encoder/final_layernorm.weight", None, None),
    ("output.weight", "language_model/output_layer/weight", 0, 0),
    ("output.bias", "lm_head/bias", 0, 0),
    ("head.dense.weight", "lm_head/dense.weight", None, None),
    ("head.norm.bias", "lm_head/layernorm.bias", None, None),
    ("pooler.dense.weight", "language_model/pooler/dense.weight", None, None),
    ("binary_head.bias", "binary_head/bias", None, None),
    ("multichoice_head.weight", "multichoice_head/weight", None, None),
]
T5_PATHS = [
    ("encoder.layers.2.mlp_norm.bias", "encoder/layers.0.post_attention_layernorm.bias", 2),
    ("encoder.final_norm.bias", "encoder/final_layernorm.bias", 2),
    ("decoder.layers.5.cross_norm.weight", "decoder/layers.0.post_attention_layernorm.weight", 5),
    ("decoder.layers.6.mlp_norm.bias", "decoder/layers.1.post_inter_attention_layernorm.bias", 5),
    (
        "decoder.layers.6.cross_attention.query.bias",
        "decoder/layers.1.inter_attention.query.bias",
        5,
    ),
    ("decoder.final_norm.weight", "decoder/final_layernorm.weight", 5),
]


def _path(text: str) -> tuple[str, ...]:
    keys = tuple(text.split("/"))
    return keys if keys[0] not in FIRST else ("language_model", *keys)


def _dotted(path: tuple[str, ...]) -> str:
    return ".".join(path[path[0] == "language_model" :])


@pytest.mark.parametrize(("name", "path", "plain", "gated"), PATHS)
def test_parameters_of_a_gpt_and_a_bert(
    name: str, path: str, plain: int | None, gated: int | None
) -> None:
    assert megatron_path(name, FIRST["encoder"]) == _path(path)
    options: Any = {"has_decoder": False, "is_first": True}
    assert native_name(_dotted(_path(path)), FIRST, **options) == name
    later = native_name(_dotted(_path(path)), FIRST, has_decoder=False, is_first=False)
    assert later == (None if name.startswith("embedding.") else name)  # a copy
    dims = [Arrangement(3.0, 4, gated=is_gated).split_dim(name) for is_gated in (False, True)]
    assert dims == [plain, gated]


@pytest.mark.parametrize(("name", "path", "first"), T5_PATHS)
def test_parameters_of_a_t5(name: str, path: str, first: int) -> None:
    assert megatron_path(name, first) == _path(path)
    options: Any = {"has_decoder": True, "is_first": False}
    assert native_name(_dotted(_path(path)), FIRST, **options) == name


def test_layers_of_a_retro_model_that_attend_to_chunks() -> None:
    name = "layers.4.retriever.1.mlp_norm.weight"
    for crosses, norm in (
        (True, "post_inter_attention_layernorm"),
        (False, "post_attention_layernorm"),
    ):
        path = megatron_path(name, 2, crosses=crosses)
        assert path[2] == f"layers.2.retriever.layers.1.{norm}.weight"
        crossing = ["encoder.layers.2.retriever.layers.1"] if crosses else []
        options: Any = {"has_decoder": False, "is_first": True, "crossing": crossing}
        assert native_name(_dotted(path), FIRST, **options) == name
    with pytest.raises(KeyError):
        native_name("encoder.layers.x.mlp.weight", FIRST, has_decoder=False, is_first=True)


def _tensor(*shape: int) -> TensorRef:
    return TensorRef(StorageRef(torch.float32, "0", 99), 0, shape, shape)


def test_parameters_are_listed_with_their_decay_and_their_expert() -> None:
    def listed(model: Any, architecture: str = "gpt", **options: Any) -> list[Parameter]:
        given = {"tied": True, "is_first": True, **options}
        return list_parameters(model, FIRST, architecture, **given)

    encoder = {
        "layers.0.mlp.dense_h_to_4h.weight": _tensor(2, 2),
        "layers.0.mlp.dense_h_to_4h.bias": _tensor(2, 1),
        "layers.0.input_layernorm.weight": _tensor(2),
        "layers.0._extra_state": None,
    }
    nested = {
        "language_model": {"encoder": encoder},
        "word_embeddings_for_head": {"weight": _tensor(3, 2)},
    }
    assert [(one.name, one.is_decayed) for one in listed(nested)] == [
        ("layers.2.mlp.up.weight", True),
        ("layers.2.mlp.up.bias", False),
        ("layers.2.attention_norm.weight", False),
        (None, True),
    ]
    tower = {"context_model": nested, "query_model": {"language_model": {}}}
    assert [one.name for one in listed(tower, "ict")][:2] == [
        "context_model.layers.2.mlp.up.weight",
        "context_model.layers.2.mlp.up.bias",
    ]
    flat = {
        "decoder.layers.1.mlp.experts.local_experts.3.linear_fc1.weight": _tensor(2, 2),
        "decoder.layers.1.mlp.experts.linear_fc2.weight4": _tensor(2, 2),
        "decoder.layers.1.mlp.experts.linear_fc2.weight": _tensor(2, 2),
        "output_layer.weight": _tensor(3, 2),
    }
    assert [(one.name, one.expert) for one in listed(flat)] == [
        ("layers.3.mlp.experts.up.weight", 3),
        ("layers.3.mlp.experts.down.weight", 4),
        ("layers.3.mlp.experts.down.weight", 0),
        (None, None),
    ]
    assert [one.name for one in listed(flat, tied=False)][-1] == "output.weight"
    bert = {
        "encoder.layers.0.mlp.linear_fc1.bias": _tensor(2),
        "lm_head.layer_norm.bias": _tensor(2),
    }
    assert [one.name for one in listed(bert, "bert")] == ["layers.2.mlp.up.bias", "head.norm.bias"]
    with pytest.raises(CheckpointError, match=r"parameter encoder\.x does not exist in our gpt"):
        listed({"language_model": {"encoder": {"x": _tensor(2)}}})


def test_the_kind_of_a_network_follows_from_its_trees() -> None:
    def kind(*models: Any) -> str:
        return architecture_of(models)

    plain = {"language_model": {"encoder": {}}}
    assert kind(plain, None) == "gpt"
    assert kind(plain, {"language_model": {"pooler": {}}}) == "bert"
    assert kind(plain, {**plain, "lm_head": {}}) == "bert"
    assert kind(plain, {"language_model": {"decoder": {}, "pooler": {}}}) == "t5"
    assert kind(plain, {"query_model": {}}) == "ict"
    crossing = {"encoder": {"layers.0.inter_attention.query.weight": _tensor(2)}}
    assert kind(plain, {"language_model": crossing}) == "retro"
    assert kind({"decoder.layers.0.x": 0}) == "gpt"
    assert kind({"embedding.x": 0}) == "gpt"
    assert kind({"encoder.layers.0.x": 0}, {"embedding.x": 0}) == "bert"
    with pytest.raises(CheckpointError, match="a T5 of Megatron Core"):
        kind({"encoder.layers.0.x": 0}, {"decoder.layers.0.x": 0})


def test_layers_are_counted_by_stack() -> None:
    layers = {f"layers.{layer}.{kind}": 0 for layer in (0, 1, 12) for kind in ("a", "b")}
    language = {"encoder": layers, "decoder": {"layers.0.x": 0, "final_layernorm.weight": 0}}
    assert count_layers({"language_model": language}) == {"encoder": 3, "decoder": 1}
    assert count_layers({"language_model": {"transformer": layers}})["encoder"] == 3
    assert count_layers({f"decoder.{name}": 0 for name in layers}) == {"encoder": 3}
    towers = {"query_model": {"language_model": language}, "context_model": {}}
    assert count_layers(towers) == {"encoder": 3, "decoder": 1}
    assert count_layers(None) == {"encoder": 0, "decoder": 0}


@pytest.mark.parametrize(
    ("version", "rows"),
    [
        (0, "q0 q0 q1 q1 k0 k0 k1 k1 v0 v0 v1 v1"),
        (1.0, "q0 k0 v0 q0 k0 v0 q1 k1 v1 q1 k1 v1"),
        (2.0, "q0 q0 k0 k0 v0 v0 q1 q1 k1 k1 v1 v1"),
        (3.0, "q0 q0 k0 k0 v0 v0 q1 q1 k1 k1 v1 v1"),
    ],
)
def test_rows_of_heads_are_grouped_in_every_version(version: float, rows: str) -> None:
    """Each of two heads has two rows of queries, keys and values."""
    wanted = _PATTERN.split()

    def arranged(name: str, stored: list[str]) -> list[str]:
        numbers = torch.tensor([wanted.index(row) for row in stored])
        found = Arrangement(version, 2, gated=True).arrange(name, numbers)
        return [wanted[number] for number in found.tolist()]

    assert arranged("model.layers.0.attention.qkv.weight", rows.split()) == wanted
    key_value = [row for row in rows.split() if row[0] != "q"]
    name = "model.layers.0.cross_attention.key_value.bias"
    assert arranged(name, key_value) == [row for row in wanted if row[0] != "q"]
    other = "model.layers.0.attention.output.weight"
    assert arranged(other, rows.split()) == rows.split()


_PATTERN = "q0 q0 k0 k0 v0 v0 q1 q1 k1 k1 v1 v1"


def test_gate_and_up_are_two_matrices_in_gated_networks() -> None:
    rows = torch.arange(12).view(6, 2)
    for gated in (True, False):
        arrangement = Arrangement(3.0, 2, gated=gated)
        for name in ("mlp.up", "mlp.experts.up", "mlp.shared.up"):
            found = arrangement.arrange(f"model.layers.0.{name}.weight", rows)
            assert torch.equal(found, rows.view(2, 3, 2) if gated else rows)
            assert arrangement.split_dim(f"layers.0.{name}.bias") == int(gated)
        name = "model.layers.0.mlp.up.weight"
        assert torch.equal(arrangement.flatten(name, arrangement.arrange(name, rows)), rows)
        name = "model.layers.0.mlp.down.weight"
        assert arrangement.flatten(name, rows[None]).shape == (1, 6, 2)
    retriever = "layers.3.retriever.0.cross_attention.key_value.bias"
    assert Arrangement(3.0, 2, gated=False).split_dim(retriever) == 0
    assert Arrangement(3.0, 2, gated=False).split_dim("decoder.layers.1.mlp.down.bias") is None
