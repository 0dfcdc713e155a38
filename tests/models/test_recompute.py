"""The recomputation plan: which layers run together and which are computed again."""

import pytest

from megatron.config.training import TrainingOptions
from megatron.models.recompute import LayerGroup, RecomputePlan, layer_groups


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        (None, [(range(2, 7), False)]),
        (RecomputePlan("selective"), [(range(2, 7), False)]),
        (
            RecomputePlan("full", "uniform", 2),
            [(range(2, 4), True), (range(4, 6), True), (range(6, 7), True)],
        ),
        (
            RecomputePlan("full", "block", 2),
            [(range(2, 3), True), (range(3, 4), True), (range(4, 7), False)],
        ),
        (RecomputePlan("full", "block", 5), [(range(i, i + 1), True) for i in range(2, 7)]),
    ],
)
def test_groups(plan, expected):
    assert layer_groups(plan, range(2, 7)) == [LayerGroup(*group) for group in expected]


@pytest.mark.parametrize(
    ("flags", "plan"),
    [
        ({}, None),
        ({"recompute_granularity": "selective"}, RecomputePlan("selective")),
        ({"recompute_granularity": "full"}, RecomputePlan("full", "uniform", 1)),
        (
            {
                "recompute_granularity": "full",
                "recompute_method": "block",
                "recompute_num_layers": 3,
            },
            RecomputePlan("full", "block", 3),
        ),
    ],
)
def test_plan_from_flags(flags, plan):
    assert RecomputePlan.from_config(TrainingOptions(**flags)) == plan
