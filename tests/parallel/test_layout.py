"""The grid of ranks: Megatron's order and groups."""

import pytest
import torch
import torch.distributed as dist

from megatron.parallel.layout import Layout
from tests.distributed import run_distributed


def test_rank_order_is_tensor_context_data_pipeline():
    layout = Layout.at(13, 16, tensor=2, context=2, pipeline=2)  # DP 2
    assert (layout.tensor.rank, layout.context.rank) == (1, 0)
    assert (layout.data.rank, layout.pipeline.rank) == (1, 1)
    assert layout.tensor.ranks == (12, 13)
    assert layout.context.ranks == (13, 15)
    assert layout.data.ranks == (9, 13)
    assert layout.pipeline.ranks == (5, 13)
    assert layout.replica.ranks == (9, 11, 13, 15)
    assert layout.replica.rank == 2
    assert layout.stages == [list(range(8)), list(range(8, 16))]
    assert [layout.stage_of(rank) for rank in (0, 7, 8, 15)] == [0, 0, 1, 1]
    assert Layout.at(3, 4).stages == [[0, 1, 2, 3]]


def test_the_pipeline_can_come_before_data():
    layout = Layout.at(13, 16, tensor=2, context=2, pipeline=2, pipeline_before_data=True)
    assert layout.describe() == "16 processes: TP 2, CP 2, PP 2, DP 2"
    assert layout.tensor.ranks == (12, 13)
    assert layout.context.ranks == (13, 15)
    assert layout.pipeline.ranks == layout.embedding.ranks == (9, 13)
    assert layout.data.ranks == (5, 13)
    assert layout.replica.ranks == (5, 7, 13, 15)
    assert layout.as_seen_by(13) == layout
    assert layout.stages == [[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]]
    assert layout.as_seen_by(3).replica.ranks == (1, 3, 9, 11)


def _sum_over_axes(layout):
    sums = []
    for axis in (layout.tensor, layout.data):
        value = torch.tensor([float(layout.world.rank)])
        dist.all_reduce(value, group=axis.group)
        sums.append(value.item())
    return sums


def test_groups_communicate_along_their_axis():
    torch.ones(3, requires_grad=True).sum().backward()  # forking still works after autograd
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
    order = {"context": 2, "pipeline": 2, "pipeline_before_data": True}
    groups = [ranks for ranks, _ in run_distributed(8, _replica_ranks, **order)]
    assert groups == 2 * [*2 * [[0, 1, 4, 5]], *2 * [[2, 3, 6, 7]]]
    assert run_distributed(4, _replica_ranks, tensor=4)[3] == (None, (3,))


def _fail_on_one(layout):
    if layout.world.rank == 1:
        raise ValueError("as planned")


def test_a_failing_rank_is_reported():
    with pytest.raises(RuntimeError, match="as planned"):
        run_distributed(2, _fail_on_one)


GRIDS = [
    (4, {"expert": 2}),
    (4, {"expert": 4}),
    (8, {"tensor": 2, "expert": 2}),
    (8, {"tensor": 2, "expert": 4, "expert_tensor": 1}),
    (8, {"tensor": 2, "context": 2, "expert": 2}),
    (8, {"context": 2, "expert": 4}),
    (8, {"pipeline": 2, "expert": 4}),
    (16, {"tensor": 2, "context": 2, "pipeline": 2, "expert": 2}),
    (16, {"tensor": 2, "context": 2, "pipeline": 2, "expert": 4, "expert_tensor": 1}),
    (24, {"tensor": 2, "pipeline": 3, "expert": 2, "expert_tensor": 1}),
]


@pytest.mark.parametrize(("world", "sizes"), GRIDS, ids=str)
def test_experts_fold_the_ranks_of_a_stage(world, sizes):
    """As in Megatron Core, rank = ((p * R + r) * E + e) * T + t, whatever the other axes are."""
    experts, stages = sizes["expert"], sizes.get("pipeline", 1)
    parts = sizes.get("expert_tensor", sizes.get("tensor", 1))
    replicas = world // (stages * experts * parts)
    for rank in range(world):
        layout = Layout.at(rank, world, **sizes)
        part, expert = rank % parts, rank // parts % experts
        replica, stage = rank // (parts * experts) % replicas, layout.pipeline.rank

        def number(e, t, r, p=stage):
            return ((p * replicas + r) * experts + e) * parts + t

        assert number(expert, part, replica) == rank
        expected = {
            "expert_tensor": [number(expert, t, replica) for t in range(parts)],
            "expert": [number(e, part, replica) for e in range(experts)],
            "expert_replica": [number(expert, part, r) for r in range(replicas)],
        }
        for name, ranks in expected.items():
            axis = getattr(layout, name)
            assert axis.ranks == tuple(ranks), (name, rank)
            assert axis.ranks[axis.rank] == rank
            assert axis.size == len(ranks)
        plain = Layout.at(rank, world, **{k: v for k, v in sizes.items() if "expert" not in k})
        for name in ("tensor", "context", "data", "pipeline", "replica", "embedding"):
            assert getattr(layout, name) == getattr(plain, name)


@pytest.mark.parametrize(("world", "sizes"), GRIDS, ids=str)
def test_experts_fold_the_same_ranks_of_a_stage_in_either_order(world, sizes):
    """Another order renumbers the ranks, and leaves each process with the same partners."""
    before = [Layout.at(rank, world, **sizes) for rank in range(world)]
    after = [Layout.at(rank, world, **sizes, pipeline_before_data=True) for rank in range(world)]
    places = [
        {(x.pipeline.rank, x.data.rank, x.context.rank, x.tensor.rank): x.world.rank for x in grid}
        for grid in (before, after)
    ]
    renamed = {rank: places[1][place] for place, rank in places[0].items()}
    for layout in before:
        other = after[renamed[layout.world.rank]]
        for name in ("tensor", "context", "data", "pipeline", "replica", "embedding", "expert",
                     "expert_tensor", "expert_replica"):  # fmt: skip
            axis = getattr(layout, name)
            assert getattr(other, name).ranks == tuple(renamed[rank] for rank in axis.ranks), name
            assert getattr(other, name).rank == axis.rank


def test_without_division_experts_are_replicated_as_other_layers_are():
    layout = Layout.at(5, 16, tensor=2, context=2, pipeline=2)
    assert not layout.divides_experts
    assert layout.expert.size == 1
    assert layout.expert_tensor.ranks == layout.tensor.ranks
    assert layout.expert_replica.ranks == layout.replica.ranks
    assert Layout.at(0, 4, tensor=2, expert_tensor=1).divides_experts
    divided = Layout.at(0, 4, tensor=2, expert=2, expert_tensor=1)
    assert divided.divides_experts
    assert divided.describe() == "4 processes: TP 2, CP 1, DP 2, PP 1, EP 2, ETP 1"
    assert layout.describe() == "16 processes: TP 2, CP 2, DP 2, PP 2"


def _expert_groups(layout):
    """Return the ranks of each expert axis, after checking its group by a sum."""
    found = {}
    for name in ("expert", "expert_tensor", "expert_replica"):
        axis = getattr(layout, name)
        value = torch.tensor([float(layout.world.rank)])
        if axis.size > 1:
            assert dist.get_process_group_ranks(axis.group) == list(axis.ranks)
            dist.all_reduce(value, group=axis.group)
        assert value.item() == sum(axis.ranks)
        found[name] = axis.ranks
    return found


@pytest.mark.parametrize(
    "sizes",
    [
        {"expert": 2},
        {"expert": 4},
        {"tensor": 2, "expert": 2},
        {"tensor": 2, "expert": 2, "expert_tensor": 1},
        {"tensor": 2, "expert": 4, "expert_tensor": 1},
        {"context": 2, "expert": 2},
        {"pipeline": 2, "expert": 2},
        {"pipeline": 2, "expert": 2, "pipeline_before_data": True},
    ],
    ids=str,
)
def test_expert_groups_communicate_along_their_axis(sizes):
    for rank, found in enumerate(run_distributed(4, _expert_groups, **sizes)):
        layout = Layout.at(rank, 4, **sizes)
        assert found == {name: getattr(layout, name).ranks for name in found}
