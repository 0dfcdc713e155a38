"""Linear layers of experts: how ranks split them, and each expert's product with its rows."""

import math

import pytest
import torch
import torch.nn.functional as F

from megatron.kernels.grouped import Grouping
from megatron.parallel.adapter import AdapterPlan
from megatron.parallel.build import BuildContext
from megatron.parallel.expert_linear import ExpertAdapterWeights, ExpertLinear
from megatron.parallel.layout import Layout
from megatron.parallel.parameter import Init, initialize, spec_of
from tests.parallel.buffers import new_buffer

INIT = Init("normal", 0.5)
SHAPES = {"up": ((4, 2, 6, 8), 2), "down": ((4, 8, 6), 2)}  # with the dimension that is split
GROUPING = Grouping.of(torch.tensor([[0, 2], [2, -1], [1, 0], [2, 3]]), 4)


def _layer(kind, layout):
    shape, split_dim = SHAPES[kind]
    layer = ExpertLinear(shape, BuildContext(layout), split_dim=split_dim, init=INIT, bias=True)
    initialize(layer.named_parameters(), seed=1)
    with torch.no_grad():
        layer.bias.copy_(torch.arange(float(layer.bias.numel())).view_as(layer.bias))
    return layer


@pytest.mark.parametrize("kind", SHAPES)
def test_each_expert_multiplies_its_rows(kind):
    layer = _layer(kind, Layout.single())
    rows = torch.randn(len(GROUPING.tokens), layer.weight.shape[-1])
    experts = GROUPING.expert_of_row().tolist()
    assert sorted(set(experts[:7])) == [0, 1, 2, 3]
    ours, theirs = (rows.clone().requires_grad_() for _ in range(2))
    weight = layer.weight.detach().clone().requires_grad_()
    bias = layer.bias.detach().clone().requires_grad_()
    expected = [
        F.linear(row, weight[expert].flatten(0, -2), bias[expert].flatten())
        for row, expert in zip(theirs[:7], experts, strict=False)
    ]
    out = layer(ours, GROUPING)
    torch.testing.assert_close(out[:7], torch.stack(expected))
    grad = torch.randn(7, out.shape[1])
    torch.stack(expected).backward(grad)
    out[:7].backward(grad)
    for found, wanted in ((ours, theirs), (layer.weight, weight), (layer.bias, bias)):
        torch.testing.assert_close(found.grad, wanted.grad)


@pytest.mark.parametrize(
    ("kind", "shape", "offset", "bias_split", "partial", "share"),
    [
        ("up", (2, 2, 3, 8), (2, 0, 3, 0), 2, False, 1.0),
        ("down", (2, 8, 3), (2, 0, 3), None, True, 0.5),
    ],
)
def test_ranks_hold_parts_of_some_experts(kind, shape, offset, bias_split, partial, share):
    """Ranks that split inputs each add a share of the bias, since their outputs are summed."""
    layer = _layer(kind, Layout.at(3, 4, tensor=2, expert=2, expert_tensor=2))
    weight, bias = spec_of(layer.weight), spec_of(layer.bias)
    assert (layer.weight.shape, weight.offset) == (shape, offset)
    assert weight.is_expert
    assert bias.is_expert
    assert not weight.partial_gradient
    assert (bias.split_dim, bias.partial_gradient) == (bias_split, partial)
    assert layer.bias.shape == shape[:-1]
    grouping = Grouping.of(torch.tensor([[1], [0]]), 2)
    rows = torch.ones(2, shape[-1])
    biases = layer.bias.flatten(1)
    plain = torch.stack([layer.weight[expert].flatten(0, -2).sum(1) for expert in (0, 1)])
    torch.testing.assert_close(layer(rows, grouping), plain + share * biases)


@pytest.mark.parametrize(
    ("kind", "a", "b"),
    [
        ("up", ((2, 3, 8), None, True), ((2, 2, 3, 3), 2, False)),
        ("down", ((2, 3, 3), 2, False), ((2, 8, 3), None, True)),
    ],
)
def test_adapters_are_split_like_the_weight(kind, a, b):
    layout = Layout.at(3, 4, tensor=2, expert=2, expert_tensor=2)
    layer = _layer(kind, layout)
    weights = ExpertAdapterWeights(layer, AdapterPlan(3, 2.0), BuildContext(layout))
    for parameter, expected in ((weights.a, a), (weights.b, b)):
        spec = spec_of(parameter)
        assert (tuple(parameter.shape), spec.split_dim, spec.partial_gradient) == expected
        assert spec.is_expert
    inputs = SHAPES[kind][0][-1]
    assert spec_of(weights.a).init == Init("uniform", 1 / math.sqrt(inputs))


@pytest.mark.parametrize("halves", [False, True])
def test_gradients_of_both_halves_of_a_micro_batch_are_waited_for(halves):
    context = BuildContext(Layout.single(), halves_experts=halves)
    layer = ExpertLinear((4, 8, 6), context, split_dim=2, init=INIT, bias=False)
    initialize(layer.named_parameters(), seed=1)
    buffer = new_buffer(layer.named_parameters(), Layout.single(), accumulate_in_fp32=True)
    context.registry.bind_slots(buffer)
    assert buffer._uses == {id(layer.weight): 1 + halves}
    later = []
    rows = torch.ones(len(GROUPING.tokens), 6)  # which need no gradient themselves
    layer(rows, GROUPING, later)[:7].sum().backward()
    assert not buffer.gradient(layer.weight).any()
    (compute,) = later
    compute()
    counts = torch.tensor([2.0, 1, 3, 1]).view(4, 1, 1)
    assert torch.equal(buffer.gradient(layer.weight), counts.expand(4, 8, 6))
