"""Muon: against PyTorch's, against its other forms, and distributed over processes."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from megatron.config.optimizer import OptimizerConfig
from megatron.config.precision import PrecisionConfig
from megatron.optimizer import muon
from megatron.optimizer import optimizer as optimizers
from megatron.optimizer.groups import ParameterGroup
from megatron.optimizer.muon import COEFFICIENTS, Muon, RowExchange, cost_of, orthogonalize
from megatron.optimizer.update import MatrixShard
from megatron.parallel.layout import Axis, Layout
from megatron.parallel.parameter import ZEROS, Matrices, ParameterSpec
from tests.distributed import run_sharing_memory
from tests.optimizer.stepping import step
from tests.parallel.buffers import new_buffer, new_optimizer


def _spec(shape, *, shares=(), split_dim=None):
    whole = tuple(shape)
    return ParameterSpec(
        whole, whole, (0,) * len(whole), ZEROS, split_dim, matrices=Matrices(tuple(shares))
    )


def _named(shapes, shares=None, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    named = {}
    for name, shape in shapes.items():
        named[name] = nn.Parameter((0.1 * torch.randn(shape, generator=generator)).to(dtype))
        named[name].spec = _spec(shape, shares=(shares or {}).get(name, ()))
    return named


def _optimizer(named, **flags):
    layout = Layout.single()
    gradients = new_buffer(named.items(), layout, accumulate_in_fp32=True, whole=list(named))
    config = OptimizerConfig(optimizer="muon", **flags)
    return new_optimizer(named.items(), gradients, config, PrecisionConfig(), layout), gradients


def _update(named, optimizer, gradients, values, lr=1e-3, weight_decay=0.1):
    gradients.zero()
    with gradients.micro_batch(is_last=True):
        sum((p * values[name]).sum() for name, p in named.items()).backward()
    gradients.reduce()
    return step(optimizer, lr, weight_decay)


SHAPES = {"a": (24, 10), "b": (10, 24), "c": (24, 10), "d": (16, 16)}


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize(
    ("mode", "factor", "theirs"),
    [("shape_scaling", 1.0, "original"), ("spectral", 0.2, "match_rms_adamw")],
)
def test_equals_pytorchs_over_20_updates(nesterov, mode, factor, theirs):
    named, other = _named(SHAPES), _named(SHAPES)
    optimizer, gradients = _optimizer(
        named,
        clip_grad=0.0,
        muon_momentum=0.95,
        muon_use_nesterov=nesterov,
        muon_scale_mode=mode,
        muon_extra_scale_factor=factor,
        muon_coefficient_type="simple",
    )
    reference = torch.optim.Muon(
        other.values(),
        lr=1e-3,
        weight_decay=0.1,
        momentum=0.95,
        nesterov=nesterov,
        adjust_lr_fn=theirs,
    )
    for update in range(20):
        generator = torch.Generator().manual_seed(100 + update)
        values = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
        assert _update(named, optimizer, gradients, values).applied
        for name, p in other.items():
            p.grad = values[name].clone()
        reference.step()
    for name, p in named.items():
        # Momenta that differ in their last bit may round to different bf16, which changes an update
        # by up to 1e-5. Whether that happens depends on the CPU.
        torch.testing.assert_close(p, other[name], rtol=0, atol=2e-5)
        held = optimizer.named_tensors()[f"{name}.momentum_buffer"][0]
        torch.testing.assert_close(held, reference.state[other[name]]["momentum_buffer"])


def test_singular_values_come_close_to_1():
    x = torch.randn(3, 12, 20, generator=torch.Generator().manual_seed(1))
    for name, within in (("simple", 0.35), ("quintic", 0.2)):
        found = orthogonalize(x, COEFFICIENTS[name], 5, precision="highest")
        left, values, right = torch.linalg.svd(x, full_matrices=False)
        assert (torch.linalg.svdvals(found) - 1).abs().max() < within
        # The singular vectors are those of x.
        inner = left.mT @ found @ right.mT
        assert (inner - torch.diag_embed(inner.diagonal(dim1=1, dim2=2))).abs().max() < 1e-4
        assert values.max() > 3  # the matrices were not orthogonal


@pytest.mark.parametrize("shape", [(2, 7, 3), (2, 3, 7), (1, 5, 5), (3, 1, 4), (2, 4, 1)])
@pytest.mark.parametrize("name", list(COEFFICIENTS))
@pytest.mark.parametrize("size", [1e-3, 100.0])
def test_the_iterations_apply_their_polynomials_to_the_singular_values(shape, name, size):
    x = size * torch.randn(shape, generator=torch.Generator().manual_seed(2))
    x[0, 0] = 0  # without full rank
    left, values, right = torch.linalg.svd(x.double(), full_matrices=False)
    values = values / values.square().sum(-1, keepdim=True).sqrt().clamp(min=1e-7)
    for i in range(7):
        a, b, c = COEFFICIENTS[name][i % len(COEFFICIENTS[name])]
        values = a * values + b * values**3 + c * values**5
    expected = left @ torch.diag_embed(values) @ right
    for precision, within in (("highest", 2e-4), ("medium", 0.1)):
        given = x.bfloat16() if precision == "medium" else x
        found = orthogonalize(given, COEFFICIENTS[name], 7, precision=precision)
        assert found.dtype == given.dtype
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=within)


def test_a_matrix_that_is_almost_zero_is_divided_by_the_minimum_norm():
    x = torch.zeros(1, 2, 3)
    x[0, 0, 0] = 1e-8
    a, b, c = 3.4445, -4.7750, 2.0315
    found = orthogonalize(x, COEFFICIENTS["simple"], 1, precision="highest")
    assert found[0, 0, 0].item() == pytest.approx(a * 0.1 + b * 0.1**3 + c * 0.1**5, rel=1e-5)
    assert found.count_nonzero() == 1


# Shape, rows of each projection in a group, and dimension that is split over two processes.
_SPLIT = [((4, 9), (), 0), ((4, 10), (), 1), ((24, 6), (2, 1, 1), 0), ((2, 9, 4), (), 2)]
_SPLIT += [((2, 4, 9), (), 1), ((5, 6), (), None), ((3, 6, 4), (2, 1), None)]


def _orthogonalized(layout, mode, splits):
    rule = Muon(tensor_mode=mode, precision="highest", extra_scale=0.2)
    tensors, shards = [], []
    for i, (shape, shares, dim) in enumerate(_SPLIT):
        whole = torch.randn(shape, generator=torch.Generator().manual_seed(i))
        axis = layout.tensor
        if dim is not None and splits:
            whole = whole.chunk(2, dim)[axis.rank]
        tensors.append(whole.contiguous())
        spec = _spec(whole.shape, shares=shares, split_dim=dim)
        shards.append(MatrixShard(spec, axis, None))
    muon._Orthogonalization(rule, shards)(tensors)
    return [tensor.tolist() for tensor in tensors]


@pytest.mark.parametrize("mode", ["duplicated", "distributed"])
def test_processes_that_share_matrices_orthogonalize_them_as_one(mode):
    expected = _orthogonalized(Layout.single(), "blockwise", False)
    ranks = run_sharing_memory(2, _orthogonalized, mode, True, tensor=2)
    for i, (_, _, dim) in enumerate(_SPLIT):
        parts = [torch.tensor(rank[i]) for rank in ranks]
        found = parts[0] if dim is None else torch.cat(parts, dim)
        torch.testing.assert_close(found, torch.tensor(expected[i]), rtol=1e-4, atol=1e-5)


def test_the_size_of_a_batch_makes_no_difference(monkeypatch):
    expected = _orthogonalized(Layout.single(), "blockwise", False)
    for size in (1, 50):
        monkeypatch.setattr(muon, "CHUNK", size)
        found = _orthogonalized(Layout.single(), "blockwise", False)
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs))


@pytest.mark.parametrize(
    ("mode", "tall", "wide"),
    [("spectral", 3.0, 3.0), ("unit_rms_norm", 1.5, 2 / 3), ("shape_scaling", 1.5, 1.0)],
)
def test_scales_depend_on_the_size_of_a_matrix(mode, tall, wide):
    assert Muon(scale_mode=mode).scale_of(9, 4) == pytest.approx(tall)
    assert Muon(scale_mode=mode, extra_scale=0.2).scale_of(4, 9) == pytest.approx(0.2 * wide)


@pytest.mark.parametrize("shares_weights", [False, True])
@pytest.mark.parametrize("replicas", [1, 3])
def test_a_rule_learns_which_processes_hold_a_matrix(shares_weights, replicas):
    """Experts are split and replicated over other processes than other weights."""
    axes = [Axis(size, 0, tuple(range(size))) for size in (2, 4, replicas, 5)]
    layout = replace(
        Layout.single(), tensor=axes[0], expert_tensor=axes[1], replica=axes[2],
        expert_replica=axes[3],
    )  # fmt: skip
    parameters = [nn.Parameter(torch.ones(3, 2)) for _ in range(2)]
    for is_expert, p in enumerate(parameters):
        p.spec = replace(_spec((3, 2)), is_expert=bool(is_expert))
    rule = SimpleNamespace(
        needs_whole=True, joins_rows=True, state_names=("momentum_buffer",),
        bind=lambda tensors, library: tensors,
    )  # fmt: skip
    flat = [p.detach().flatten() for p in parameters]
    group = optimizers._OwnedGroup(
        ParameterGroup(rule, True, False, ("a", "b"), tuple(parameters)),
        [
            optimizers._OwnedWeight(name, p, f, torch.float32, f, {"momentum_buffer": f})
            for name, p, f in zip("ab", parameters, flat, strict=True)
        ],
    )
    gradients = SimpleNamespace(shares_weights=shares_weights, gradient=lambda p: flat[0])
    found = group.bind(gradients, layout, None, OptimizerConfig(), (None, None))
    shape = (6,) if shares_weights else (3, 2)
    for tensors in (found.weights, found.gradients, found.state["momentum_buffer"]):
        assert [tuple(tensor.shape) for tensor in tensors] == [shape] * 2
    rows = [
        axes[2] if shares_weights and replicas > 1 else None,
        axes[3] if shares_weights else None,
    ]
    assert [(shard.tensor, shard.rows) for shard in found.shards] == [
        (axes[0], rows[0]),
        (axes[1], rows[1]),
    ]


def test_projections_and_stacked_matrices_are_orthogonalized_by_themselves():
    # Two groups of two queries, a key and a value with 3 rows each; and a gate and up projection.
    named = _named({"qkv": (24, 9), "up": (2, 12, 9)}, {"qkv": (6, 3, 3)})
    rows = torch.arange(24).view(2, 12)
    parts = [rows[:, a:b].flatten() for a, b in ((0, 6), (6, 9), (9, 12))]
    alone = {
        f"qkv{i}": nn.Parameter(named["qkv"].detach()[part].clone()) for i, part in enumerate(parts)
    } | {f"up{i}": nn.Parameter(named["up"].detach()[i].clone()) for i in range(2)}
    for p in alone.values():
        p.spec = _spec(p.shape)
    flags = {"clip_grad": 0.0, "muon_fp32_matmul_prec": "highest"}
    ours, theirs = _optimizer(named, **flags), _optimizer(alone, **flags)
    generator = torch.Generator().manual_seed(5)
    for _ in range(3):
        values = {n: torch.randn(p.shape, generator=generator) for n, p in named.items()}
        split = {f"qkv{i}": values["qkv"][part] for i, part in enumerate(parts)}
        split |= {f"up{i}": values["up"][i] for i in range(2)}
        _update(named, *ours, values)
        _update(alone, *theirs, split)
    for i, part in enumerate(parts):
        torch.testing.assert_close(named["qkv"][part], alone[f"qkv{i}"], rtol=1e-5, atol=1e-6)
    for i in range(2):
        torch.testing.assert_close(named["up"][i], alone[f"up{i}"], rtol=1e-5, atol=1e-6)
    whole = _named({"qkv": (24, 9)}, {"qkv": (6, 3, 3)})
    before = whole["qkv"].detach().clone()
    _update(whole, *_optimizer(whole, muon_split_qkv=False, **flags), {"qkv": before})
    one = _named({"qkv": (24, 9)})
    _update(one, *_optimizer(one, **flags), {"qkv": before})
    assert torch.equal(whole["qkv"], one["qkv"])


def test_gradients_that_are_not_finite_change_nothing():
    named = _named(SHAPES)
    optimizer, gradients = _optimizer(named, muon_use_nesterov=True)
    values = {name: torch.ones(shape) for name, shape in SHAPES.items()}
    assert _update(named, optimizer, gradients, values).applied
    before = {name: p.detach().clone() for name, p in named.items()}
    states = {name: t.clone() for name, (t, _) in optimizer.named_tensors().items()}
    values["b"][3, 4] = float("nan")
    assert not _update(named, optimizer, gradients, values).applied
    assert all(torch.equal(p, before[name]) for name, p in named.items())
    assert all(torch.equal(t, states[n]) for n, (t, _) in optimizer.named_tensors().items())


def test_the_rows_of_equal_layers_are_dealt_evenly():
    layer = [(96, 32), (32, 32), (128, 32), (32, 128)]
    axis = Axis(size=8, rank=0, ranks=tuple(range(8)))
    places = [MatrixShard(_spec(shape), Axis(), axis) for _ in range(24) for shape in layer]
    loads = RowExchange(places, axis).loads
    assert sum(loads) == 24 * sum(cost_of(_spec(shape)) for shape in layer)
    assert max(loads) <= 1.02 * sum(loads) / 8


def test_stacked_matrices_are_sent_in_the_rows_that_each_process_holds(monkeypatch):
    """Each of 4 processes holds 6 of the 2 x 12 rows of 9 elements."""
    sent = []

    def exchange(x, axis, to, received):
        sent.append((to, received))
        return x.new_zeros(sum(received))

    monkeypatch.setattr(muon, "all_to_all_rows", exchange)
    axis = Axis(size=4, rank=0, ranks=tuple(range(4)))
    shards = [MatrixShard(_spec(shape), Axis(), axis) for shape in ((2, 12, 9), (8, 4))]
    RowExchange(shards, axis)([torch.ones(54), torch.ones(8)], lambda wholes: None)
    assert sent == [([54, 8, 0, 0], [54] * 4), ([54] * 4, [54, 8, 0, 0])]


def test_the_cost_of_a_matrix_is_that_of_its_product_with_itself():
    """Per step, X X^T of `[rows, columns]` costs rows^2 x columns; rows is the shorter side."""
    costs = [cost_of(_spec(shape)) for shape in ((8, 32), (32, 8), (16, 16), (3, 8, 32))]
    assert costs == [8 * 8 * 32, 8 * 8 * 32, 16**3, 3 * 8 * 8 * 32]


def test_only_matrices_of_layers_follow_muon():
    from megatron.optimizer.rules import AdamW, rules_of

    choose = rules_of(OptimizerConfig(optimizer="muon"))
    matrix, table = nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(4, 4))
    matrix.spec = _spec((4, 4))
    table.spec = ParameterSpec((4, 4), (4, 4), (0, 0), ZEROS, is_vocabulary=True)
    assert choose("layers.0.mlp.up.weight", matrix) == Muon()  # its defaults are the flags'
    assert isinstance(choose("embedding.word.weight", table), AdamW)


def test_matrices_that_just_fill_a_chunk_share_it(monkeypatch):
    monkeypatch.setattr(muon, "CHUNK", 64)
    axis = Axis(size=1, rank=0, ranks=(0,))
    places = [MatrixShard(_spec((8, 4)), None, axis) for _ in range(5)]
    assert muon._chunks(places) == [[0, 1], [2, 3], [4]]
    # Each of two processes holds half of the rows, and orthogonalizes half of a chunk.
    halves = Axis(size=2, rank=0, ranks=(0, 1))
    places = [MatrixShard(_spec((8, 4)), None, halves if i % 2 else None) for i in range(11)]
    assert muon._chunks(places) == [[0, 2], [4, 6], [8, 10], [1, 3, 5, 7], [9]]


@pytest.mark.parametrize(
    ("asked", "used"), [("medium", "highest"), ("high", "high"), ("highest", "highest")]
)
def test_products_have_the_precision_that_is_asked_for(asked, used, monkeypatch):
    seen, plain = [], torch.baddbmm

    def watched(*arguments, **options):
        seen.append(torch.get_float32_matmul_precision())
        return plain(*arguments, **options)

    monkeypatch.setattr(torch, "baddbmm", watched)
    before = torch.get_float32_matmul_precision()
    orthogonalize(torch.eye(3)[None], COEFFICIENTS["simple"], 2, precision=asked)
    assert set(seen) == {used}
    assert torch.get_float32_matmul_precision() == before
