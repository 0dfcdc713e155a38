"""DeepSpeed's names and arguments under ours, and the kinds of its files."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.checkpoint.deepspeed.arguments import (
    deepspeed_config,
    has_separate_qkv,
    has_unusual_angles,
    megatron_arguments,
)
from megatron.checkpoint.deepspeed.files import open_files
from megatron.checkpoint.deepspeed.names import (
    Destination,
    destination_of,
    first_layer,
    flatten,
    is_copy,
    is_derived,
    is_gate,
    local_expert,
    shift_expert,
    whole_name,
)
from megatron.errors import CheckpointError

LAYER = "language_model.encoder.layers.3."
EXPERT = f"{LAYER}mlp.deepspeed_moe.experts.deepspeed_experts."


@pytest.mark.parametrize(
    ("name", "whole"),
    [
        ("language_model.embedding.word_embeddings.weight", None),
        ("tied_modules.embed.word_embeddings.weight", "embedding.word_embeddings.weight"),
        ("1.word_embeddings.weight", "embedding.word_embeddings.weight"),
        ("1.position_embeddings.weight", "embedding.position_embeddings.weight"),
        ("1.tokentype_embeddings.weight", "embedding.tokentype_embeddings.weight"),
        ("2.input_layernorm.weight", "encoder.layers.0.input_layernorm.weight"),
        ("13.mlp.dense_4h_to_h.bias", "encoder.layers.11.mlp.dense_4h_to_h.bias"),
        ("14.weight", "encoder.final_layernorm.weight"),
        ("14.bias", "encoder.final_layernorm.bias"),
        ("15.lm_head.weight", "output_layer.weight"),
    ],
)
def test_names_of_a_pipeline_are_those_of_a_whole_model(name: str, whole: str | None) -> None:
    expected = name if whole is None else f"language_model.{whole}"
    assert whole_name(name, 2) == expected


def test_the_first_layer_is_the_first_with_a_norm_before_attention() -> None:
    names = [f"{layer}.input_layernorm.weight" for layer in (4, 3, 12)]
    assert first_layer([*names, "1.word_embeddings.weight", "2.mlp.bias"]) == 3
    assert first_layer(["language_model.encoder.layers.0.input_layernorm.weight"]) == 0
    assert first_layer([]) == 0


def test_experts_are_numbered() -> None:
    name = f"{EXPERT}5.dense_h_to_4h.weight"
    assert local_expert(name) == 5
    assert shift_expert(name, 8) == f"{EXPERT}13.dense_h_to_4h.weight"
    other = f"{LAYER}mlp.dense_h_to_4h.weight"
    assert local_expert(other) is None
    assert shift_expert(other, 8) == other
    assert is_gate(f"{LAYER}mlp.deepspeed_moe.gate.wg.weight")
    assert not is_gate(f"{LAYER}mlp.gate.wg.weight")
    copy = "encoderlayers.3.mlp.deepspeed_moe.experts.deepspeed_experts.0.dense_h_to_4h.weight"
    assert [is_copy(one) for one in (copy, name, "encoderlayers.3.mlp.x")] == [True, False, False]
    derived = [is_derived(one) for one in ("a._extra_state", "a.inv_freq", "a.weight")]
    assert derived == [True, True, False]


@pytest.mark.parametrize(
    ("name", "destination"),
    [
        ("mlp.deepspeed_moe.gate.wg.weight", ("mlp.router.weight", None, None)),
        ("mlp.coefficient.bias", ("mlp.coefficient.bias", None, None)),
        ("mlp.mlp.dense_h_to_4h.bias", ("mlp.shared.up.bias", "mlp.up.bias", None)),
        ("mlp.mlp.dense_4h_to_h.weight", ("mlp.shared.down.weight", "mlp.down.weight", None)),
        ("mlp.dense_4h_to_h.weight", ("mlp.down.weight", None, None)),
        ("self_attention.dense.bias", ("attention.output.bias", None, None)),
        (
            "mlp.deepspeed_moe.experts.deepspeed_experts.5.dense_h_to_4h.weight",
            ("mlp.experts.up.weight", "mlp.up.weight", 5),
        ),
    ],
)
def test_parameters_have_a_place_in_our_network(
    name: str, destination: tuple[str, str | None, int | None]
) -> None:
    ours, dense, expert = destination
    found = destination_of(f"{LAYER}{name}")
    assert found == Destination(f"layers.3.{ours}", f"layers.3.{dense or ours}", expert)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "vision_model.encoder.layers.3.mlp.dense_4h_to_h.weight",
            "does not exist in our networks",
        ),
        (f"{LAYER}mlp.deepspeed_moe.x.weight", "does not exist in our networks"),
        (f"{EXPERT}0.x.weight", "does not exist in our networks"),
        ("language_model.word_embeddings_for_head.weight", "is a copy of another"),
    ],
)
def test_other_parameters_are_refused(name: str, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        destination_of(name)


def test_nested_dicts_are_joined_by_dots() -> None:
    tree = {"a": {"b": {"c": {"d": {"e": 1}}}, "f": 2}, "g": 3}
    assert dict(flatten(tree)) == {"a.b.c.d.e": 1, "a.f": 2, "g": 3}
    assert dict(flatten(4, "x")) == {"x": 4}
    with pytest.raises(CheckpointError, match=r"^a.b.c.d.e has more entries than any model"):
        dict(flatten({"a": {"b": {"c": {"d": {"e": {}}}}}}))
    with pytest.raises(CheckpointError, match="^a contains a name that is not a string"):
        dict(flatten({"a": {1: 2}}))
    many = dict.fromkeys(map(str, range(200_000)))
    assert next(flatten(many)) == ("0", None)
    with pytest.raises(CheckpointError, match="^module has more entries than any model"):
        next(flatten({**many, "one": 1}))


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (
            {"rope_theta": 5, "normalization": "rmsnorm"},
            {"rotary_base": 5, "normalization": "RMSNorm"},
        ),
        ({"normalization": "layernorm"}, {"normalization": "LayerNorm"}),
        ({"normalization": "other"}, {"normalization": "other"}),
        ({"normalization": None}, {"normalization": None}),
        ({"position_embedding_type": "PositionEmbeddingType(2)", "lr": 1}, {"lr": 1}),
        (
            {"num_key_value_heads": 2, "num_attention_heads": 4},
            {"group_query_attention": True, "num_query_groups": 2},
        ),
        ({"num_key_value_heads": 4, "num_attention_heads": 4}, {}),
        ({"num_experts": [1]}, {"num_experts": None}),
        ({"num_experts": [1, None]}, {"num_experts": None}),
        (
            {"num_experts": [4, 1], "topk": 2, "moe_loss_coeff": 0.1},
            {
                "num_experts": [4, 1],
                "moe_layer_freq": "last-of-1",
                "moe_router_gating": "deepspeed",
                "moe_expert_capacity_factor": None,
                "moe_router_topk": 2,
                "moe_aux_loss_coeff": 0.1,
            },
        ),
        (
            {"num_experts": 4, "expert_interval": 2, "moe_train_capacity_factor": 1.5},
            {
                "num_experts": [4],
                "moe_layer_freq": "last-of-2",
                "moe_router_gating": "deepspeed",
                "moe_expert_capacity_factor": 1.5,
            },
        ),
    ],
)
def test_arguments_have_megatron_s_names(args: dict[str, Any], expected: dict[str, Any]) -> None:
    found = megatron_arguments(args)
    assert {name: value for name, value in found.items() if args.get(name, found) != value} == {
        name: value for name, value in ({"num_experts": None} | expected).items()
        if args.get(name, found) != value
    }  # fmt: skip
    assert "position_embedding_type" not in found
    has_mixture = any(name.startswith("moe_") for name in deepspeed_config(found)["model"])
    assert has_mixture == bool(found["num_experts"])


@pytest.mark.parametrize(
    "args",
    [
        {"num_experts_switch": 4},
        {"retro_add_retriever": True},
        {"embed_layernorm": True},
        {"position_embedding_type": "alibi"},
        {"num_experts": [0, 4]},
        {"num_experts": ["4"]},
        {"num_experts": [True, 4]},
        {"num_experts": [4], "expert_interval": 0},
        {"num_experts": [4], "expert_interval": 16_385},
    ],
    ids=str,
)
def test_other_networks_are_refused(args: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError):
        megatron_arguments(args)


def test_files_since_december_2024_are_recognized() -> None:
    new = {"ds_sequence_parallel_fpdt": False}
    assert [has_separate_qkv(args) for args in ({}, new)] == [False, True]
    assert not has_separate_qkv({**new, "group_query_attention": True})
    rotary = {**new, "use_rotary_position_embeddings": True, "no_pipeline_parallel": True}
    assert has_unusual_angles(rotary) is True
    for changes in (
        {"ds_sequence_parallel_fpdt": True},
        {"use_rotary_position_embeddings": False},
        {"no_pipeline_parallel": False},
    ):
        assert has_unusual_angles(rotary | changes) is False
    assert has_unusual_angles({name: True for name in rotary if name not in new}) is False


def test_files_are_sorted_by_their_names(tmp_path: Any) -> None:
    names = {
        "mp_rank_00_model_states.pt": ("models", 0),
        "mp_rank_01_model_states.pt": ("models", 1),
        "layer_05-model_states.pt": ("layers", (5, 0)),
        "layer_06-model_01-model_states.pt": ("layers", (6, 1)),
        "layer_0_expert_2_mp_rank_01_model_states.pt": ("experts", (0, 2, 1)),
        "zero_pp_rank_3_mp_rank_01_optim_states.pt": ("states", (1, 3)),
        "bf16_zero_pp_rank_4_mp_rank_00_optim_states.pt": ("states", (0, 4)),
        "expp_rank_2_mp_rank_01_optim_states.pt": ("expert_states", (1, 2)),
    }
    for name in names:
        torch.save({"name": name}, tmp_path / name)
    files = open_files(tmp_path)
    assert not files.partitioned
    for name, (table, key) in names.items():
        assert getattr(files, table)[key].tree == {"name": name}
    assert len(files.all()) == len(names)
    tables = ("models", "layers", "experts", "states", "expert_states")
    order = [file.tree["name"] for file in files.all()]
    expected = []
    for table in tables:
        keys = {name: key for name, (kind, key) in names.items() if kind == table}
        expected += sorted(keys, key=keys.__getitem__)
    assert order == expected
    torch.save({}, tmp_path / "mp_rank_03_model_states.pt")
    with pytest.raises(CheckpointError, match="of a model-parallel rank are missing"):
        open_files(tmp_path)
    for path in tmp_path.iterdir():
        path.unlink()
    with pytest.raises(CheckpointError, match="of a model-parallel rank are missing"):
        open_files(tmp_path)
    for rank in (0, 1):  # with ZeRO 3, only the first data rank's file is read
        torch.save({"of": rank}, tmp_path / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
    files = open_files(tmp_path)
    assert files.partitioned
    assert {rank: file.tree for rank, file in files.models.items()} == {0: {"of": 0}}
