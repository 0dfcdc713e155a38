"""Adapters of a layer equal changed weights: outputs, gradients, merged and stacked matrices."""

import math

import pytest
import torch
import torch.nn.functional as F

from megatron.kernels.grouped import Grouping
from megatron.parallel.adapter import WHOLE, Adapter, AdapterPlan, projections_of
from megatron.parallel.adapter_stack import (
    AdapterRows,
    AdapterStack,
    ExpertAdapterStack,
    LayerAdapter,
)
from megatron.parallel.build import BuildContext
from megatron.parallel.collectives import NO_COMMUNICATION
from megatron.parallel.expert_linear import ExpertAdapter, ExpertLinear
from megatron.parallel.layers import Linear, Projections
from megatron.parallel.layout import Layout
from megatron.parallel.parameter import Init, initialize, spec_of
from megatron.parallel.products import Products

IN, INIT = 6, Init("normal", 0.5)
# Two groups of 4 rows of queries, 2 of keys and 2 of values; or two projections, one below another.
GROUPED = Projections(("query", "key", "value"), (8, 4, 4), groups=2)
STACKED = Projections(("gate", "up"), (5, 5))
ROWS = {
    "query": [0, 1, 2, 3, 8, 9, 10, 11],
    "key": [4, 5, 12, 13],
    "value": [6, 7, 14, 15],
    "gate": [0, 1, 2, 3, 4],
    "up": [5, 6, 7, 8, 9],
    WHOLE: [*range(7)],
}
CASES = [
    (GROUPED, ("query", "key", "value")),
    (GROUPED, ("query", "value")),
    (GROUPED, ("key",)),
    (STACKED, ("gate", "up")),
    (STACKED, ("up",)),
    (None, (WHOLE,)),
]


def _layer(projections, names, split="column", **settings):
    """Return a frozen layer with an adapter, all of whose matrices have values."""
    context = BuildContext(Layout.single())
    out = 7 if projections is None else sum(projections.widths)
    options = {"split": split, "init": INIT, "projections": projections}
    layer = Linear(IN, out, context, **options)
    initialize(layer.named_parameters(), seed=1)
    layer.requires_grad_(False)
    layer.bias.uniform_(-1, 1)
    layer.adapter = Adapter(layer, names, AdapterPlan(3, 2.0, **settings), context, "site")
    initialize(layer.adapter.named_parameters(prefix="x"), seed=2)
    return layer


def _fill(adapter):
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in adapter.named_parameters():
            if name.endswith(("b", "magnitude")):
                parameter.copy_(torch.rand(parameter.shape, generator=generator) + 0.5)


def _changed(layer, parameters, *, is_dora=False):
    """Return the changed weight [out, in], from its definition."""
    weight = layer.weight.flatten(0, -2).clone()
    magnitudes = {}
    for name in {key.split(".")[0] for key in parameters}:
        a, b = (parameters[f"{name}.{kind}"] for kind in "ab")
        weight = weight.index_add(0, torch.tensor(ROWS[name]), 2.0 * b @ a)
        if is_dora:
            magnitudes |= dict(zip(ROWS[name], parameters[f"{name}.magnitude"], strict=True))
    if is_dora:
        norms = weight.detach().norm(dim=1)
        factors = [magnitudes.get(row, norm) / norm for row, norm in enumerate(norms)]
        weight = weight * torch.stack(factors)[:, None]
    return weight


def _leaves(adapter):
    return {name: p.detach().clone().requires_grad_() for name, p in adapter.named_parameters()}


@pytest.mark.parametrize("is_dora", [False, True])
@pytest.mark.parametrize(("projections", "names"), CASES)
def test_a_layer_with_an_adapter_has_changed_weights(projections, names, is_dora):
    layer = _layer(projections, names, is_dora=is_dora)
    adapter = layer.adapter
    assert projections_of(layer) == ((WHOLE,) if projections is None else projections.names)
    assert list(adapter) == [name for name in projections_of(layer) if name in names]
    x = torch.randn(4, 2, IN, generator=torch.Generator().manual_seed(4))
    plain = F.linear(x, layer.weight.flatten(0, -2), layer.bias.flatten())
    if is_dora:
        adapter.start(layer.weight)
        for name in names:
            norms = layer.weight.flatten(0, -2).norm(dim=1)[ROWS[name]]
            torch.testing.assert_close(adapter[name].magnitude.detach(), norms)
    torch.testing.assert_close(layer(x), plain)  # B is zero
    _fill(adapter)
    leaves = _leaves(adapter)
    weight = _changed(layer, leaves, is_dora=is_dora)
    ours, theirs = (x.clone().requires_grad_() for _ in range(2))
    grad = torch.randn(plain.shape, generator=torch.Generator().manual_seed(5))
    expected = F.linear(theirs, weight, layer.bias.flatten())
    expected.backward(grad)
    wanted = {name: leaf.grad for name, leaf in leaves.items()}

    def separately(x):  # as with several ranks, or with dropout
        x, low = adapter.project_down(x)
        out = F.linear(x, layer.weight.flatten(0, -2)).clone()
        return adapter.add_product(low, out, layer.weight) + layer.bias.flatten()

    for compute in (layer, separately):
        ours.grad = None
        adapter.zero_grad()
        out = compute(ours)
        torch.testing.assert_close(out, expected)
        out.backward(grad)
        torch.testing.assert_close(ours.grad, theirs.grad)
        found = {name: parameter.grad for name, parameter in adapter.named_parameters()}
        torch.testing.assert_close(found, wanted)
    merged = adapter.merged(layer.weight)
    assert merged.shape == layer.weight.shape
    torch.testing.assert_close(merged.flatten(0, -2), weight.detach())
    delta = weight.detach() - layer.weight.flatten(0, -2)
    if not is_dora:
        torch.testing.assert_close(adapter.delta_weight(torch.float64).float(), delta)
    a, b, ratio = adapter.inference_matrices(layer.weight)
    factor = torch.ones(len(weight), 1) if ratio is None else ratio[:, None]
    assert (ratio is not None) == is_dora
    matrix = (layer.weight.flatten(0, -2) + b @ a) * factor
    torch.testing.assert_close(matrix, weight.detach())


def test_nothing_is_computed_for_what_is_not_trained():
    layer = _layer(None, (WHOLE,))
    _fill(layer.adapter)
    x = torch.randn(4, 2, IN)
    for frozen in ("a", "b"):
        layer.adapter.requires_grad_(True)
        getattr(layer.adapter[WHOLE], frozen).requires_grad_(False)
        layer.adapter.zero_grad()
        layer(x).sum().backward()
        has_gradient = {
            name: p.grad is not None for name, p in layer.adapter[WHOLE].named_parameters()
        }
        assert has_gradient == {"a": frozen != "a", "b": frozen != "b"}


def test_dropout_is_of_the_adapter_s_input_in_training():
    layer = _layer(None, (WHOLE,), dropout=0.5)
    _fill(layer.adapter)
    x = torch.ones(64, 4, IN)
    assert layer.adapter.product(x, layer.weight) is None
    dropped = layer(x) - F.linear(x, layer.weight, layer.bias)
    layer.eval()
    assert layer.adapter.product(x, layer.weight) is not None
    whole = layer(x) - F.linear(x, layer.weight, layer.bias)
    assert not torch.allclose(dropped, whole)
    torch.testing.assert_close(dropped.mean((0, 1)), whole.mean((0, 1)), rtol=0.3, atol=0.3)


def test_matrices_start_as_in_peft():
    layer = _layer(GROUPED, GROUPED.names, is_dora=True)
    for name, width in zip(GROUPED.names, GROUPED.widths, strict=True):
        weights = layer.adapter[name]
        assert weights.a.shape == (3, IN)
        assert weights.b.shape == (width, 3)
        assert weights.magnitude.tolist() == [1] * width
        assert spec_of(weights.a).init == Init("uniform", 1 / math.sqrt(IN))
        assert not weights.b.any()


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("split", ["column", "row", None])
def test_matrices_are_split_like_the_weight(split, sequence_parallel):
    layout = Layout.at(1, 2, tensor=2, sequence_parallel=sequence_parallel)
    context = BuildContext(layout)
    layer = Linear(IN, 16, context, split=split, init=INIT, projections=GROUPED)
    adapter = Adapter(layer, ("query",), AdapterPlan(3, 2.0, is_dora=True), context, "site")
    specs = {name: spec_of(p) for name, p in adapter["query"].named_parameters()}
    split_dims = {name: spec.split_dim for name, spec in specs.items()}
    partial = {name for name, spec in specs.items() if spec.partial_gradient}
    assert (
        split_dims
        == {
            "column": {"a": None, "b": 0, "magnitude": 0},
            "row": {"a": 1, "b": None, "magnitude": None},
            None: {"a": None, "b": None, "magnitude": None},
        }[split]
    )
    whole = {name for name, dim in split_dims.items() if dim is None}
    assert partial == (whole if sequence_parallel else set())
    shapes = {name: tuple(p.shape) for name, p in adapter["query"].named_parameters()}
    rows, inputs = (4 if split == "column" else 8), (3 if split == "row" else IN)
    assert shapes == {"a": (3, inputs), "b": (rows, 3), "magnitude": (rows,)}
    assert adapter.groups == (1 if split == "column" else 2)
    assert adapter.rows == {"query": 4, "key": 2, "value": 2}


class _InInference(Products):
    """Products that record no statistics of their inputs."""

    def forward(self, call, communication=NO_COMMUNICATION):
        assert not call.training
        return super().forward(call, communication)


def test_each_token_uses_its_adapter_or_none():
    layers = [_layer(GROUPED, names, is_dora=dora) for names, dora in (
        (("query", "value"), False), (("key",), True), (GROUPED.names, False))]  # fmt: skip
    first = layers[0]
    weights = [first.weight]
    for seed, layer in enumerate(layers):
        with torch.no_grad():
            layer.weight.copy_(first.weight)
            layer.adapter.start(layer.weight)
            for parameter in layer.adapter.parameters():
                parameter.copy_(
                    torch.rand(parameter.shape, generator=torch.Generator().manual_seed(seed))
                )
        weights.append(layer.adapter.merged(layer.weight))
    rows = AdapterRows(("x", "y", "z"))
    adapters = [LayerAdapter.of(i + 1, one.adapter, first.weight) for i, one in enumerate(layers)]
    stacks = [
        AdapterStack(first, adapters, rows, _InInference(), Layout.single(), of_outputs=of_outputs)
        for of_outputs in (False, True)
    ]
    x = torch.randn(5, 1, IN)
    bias = first.bias
    for stack in stacks:
        first.adapter = stack
        rows.of_tokens = rows.of_outputs = None
        torch.testing.assert_close(first(x), F.linear(x, first.weight, bias))
        assert stack.for_tokens(5) is None
    rows.of_tokens, rows.of_outputs = torch.tensor([2, 0, 1, 3, 2]), torch.tensor([1, 1, 3, 0, 2])
    for stack, chosen in zip(stacks, (rows.of_tokens, rows.of_outputs), strict=True):
        first.adapter = stack
        expected = [F.linear(one, weights[i], bias) for one, i in zip(x, chosen, strict=True)]
        torch.testing.assert_close(first(x), torch.stack(expected))
        used = stack.for_tokens(3)
        low = (x[:3, 0] @ used.a.t()) * used.mask
        out = (F.linear(x[:3, 0], first.weight) + low @ used.b.t()) * used.ratios + bias
        torch.testing.assert_close(out, torch.stack(expected)[:3, 0])
    first.adapter = stacks[0]
    with stacks[0].reading(lambda: torch.tensor([4, 4, 1, 0, 2])):
        assert rows.of_tokens.tolist() == [2, 2, 0, 2, 1]
    assert rows.of_tokens.tolist() == [2, 0, 1, 3, 2]
    rows.of_tokens = None
    with stacks[0].reading(lambda: 1 / 0):  # it is not asked
        assert rows.of_tokens is None


@torch.no_grad()
def test_each_token_uses_its_adapter_in_each_expert():
    context = BuildContext(Layout.single())
    layer = ExpertLinear((2, 2, 3, IN), context, split_dim=2, init=INIT, bias=True)
    initialize(layer.named_parameters(), seed=1)
    layer.requires_grad_(False)
    layer.bias.uniform_(-1, 1)
    weights, adapters = [layer.weight.view(2, 6, IN)], []
    for number, rank in ((1, 3), (2, 5)):
        adapter = ExpertAdapter(layer, AdapterPlan(rank, 2.0), context)
        initialize(adapter.named_parameters(prefix=str(number)), seed=number)
        assert not adapter[WHOLE].b.any()
        assert adapter[WHOLE].a.shape == (2, rank, IN)
        assert spec_of(adapter[WHOLE].a).init.scale == 1 / math.sqrt(IN)
        with torch.no_grad():
            adapter[WHOLE].b.uniform_(-1, 1)
            a, b = adapter[WHOLE].a, adapter[WHOLE].b.view(2, 6, rank)
            weights.append(weights[0] + 2.0 * b @ a)
        merged = adapter.merged(layer.weight)
        torch.testing.assert_close(merged.view(2, 6, IN), weights[-1])
        adapters.append(LayerAdapter.of(number, adapter, layer.weight))
    choices = torch.tensor([[0], [1], [1], [0], [1]])
    grouping, x = Grouping.of(choices, 2), torch.randn(5, IN)
    rows = AdapterRows(("x", "y"))
    layer.adapter = ExpertAdapterStack(adapters, rows, layer._product)
    assert layer.adapter.owners.tolist() == [1] * 3 + [2] * 5  # without padding
    assert (
        ExpertAdapterStack(adapters[:1], rows, layer._product).owners.tolist() == [1] * 3 + [-1] * 5
    )

    def expected(of_tokens):
        outputs = []
        for token in grouping.tokens.tolist():
            expert = choices[token, 0]
            weight, bias = weights[of_tokens[token]][expert], layer.bias[expert].flatten()
            outputs.append(F.linear(x[token], weight, bias))
        return torch.stack(outputs)

    given = x[grouping.tokens]
    torch.testing.assert_close(layer(given, grouping), expected([0] * 5))
    for of_tokens in ([1, 2, 0, 2, 1], [0, 0, 2, 0, 0]):
        rows.of_tokens = torch.tensor(of_tokens)
        torch.testing.assert_close(layer(given, grouping), expected(of_tokens))
