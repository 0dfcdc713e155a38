"""Checkpoints of Megatron Core whose attention rotates neighboring channels."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.checkpoint.core.rows import row_order
from megatron.checkpoint.loading import open_checkpoint
from megatron.errors import CheckpointError
from megatron.parallel.layout import Layout
from tests.checkpoint.core import core_files
from tests.checkpoint.states import read_all
from tests.training.toy import train_toy

HEADS, GROUPS, SIZE, ROTATED, HIDDEN = 4, 2, 12, 6, 20
MODEL = {
    "num_attention_heads": HEADS,
    "group_query_attention": True,
    "num_query_groups": GROUPS,
    "kv_channels": SIZE,
    "rotary_percent": 0.5,
    "rotary_interleaved": True,
}
_FLAGS = f"""
    --position-embedding-type rope --rotary-percent 0.5 --kv-channels {SIZE} --num-layers 3
    --group-query-attention --num-query-groups {GROUPS} --qk-layernorm --train-iters 2
""".split()
_TURNING = ("attention.qkv.", "attention.query_norm.", "attention.key_norm.")


def _rotate(x: Tensor, angles: Tensor, *, neighbors: bool) -> Tensor:
    """Rotate the first channels of each head [..., SIZE] by the angles [..., ROTATED / 2]."""
    pairs = (slice(0, ROTATED, 2), slice(1, ROTATED, 2))
    halves = (slice(0, ROTATED // 2), slice(ROTATED // 2, ROTATED))
    first, second = pairs if neighbors else halves
    out = x.clone()
    out[..., first] = x[..., first] * angles.cos() - x[..., second] * angles.sin()
    out[..., second] = x[..., second] * angles.cos() + x[..., first] * angles.sin()
    return out


def _projected(weight: Tensor, x: Tensor, angles: Tensor, *, neighbors: bool) -> tuple[Tensor, ...]:
    """Return the scores [g, n/g, s, s] and the values [s, g, d] of tokens [s, h]."""
    by_group = (x @ weight.T).view(len(x), GROUPS, HEADS // GROUPS + 2, SIZE)
    turned = _rotate(by_group[:, :, :-1], angles[:, None, None], neighbors=neighbors)
    return torch.einsum("sgnd,tgd->gnst", turned[:, :, :-1], turned[:, :, -1]), by_group[:, :, -1]


def test_reordered_rows_give_the_same_scores_and_values() -> None:
    generator = torch.Generator().manual_seed(3)
    theirs = torch.randn(GROUPS * (HEADS // GROUPS + 2) * SIZE, HIDDEN, generator=generator)
    x = torch.randn(5, HIDDEN, generator=generator)
    angles = torch.arange(5.0)[:, None] * torch.tensor([1.0, 0.3, 0.1])
    order = row_order(MODEL, "attention.qkv.weight", len(theirs))
    assert order is not None
    expected = _projected(theirs, x, angles, neighbors=True)
    found = _projected(theirs[order.positions], x, angles, neighbors=False)
    torch.testing.assert_close(found, expected)
    assert not torch.equal(order.positions, torch.arange(len(theirs)))


def _in_their_order(name: str, value: Tensor) -> Tensor:
    """Return one of our layer tensors [rows, ...] in Core's order."""
    if not any(part in name for part in _TURNING):
        return value
    by_head, heads = value.unflatten(0, (-1, SIZE)).clone(), HEADS // GROUPS + 2
    for number, head in enumerate(by_head):
        if "qkv" not in name or number % heads != heads - 1:
            turned = head[:ROTATED].clone()
            head[:ROTATED:2], head[1:ROTATED:2] = turned[: ROTATED // 2], turned[ROTATED // 2 :]
    return by_head.flatten(0, 1)


def test_a_checkpoint_is_read_in_our_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train_toy(Layout.single(), [*_FLAGS, "--save", str(tmp_path / "ours"), "--save-interval", "2"])
    ours = open_checkpoint(tmp_path / "ours")
    assert ours is not None
    read, arguments = core_files.read_whole, core_files.core_arguments

    def their_arguments(reader: Any) -> Namespace:
        return Namespace(**vars(arguments(reader)), rotary_interleaved=True)

    def in_their_order(reader: Any, name: str) -> Tensor:
        return _in_their_order(name, read(reader, name))

    monkeypatch.setattr(core_files, "core_arguments", their_arguments)
    monkeypatch.setattr(core_files, "read_whole", in_their_order)
    core_files.to_core(ours, tmp_path / "theirs")
    reader = open_checkpoint(tmp_path / "theirs")
    assert reader is not None
    found, expected = read_all(tmp_path / "theirs"), read_all(tmp_path / "ours")
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
    assert "rotary_interleaved" not in reader.meta["config"]["model"]


@pytest.mark.parametrize(
    ("changes", "rows", "message"),
    [
        ({}, 95, "attention.qkv.weight has 95 rows, which do not match num_attention_heads"),
        ({"rotary_percent": 0.25}, 96, "attention.qkv.weight has 96 rows, which do not match"),
        ({"rotary_percent": 1.5}, 96, "rotary_percent is 1.5: it must be above 0, at most 1"),
        ({"rotary_percent": "x"}, 96, "rotary_percent is 'x': it must be above 0, at most 1"),
        ({"kv_channels": 0}, 96, "kv_channels is 0: it must be from 1 to"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(
    changes: dict[str, Any], rows: int, message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        row_order(MODEL | changes, "attention.qkv.weight", rows)


def test_other_tensors_keep_their_order() -> None:
    assert row_order(MODEL, "attention.output.weight", 48) is None
    assert row_order(MODEL | {"rotary_interleaved": False}, "attention.qkv.weight", 96) is None
