"""Who writes which part of a checkpoint, and into which of its files."""

from __future__ import annotations

import pytest

from megatron.checkpoint.entries import Box, Json
from megatron.checkpoint.plan import Part, SavePlan, files_of, make_plan

GIB = 1 << 30


def _vector(name: str, size: int, dtype: str = "U8") -> Json:
    return [name, dtype, [size], [0], [size]]


def _writers(plan: SavePlan) -> dict[str, int]:
    return {name: part.rank for name, (part,) in plan.parts.items()}


def test_the_largest_shared_parts_are_assigned_first_after_what_only_one_rank_has() -> None:
    shared = [_vector("a", 30), _vector("b", 60), _vector("c", 50), _vector("d", 5)]
    plan = make_plan([shared, [*shared, _vector("own", 20)]])
    # Rank 1 begins with 20 bytes: b to rank 0, c to 1, a to 0, and d to 1, which has fewer.
    assert _writers(plan) == {"a": 0, "b": 0, "c": 1, "d": 1, "own": 1}
    assert plan.total_bytes == 165
    wide = [_vector("a", 15, "F32"), _vector("b", 31, "I16"), _vector("c", 61)]
    assert _writers(make_plan([wide, wide])) == {"a": 1, "b": 0, "c": 1}
    equal = [_vector(name, 8) for name in "abcd"]
    assert _writers(make_plan([equal] * 3)) == {"a": 0, "b": 1, "c": 2, "d": 0}


@pytest.mark.parametrize(
    ("sizes", "indices"),
    [
        # In units of 256 MiB: b, a, d and c, e are put into the emptiest file, by size.
        ({"a": 3, "b": 4, "c": 2, "d": 2, "e": 1}, {"a": 1, "b": 0, "c": 2, "d": 2, "e": 1}),
        ({"a": 3, "b": 4, "c": 2, "d": 2}, {"a": 1, "b": 0, "c": 1, "d": 0}),
        ({"a": 3}, {"a": 0}),
        ({"a": 7}, {"a": 0}),
        (dict.fromkeys("abcdef", 4), dict(zip("abcdef", (0, 1, 2, 3, 0, 1), strict=True))),
    ],
)
def test_shares_have_a_file_for_each_gibibyte_and_at_most_four(
    sizes: dict[str, int], indices: dict[str, int]
) -> None:
    plan = make_plan([[_vector(name, size * GIB // 4) for name, size in sizes.items()]])
    assert {name: part.file_index for name, (part,) in plan.parts.items()} == indices
    names = {f"_{index}" if index else "" for index in indices.values()}
    assert set(files_of(plan, 0)) == {f"rank_00000{name}.safetensors" for name in names}
    less = [_vector("a", GIB), _vector("b", GIB - 1)]
    assert {part.file_index for (part,) in make_plan([less]).parts.values()} == {0}


def test_parts_of_one_tensor_in_one_file_have_keys_of_their_own() -> None:
    halves = [["x", "F32", [4, 2], [row, 0], [2, 2]] for row in (0, 2)]
    plan = make_plan([[*halves, _vector("y", 8)], [_vector("z", 40)]])
    boxes = [Box((0, 0), (2, 2)), Box((2, 0), (2, 2))]
    assert plan.parts["x"] == [Part(0, box) for box in boxes]
    assert [key for key, _ in plan.keyed("x")] == ["x", "x#1"]
    assert [[key for _, key, _ in plan.written_by(rank)] for rank in range(2)] == [
        ["x", "x#1", "y"],
        ["z"],
    ]
    assert plan.dtypes == {"x": "F32", "y": "U8", "z": "U8"}
    assert plan.shapes == {"x": (4, 2), "y": (8,), "z": (40,)}


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ([_vector("x", 4, "I8")], "ranks disagree about x: "),
        ([["x", "U8", [5], [0], [4]]], "ranks disagree about x: "),
        ([_vector("x", 4), ["y", "U8", [4], [1], [3]]], "y .4,. is not tiled by its parts"),
    ],
)
def test_ranks_that_contradict_each_other_are_an_error(others: list[Json], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_plan([[_vector("x", 4)], others])
