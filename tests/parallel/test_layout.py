"""The grid of ranks: Megatron's order and groups."""

import pytest
import torch
import torch.distributed as dist

from megatron.parallel.layout import Layout
from tests.distributed import run_distributed


def test_rank_order_is_tensor_context_data_pipeline():
    layout = Layout.at(13, 16, tensor=2, context=2, pipeline=2)  # data 2
    assert (layout.tensor.rank, layout.context.rank) == (1, 0)
    assert (layout.data.rank, layout.pipeline.rank) == (1, 1)
    assert layout.tensor.ranks == (12, 13)
    assert layout.context.ranks == (13, 15)
    assert layout.data.ranks == (9, 13)
    assert layout.pipeline.ranks == (5, 13)
    assert layout.replica.ranks == (9, 11, 13, 15)
    assert layout.replica.rank == 2


def _sum_over_axes(layout):
    sums = []
    for axis in (layout.tensor, layout.data):
        value = torch.tensor([float(layout.world.rank)])
        dist.all_reduce(value, group=axis.group)
        sums.append(value.item())
    return sums


def test_groups_talk_along_their_axis():
    torch.ones(3, requires_grad=True).sum().backward()  # a parent that has used autograd may fork
    assert run_distributed(4, _sum_over_axes, tensor=2) == [[1, 2], [1, 4], [5, 2], [5, 4]]


def _sum_over_ends(layout):
    value = torch.tensor([float(layout.world.rank)])
    if layout.embedding.size > 1:
        dist.all_reduce(value, group=layout.embedding.group)
    return value.item(), layout.embedding.size


def test_pipeline_ends_share_an_axis():
    results = run_distributed(6, _sum_over_ends, tensor=2, pipeline=3)
    assert results == [(4, 2), (6, 2), (2, 1), (3, 1), (4, 2), (6, 2)]


def _replica_ranks(layout):
    assert layout.replica.ranks[layout.replica.rank] == layout.world.rank
    group = layout.replica.group
    return dist.get_process_group_ranks(group) if group else None, layout.replica.ranks


@pytest.mark.parametrize("sizes", [{}, {"context": 2}, {"context": 4}, {"tensor": 2}])
def test_replicas_are_data_and_context_ranks(sizes):
    for ranks, expected in run_distributed(4, _replica_ranks, **sizes):
        assert ranks == list(expected)
    assert run_distributed(4, _replica_ranks, tensor=4)[3] == (None, (3,))


def _fail_on_one(layout):
    if layout.world.rank == 1:
        raise ValueError("as planned")


def test_a_failing_rank_is_reported():
    with pytest.raises(RuntimeError, match="as planned"):
        run_distributed(2, _fail_on_one)
