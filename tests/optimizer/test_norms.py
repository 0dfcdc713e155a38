"""Norms and counts: precision, and equal results however the model is split."""

import itertools
from dataclasses import replace
from math import sqrt

import pytest
import torch
from torch import nn

from megatron.config.optimizer import OptimizerConfig
from megatron.config.precision import PrecisionConfig
from megatron.kernels.tensor_sums import ROW, sum_of_squares
from megatron.optimizer.norms import is_counted_here, parameters_norm
from megatron.parallel.layout import Layout
from megatron.parallel.parameter import ZEROS, ParameterSpec
from tests.distributed import run_distributed
from tests.optimizer.stepping import step
from tests.parallel.buffers import new_buffer, new_optimizer, new_parameter

CPU = torch.device("cpu")


@pytest.mark.parametrize("elements", [0, 1, ROW - 1, ROW, 3 * ROW + 5])
def test_sum_of_squares(elements):
    tensor = torch.randn(elements)
    expected = tensor.double().square().sum().item()
    assert sum_of_squares([tensor, tensor], CPU).item() == pytest.approx(2 * expected, rel=1e-6)


def test_long_sums_keep_their_precision():
    """A sequential fp32 sum of this many equal squares would be off by 1e-2."""
    tensor = torch.full((2**24,), 0.1)
    expected = tensor.double().square().sum().item()
    assert sum_of_squares([tensor], CPU).item() == pytest.approx(expected, rel=1e-5)


def test_16bit_squares_do_not_overflow():
    tensor = torch.full((100,), 6e4, dtype=torch.float16)
    assert sum_of_squares([tensor], CPU).item() == pytest.approx(100 * tensor[0].item() ** 2)


def _split_model(layout):
    """Return a column-split weight [8, 3] and a replicated bias [3], with gradients."""
    generator = torch.Generator().manual_seed(0)
    weight = new_parameter((8, 3), init=ZEROS, axis=layout.tensor, split_dim=0)
    bias = new_parameter((3,), init=ZEROS)
    whole = torch.randn(8, 3, generator=generator)
    whole[:, 1] = 0.0
    rows = weight.shape[0]
    first = layout.tensor.rank * rows
    named = [("weight", weight), ("bias", bias)]
    gradients = new_buffer(named, layout, accumulate_in_fp32=False)
    gradients.gradient(weight).copy_(whole[first : first + rows])
    gradients.gradient(bias).copy_(torch.tensor([3.0, 0.0, 4.0]))
    with torch.no_grad():
        weight.copy_(whole[first : first + rows])
        bias.fill_(2.0)
    norm = parameters_norm([weight, bias], layout)
    optimizer = new_optimizer(
        named, gradients, OptimizerConfig(), PrecisionConfig(), layout, count_zeros=True
    )
    result = step(optimizer, 1e-2, 0.0)
    return norm, result.grad_norm, result.zeros


def test_tensor_ranks_count_every_element_once():
    alone = _split_model(Layout.single())
    square = alone[1] ** 2 - 25
    assert alone[0] == pytest.approx(sqrt(square + 12))
    assert alone[2] == 9
    for ranks in (
        run_distributed(2, _split_model, tensor=2),
        run_distributed(4, _split_model, tensor=2),
    ):
        assert all(rank == ranks[0] for rank in ranks)
        assert ranks[0] == pytest.approx(alone, rel=1e-6)


@pytest.mark.parametrize("is_sharded", [False, True])
@pytest.mark.parametrize(
    "sizes",
    [
        {"tensor": 2},
        {"tensor": 2, "context": 2},
        {"expert": 2},
        {"tensor": 2, "expert": 2},
        {"tensor": 2, "expert_tensor": 1},
        {"tensor": 2, "expert": 4, "expert_tensor": 1},
        {"expert": 2, "expert_tensor": 2},
    ],
)
def test_every_part_of_a_parameter_is_counted_by_one_process(sizes, is_sharded):
    layouts = [Layout.at(rank, 8, **sizes) for rank in range(8)]
    first = layouts[0]
    for is_expert, split_dim in itertools.product((False, True), (None, 0)):
        parameter = nn.Parameter(torch.zeros(4, 2))
        shape = (4, 2)
        parameter.spec = ParameterSpec(shape, shape, (0, 0), ZEROS, split_dim, is_expert=is_expert)
        summed = range(8) if first.divides_experts else first.tensor.ranks
        if is_sharded and not first.divides_experts:
            summed = [t + r for t in first.tensor.ranks for r in first.replica.ranks]
        counted = sum(
            is_counted_here(parameter, layouts[rank], is_sharded=is_sharded) for rank in summed
        )
        tensor, replica = first.tensor, first.replica
        if is_expert:
            tensor, replica = first.expert_tensor, first.expert_replica
        parts = tensor.size if split_dim == 0 else 1
        parts *= first.expert.size if is_expert else 1
        assert counted == parts * (replica.size if is_sharded else 1)
        parameter.spec = replace(parameter.spec, is_copy=True)
        assert not any(is_counted_here(parameter, each) for each in layouts)


def _stage(layout):
    parameter = nn.Parameter(torch.full((4,), 3.0 if layout.pipeline.is_first else 4.0))
    return parameters_norm([parameter], layout)


def test_pipeline_stages_add_up():
    assert run_distributed(2, _stage, pipeline=2) == [10.0, 10.0]


def _sizes(layout, stage):
    """Return the sizes of a column-split weight [8, 3] and a bias [3], after an update."""
    weight = new_parameter((8, 3), init=ZEROS, axis=layout.tensor, split_dim=0)
    bias = new_parameter((3,), init=ZEROS)
    named = [("weight", weight), ("bias", bias)]
    for _, parameter in named:
        parameter.data.zero_()
    gradients = new_buffer(named, layout, accumulate_in_fp32=True, zero_stage=stage)
    config = OptimizerConfig(clip_grad=0.0)
    optimizer = new_optimizer(named, gradients, config, PrecisionConfig(), layout)
    for _, parameter in named:
        gradients.gradient(parameter).fill_(2.0)
    step(optimizer, 0.5, 0.0)
    return optimizer.sizes()


def test_sizes_of_weights_and_states_count_every_element_once():
    expected = {}
    for name, value in {
        "weight": 0.5,
        "momentum": 0.2,
        "variance": 0.004,
        "variance_sqrt": sqrt(0.004),
    }.items():
        expected |= {f"{name}_l1": 27 * value, f"{name}_l2": sqrt(27) * value}
        expected[f"{name}_abs_max"] = value
    assert _sizes(Layout.single(), 0) == pytest.approx(expected, rel=1e-5)
    for world, stage, axes in (
        (2, 0, {"tensor": 2}),
        (2, 0, {}),
        (2, 1, {}),
        (4, 2, {"tensor": 2}),
    ):
        for sizes in run_distributed(world, _sizes, stage, **axes):
            assert sizes == pytest.approx(expected, rel=1e-5)
