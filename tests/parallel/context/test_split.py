"""Which tokens each context rank holds."""

import pytest
import torch

from megatron.data.gpt import make_batch
from megatron.parallel.context.split import (
    context_part,
    join_sequence,
    local_positions,
    split_for_all,
    split_sequence,
)
from megatron.parallel.layout import Axis


def axes(size):
    return [Axis(size=size, rank=rank, ranks=tuple(range(size))) for rank in range(size)]


def test_a_rank_holds_an_early_and_a_late_chunk():
    positions = [local_positions(8, axis).tolist() for axis in axes(2)]
    assert positions == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert local_positions(16, axes(4)[1]).tolist() == [2, 3, 12, 13]
    assert local_positions(5, Axis()).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_causal_work_is_even(size):
    """Position p attends to p + 1 tokens."""
    work = [(local_positions(24, axis) + 1).sum().item() for axis in axes(size)]
    assert work == [25 * 24 // 2 // size] * size


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_join_undoes_split(size, dim):
    x = torch.arange(8 * 8 * 8).view(8, 8, 8)
    parts = [split_sequence(x, axis, dim) for axis in axes(size)]
    assert torch.equal(join_sequence(parts, dim), x)
    if size > 1:
        for part, same in zip(parts, split_for_all(x, size, dim), strict=True):
            assert torch.equal(part, same)
            assert part.shape[dim] == 8 // size


def test_positions_are_where_the_parts_come_from():
    x = torch.randn(2, 24)
    for axis in axes(3):
        assert torch.equal(split_sequence(x, axis, 1), x[:, local_positions(24, axis)])


def test_a_batch_is_cut_alike():
    text = torch.randint(5, (2, 9), generator=torch.Generator().manual_seed(1))
    whole = make_batch({"text": text}, eod=0, reset_position_ids=True, eod_mask_loss=True)
    assert context_part(whole, Axis()) is whole
    parts = [context_part(whole, axis) for axis in axes(2)]
    for name in ("tokens", "labels", "loss_mask", "position_ids"):
        joined = join_sequence([getattr(part, name) for part in parts], 1)
        assert torch.equal(joined, getattr(whole, name))
        assert getattr(parts[0], name).shape == (2, 4)
