"""Which file of Megatron-LM stores which part of which parameter, in which order."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from megatron.checkpoint.entries import Box
from megatron.checkpoint.legacy.file_plan import FilePlan, plan_files
from megatron.checkpoint.legacy.names import Arrangement
from megatron.config.parallel import ParallelConfig
from megatron.config.stages import ModelPart, even_parts
from megatron.errors import CheckpointError

_LAYER = {
    "mlp.down.weight": (4, 8),
    "mlp.up.weight": (8, 4),
    "mlp.up.bias": (8,),
    "attention.qkv.weight": (12, 4),
    "attention_norm.weight": (4,),
    "mlp.down.bias": (4,),
}


def _gpt(layers: int, *, tied: bool = True) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a GPT, in no particular order."""
    shapes = {f"layers.{i}.{name}": shape for i in range(layers) for name, shape in _LAYER.items()}
    output = {} if tied else {"output.weight": (6, 4)}
    return {**output, "final_norm.weight": (4,), **shapes, "embedding.word.weight": (6, 4)}


def _plan(
    shapes: Mapping[str, tuple[int, ...]], parts: list[ModelPart], tensor: int, stages: int
) -> list[FilePlan]:
    split = ParallelConfig(tensor_model_parallel_size=tensor, pipeline_model_parallel_size=stages)
    return plan_files(shapes, parts, split, Arrangement(3.0, 2, gated=False))


def _last_keys(plan: FilePlan) -> list[list[str]]:
    return [[one.path[-1] for one in chunk] for chunk in plan.chunks]


def _layer(number: int) -> list[str]:
    names = "input_layernorm.weight self_attention.query_key_value.weight"
    names += " mlp.dense_h_to_4h.weight mlp.dense_h_to_4h.bias"
    names += " mlp.dense_4h_to_h.weight mlp.dense_4h_to_h.bias"
    return [f"layers.{number}.{name}" for name in names.split()]


def test_a_rank_has_its_layers_in_megatron_s_order_and_its_part_of_each_matrix() -> None:
    plans = _plan(_gpt(3), even_parts(3, 1), 2, 1)
    assert [(plan.folder, plan.tensor_rank, plan.stage) for plan in plans] == [
        ("mp_rank_00", 0, 0),
        ("mp_rank_01", 1, 0),
    ]
    (chunk,) = plans[1].chunks
    assert _last_keys(plans[1]) == [
        ["weight", *_layer(0), *_layer(1), *_layer(2), "final_layernorm.weight"]
    ]
    boxes = {one.name: one.box for one in chunk}
    assert boxes["embedding.word.weight"] == Box((3, 0), (3, 4))
    assert boxes["layers.1.attention.qkv.weight"] == Box((6, 0), (6, 4))
    assert boxes["layers.1.mlp.up.bias"] == Box((4,), (4,))
    assert boxes["layers.1.mlp.down.weight"] == Box((0, 4), (4, 4))
    assert boxes["layers.1.mlp.down.bias"] == Box((0,), (4,))
    # The optimizer's order: weights with decay first.
    decays = [one.is_decayed for one in plans[1].parameters()]
    assert decays == [True] * (1 + 3 * 3) + [False] * (3 * 3 + 1)
    kinds = [one.name.rpartition(".")[2] for one in plans[1].parameters() if not one.is_decayed]
    assert kinds == [*["weight", "bias", "bias"] * 3, "weight"]


@pytest.mark.parametrize("tied", [True, False])
def test_virtual_stages_and_the_copy_of_tied_embeddings(tied: bool) -> None:
    plans = _plan(_gpt(4, tied=tied), even_parts(4, 4), 1, 2)
    assert [plan.folder for plan in plans] == ["mp_rank_00_000", "mp_rank_00_001"]
    assert _last_keys(plans[0]) == [["weight", *_layer(0)], _layer(0)]
    assert _last_keys(plans[1]) == [_layer(0), [*_layer(0), "final_layernorm.weight", "weight"]]
    names = [[one.name for one in chunk] for plan in plans for chunk in plan.chunks]
    assert [chunk[-2].split(".")[1] for chunk in names[:3]] == ["0", "2", "1"]
    last = plans[1].chunks[1][-1]
    assert (last.name, last.path) == (
        ("embedding.word.weight", ("word_embeddings_for_head", "weight"))
        if tied
        else ("output.weight", ("language_model", "output_layer", "weight"))
    )


def _t5() -> dict[str, tuple[int, ...]]:
    shapes = {"embedding.word.weight": (6, 4), "output.bias": (6,)}
    for stack, layers in (("encoder", 2), ("decoder", 2)):
        shapes[f"{stack}.final_norm.bias"] = (4,)
        shapes |= {f"{stack}.layers.{i}.attention_norm.weight": (4,) for i in range(layers)}
    return shapes | {f"decoder.layers.{i}.cross_norm.weight": (4,) for i in range(2)}


def test_the_stage_that_begins_a_t5_s_decoder_has_a_copy_of_the_embeddings() -> None:
    norm, cross = "input_layernorm.weight", "post_attention_layernorm.weight"
    decoder = [f"layers.{i}.{name}" for i in range(2) for name in (norm, cross)]
    encoder = [f"layers.{i}.{norm}" for i in range(2)]
    first, second = _plan(_t5(), even_parts(4, 2), 1, 2)
    assert _last_keys(first) == [["weight", *encoder, "final_layernorm.bias"]]
    # It has the embeddings already, so it needs no further copy for the output.
    assert _last_keys(second) == [["weight", *decoder, "final_layernorm.bias", "bias"]]
    assert second.chunks[0][0].path == ("language_model", "embedding", "word_embeddings", "weight")
    assert {one.path[1] for one in second.chunks[0][1:-1]} == {"decoder"}
    *_, third, last = _plan(_t5(), even_parts(4, 4), 1, 4)
    assert _last_keys(third) == [["weight", *decoder[:2]]]
    assert _last_keys(last) == [[*decoder[:2], "final_layernorm.bias", "weight", "bias"]]
    assert last.chunks[0][-2].path == ("word_embeddings_for_head", "weight")


@pytest.mark.parametrize(
    ("more", "parts", "tensor", "message"),
    [
        ({"layers.0.attention.sinks": (2,)}, 1, 1, "attention.sinks does not exist in Meg"),
        ({"layers.0.attention.qkv.bias": (12,)}, 1, 1, None),
        ({"embedding.word.weight": (7, 4)}, 1, 2, r"embedding.word.weight \[7, 4\] cannot be split "
         r"among 2 .* a number that divides 7, or give --true-vocab-size"),
        ({"layers.0.mlp.up.weight": (9, 4)}, 1, 2, "a number that divides 9$"),
    ],
)  # fmt: skip
def test_what_megatron_s_files_cannot_store_is_refused(
    more: dict[str, tuple[int, ...]], parts: int, tensor: int, message: str | None
) -> None:
    shapes = _gpt(2) | more
    if message is None:
        _plan(shapes, even_parts(2, parts), tensor, 1)
        del shapes["layers.0.mlp.up.bias"]
        message = "--add-qkv-bias: Megatron-LM 23.08 has biases in all linear layers or in none"
    with pytest.raises(CheckpointError, match=message):
        _plan(shapes, even_parts(2, parts), tensor, 1)


def test_stages_of_other_sizes_than_megatron_s_are_refused() -> None:
    parts = [ModelPart(range(1), True, False), ModelPart(range(1, 3), False, True)]
    with pytest.raises(CheckpointError, match=r"^Megatron-LM 23.08 .*: use the native format$"):
        _plan(_gpt(3), parts, 1, 2)
    parts = [ModelPart(range(1), True, False), ModelPart(range(1, 4), False, True)]
    with pytest.raises(CheckpointError, match="another --target-pipeline-parallel-split-rank"):
        _plan(_t5(), parts, 1, 2)
