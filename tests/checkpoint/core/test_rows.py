"""The order of rows in Megatron Core's projections, at sizes small enough to read."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.checkpoint.core.rows import RowOrder, row_order, size_of
from megatron.errors import CheckpointError

LATENT = {
    "multi_latent_attention": True,
    "num_attention_heads": 2,
    "qk_head_dim": 1,
    "qk_pos_emb_head_dim": 4,
    "kv_lora_rank": 3,
}
ROTARY = {"rotary_interleaved": True, "num_attention_heads": 2, "kv_channels": 4}
GROUPED = {
    "rotary_interleaved": True,
    "num_attention_heads": 4,
    "group_query_attention": True,
    "num_query_groups": 2,
    "kv_channels": 6,
    "rotary_percent": 0.67,
}
DELTA = {
    "experimental_attention_variant": "gated_delta_net",
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 1,
    "linear_value_head_dim": 2,
}
MAMBA = {
    "hybrid_layer_pattern": "M",
    "mamba_num_groups": 2,
    "mamba_state_dim": 1,
    "mamba_head_dim": 2,
    "hidden_size": 4,
}


def _heads(*heads: list[int]) -> list[int]:
    return [row for head in heads for row in head]


def _turned(start: int) -> list[int]:
    """Return a head of 6 channels, of which 4 rotate."""
    return [start + channel for channel in (0, 2, 1, 3, 4, 5)]


@pytest.mark.parametrize(
    ("model", "name", "positions"),
    [
        (LATENT, "attention.query_up.weight", [0, 1, 3, 2, 4, 5, 6, 8, 7, 9]),
        (LATENT, "mtp.0.layer.attention.latent_down.weight", [0, 1, 2, 3, 5, 4, 6]),
        (ROTARY, "attention.key_norm.weight", [0, 2, 1, 3]),
        (
            ROTARY,
            "attention.qkv.weight",
            _heads(*([s, s + 2, s + 1, s + 3] for s in (0, 4)), [8, 9, 10, 11])
            + _heads(*([s, s + 2, s + 1, s + 3] for s in (12, 16)), [20, 21, 22, 23]),
        ),
        (
            GROUPED,  # two query heads, a key head and a value head in each group
            "attention.qkv.bias",
            [row for group in (0, 24) for head in (0, 6, 12) for row in _turned(group + head)][:18]
            + [*range(18, 24), *_turned(24), *_turned(30), *_turned(36), *range(42, 48)],
        ),
        (
            DELTA,  # query, key, value, z, beta and alpha of each key head
            "attention.input.weight",
            [0, 2, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 24, 25]
            + [1, 3, 8, 9, 10, 11, 16, 17, 18, 19, 22, 23, 26, 27],
        ),
        (
            MAMBA,  # z, x, B, C and dt of each group
            "attention.input.weight",
            [0, 1, 2, 3, 8, 9, 10, 11, 16, 18, 20, 21, 4, 5, 6, 7, 12, 13, 14, 15, 17, 19, 22, 23],
        ),
        (MAMBA, "attention.convolution.bias", [0, 1, 2, 3, 8, 10, 4, 5, 6, 7, 9, 11]),
        ({**MAMBA, "mamba_num_heads": 2}, "attention.convolution.weight", [0, 1, 4, 6, 2, 3, 5, 7]),
    ],
)
def test_rows_are_found_in_core_s_tensors(
    model: dict[str, Any], name: str, positions: list[int]
) -> None:
    rows = len(positions)
    order = row_order(model, name, rows)
    assert order is not None
    assert order.positions.tolist() == positions
    assert sum(count for _, count in order.parts) == rows
    shape = (5, 1, 3) if name == "attention.convolution.weight" else (5, 3)
    assert order.stored_shape((rows, 3), 5) == shape
    # Any rows of ours are made of the ranges that `runs` yields.
    starts = {
        name: sum(count for _, count in order.parts[:i]) for i, (name, _) in enumerate(order.parts)
    }
    for start in range(rows):
        count = min(5, rows - start)
        found = torch.full((count,), -1)
        for part, first, length, ours in order.runs(start, count):
            found[ours] = torch.arange(length) + starts[part] + first
        assert found.tolist() == positions[start : start + count]
    with pytest.raises(CheckpointError, match=name):
        row_order(model, name, rows + 1)


def test_parts_have_their_names_and_adjacent_rows_are_slices() -> None:
    order = row_order(MAMBA, "attention.input.weight", 24)
    assert order is not None
    assert order.parts == ((".z", 8), (".x", 8), (".B", 2), (".C", 2), (".dt", 4))
    assert list(order.runs(1, 5)) == [(".z", 1, 3, slice(0, 3)), (".x", 0, 2, slice(3, 5))]
    order = row_order(DELTA, "attention.convolution.weight", 12)
    assert order is not None
    assert order.parts == ((".query", 2), (".key", 2), (".value", 8))
    order = RowOrder(torch.tensor([1, 0, 3, 2]), (("", 4),))
    ((_, first, count, ours),) = order.runs(0, 4)
    assert isinstance(ours, torch.Tensor)
    assert (first, count, ours.tolist()) == (0, 4, [1, 0, 3, 2])


@pytest.mark.parametrize(
    ("model", "name", "rows"),
    [
        ({}, "attention.qkv.weight", 12),
        ({**ROTARY, "multi_latent_attention": True}, "attention.query_norm.weight", 4),
        (ROTARY, "attention.output.weight", 4),
        (LATENT, "attention.query_down.weight", 4),
        (MAMBA, "attention.decay", 4),
    ],
)
def test_most_parameters_have_the_same_order(model: dict[str, Any], name: str, rows: int) -> None:
    assert row_order(model, name, rows) is None


@pytest.mark.parametrize(
    ("model", "name", "rows", "message"),
    [
        (LATENT, "attention.qkv.weight", 12, "does not exist in a network with latent attention"),
        ({}, "attention.query_up.weight", 10, "in a network with ordinary attention"),
        ({}, "attention.input.weight", 10, "in a network without gated delta nets"),
        (LATENT, "attention.query_up.weight", 9, "has 9 rows instead of 10"),
        ({**MAMBA, "mamba_num_heads": 3}, "attention.input.weight", 9, "is 3, with 2 groups"),
        ({**DELTA, "linear_num_value_heads": 5}, "attention.input.weight", 9, "is 5, with 2 key"),
        ({**ROTARY, "rotary_percent": 0}, "attention.key_norm.weight", 4, "rotary_percent is 0"),
        (
            {**ROTARY, "rotary_percent": 1.1},
            "attention.key_norm.weight",
            4,
            "rotary_percent is 1.1",
        ),
        ({**ROTARY, "rotary_percent": 0.75}, "attention.key_norm.weight", 4, "do not match"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(
    model: dict[str, Any], name: str, rows: int, message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        row_order(model, name, rows)


def test_sizes_have_bounds() -> None:
    largest = 16_777_216
    assert [size_of({"x": size}, "x") for size in (1, largest)] == [1, largest]
    assert size_of({}, "linear_num_key_heads") == size_of({"a": 1}, "linear_num_key_heads")
    for size in (0, largest + 1, True, "4", None):
        with pytest.raises(CheckpointError, match="x is .*: it must be from 1 to 16,777,216"):
            size_of({"x": size}, "x")
