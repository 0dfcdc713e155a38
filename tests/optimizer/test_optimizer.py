"""The optimizer against float64 references written out here, its state, and its refusals."""

import itertools
import json
from math import inf, nan, sqrt
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from megatron.config.optimizer import OptimizerConfig
from megatron.config.precision import PrecisionConfig
from megatron.optimizer import rules
from megatron.optimizer.update import Step
from megatron.parallel.layout import Layout
from megatron.parallel.parameter import ZEROS, ParameterSpec
from tests.distributed import run_distributed
from tests.optimizer.stepping import step
from tests.parallel.buffers import new_buffer, new_optimizer

SHAPES = {"a.weight": (5, 7), "a.bias": (2, 5), "norm.weight": (7,)}
FP32 = PrecisionConfig()
BF16 = PrecisionConfig(bf16=True)
FP16 = PrecisionConfig(fp16=True, initial_loss_scale=1024.0)
PRECISIONS = pytest.mark.parametrize("precision", [FP32, BF16, FP16], ids=["fp32", "bf16", "fp16"])
OPTIMIZERS = pytest.mark.parametrize("rule", ["adam", "sgd"])


def _dtype(precision):
    if precision.bf16:
        return torch.bfloat16
    return torch.float16 if precision.fp16 else torch.float32


def _parameters(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return {
        name: nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
        for name, shape in SHAPES.items()
    }


def _optimizer(named, config=None, precision=FP32, layout=None, **options):
    layout = layout or Layout.single()
    gradients = new_buffer(named.items(), layout, accumulate_in_fp32=precision.bf16)
    config = config or OptimizerConfig()
    return new_optimizer(named.items(), gradients, config, precision, layout, **options)


def _draw(seed, size=1.0):
    generator = torch.Generator().manual_seed(seed)
    return {name: size * torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def _set_gradients(optimizer, named, values):
    """Set gradients as the backward pass of a scaled loss would."""
    optimizer.gradients.zero()
    for name, parameter in named.items():
        optimizer.gradients.gradient(parameter).copy_(values[name] * optimizer.loss_scale)


def _norm(values):
    return sqrt(sum(value.double().square().sum().item() for value in values.values()))


def _snapshot(optimizer, named):
    """Return copies of all parameters and state tensors."""
    tensors = {name: tensor for name, (tensor, _) in optimizer.named_tensors().items()}
    return {name: tensor.detach().clone() for name, tensor in (named | tensors).items()}


def _assert_bits_equal(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype
        assert torch.equal(tensor, theirs[name]), name


STEPS = [(1e-2, 0.1, 1.0), (3e-2, 0.1, 1e-3), (2e-2, 0.2, 100.0), (1e-2, 0.0, 1e-6)]
"""(learning rate, weight decay, size of the gradients)"""


def _clipped(values, clip):
    """Return float64 gradients with their norm clipped to `clip`."""
    factor = min(1.0, clip / (_norm(values) + 1e-6)) if clip else 1.0
    return {name: value.double() * factor for name, value in values.items()}


@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_adam_equals_the_formula(clip):
    beta1, beta2, eps = 0.9, 0.95, 1e-5
    named = _parameters()
    config = OptimizerConfig(clip_grad=clip, adam_beta1=beta1, adam_beta2=beta2, adam_eps=eps)
    optimizer = _optimizer(named, config)
    weights = {name: p.detach().double() for name, p in named.items()}
    first = {name: torch.zeros_like(w) for name, w in weights.items()}
    second = {name: torch.zeros_like(w) for name, w in weights.items()}
    for k, (lr, decay, size) in enumerate(STEPS, start=1):
        values = _draw(k, size)
        _set_gradients(optimizer, named, values)
        result = step(optimizer, lr, decay)
        assert result.applied
        assert result.grad_norm == pytest.approx(_norm(values), rel=1e-6)
        for name, g in _clipped(values, clip).items():
            first[name] = beta1 * first[name] + (1 - beta1) * g
            second[name] = beta2 * second[name] + (1 - beta2) * g**2
            mean = first[name] / (1 - beta1**k)
            spread = (second[name] / (1 - beta2**k)).sqrt() + eps
            here = decay if name == "a.weight" else 0.0
            weights[name] = weights[name] - lr * (mean / spread + here * weights[name])
    for name, parameter in named.items():
        torch.testing.assert_close(parameter.double(), weights[name], rtol=2e-6, atol=1e-7)


def test_a_rate_of_their_own_equals_adam_with_groups():
    named = _parameters()
    spec = ParameterSpec((5, 7), (5, 7), (0, 0), ZEROS, is_vocabulary=True)
    named["a.weight"].spec = spec
    named["b.weight"] = nn.Parameter(named["a.weight"].detach().clone())
    theirs = {name: nn.Parameter(p.detach().clone()) for name, p in named.items()}
    optimizer = _optimizer(named, OptimizerConfig(clip_grad=0.0), decouples=True)
    vectors = [theirs["a.bias"], theirs["norm.weight"]]
    reference = torch.optim.AdamW(
        [
            {"params": [theirs["a.weight"]], "lr": 3e-2, "weight_decay": 0.1},
            {"params": [theirs["b.weight"]], "lr": 1e-2, "weight_decay": 0.1},
            {"params": vectors, "lr": 1e-2, "weight_decay": 0.0},
        ]
    )
    for k in range(3):
        values = _draw(k)
        values["b.weight"] = values["a.weight"]
        _set_gradients(optimizer, named, values)
        assert step(optimizer, 1e-2, 0.1, decoupled_lr=3e-2).applied
        for name, p in theirs.items():
            p.grad = values[name]
        reference.step()
    for name, p in named.items():
        torch.testing.assert_close(p.detach(), theirs[name].detach(), rtol=2e-6, atol=1e-7)
    assert (named["a.weight"] - named["b.weight"]).abs().max() > 0.01


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_equals_the_formula(momentum):
    named = _parameters()
    optimizer = _optimizer(named, OptimizerConfig(optimizer="sgd", sgd_momentum=momentum))
    weights = {name: p.detach().double() for name, p in named.items()}
    speed = {name: torch.zeros_like(w) for name, w in weights.items()}
    for k, (lr, decay, size) in enumerate(STEPS):
        values = _draw(k, size)
        _set_gradients(optimizer, named, values)
        step(optimizer, lr, decay)
        for name, g in _clipped(values, 1.0).items():
            here = decay if name == "a.weight" else 0.0
            speed[name] = momentum * speed[name] + g + here * weights[name]
            weights[name] = weights[name] - lr * speed[name]
    for name, parameter in named.items():
        torch.testing.assert_close(parameter.double(), weights[name], rtol=2e-6, atol=1e-7)


def test_a_norm_near_the_limit_is_clipped_with_megatrons_epsilon():
    named = _parameters()
    config = OptimizerConfig(optimizer="sgd", sgd_momentum=0.0, clip_grad=1e-6)
    optimizer, values = _optimizer(named, config), _draw(1, 1e-6)
    _set_gradients(optimizer, named, values)
    before = {name: p.detach().clone() for name, p in named.items()}
    step(optimizer, 1e6, 0.0)
    factor = 1e-6 / (_norm(values) + 1e-6)  # without the epsilon, 1.16 times as large
    assert 1e-6 / _norm(values) > 1.1 * factor
    for name, parameter in named.items():
        change = before[name] - parameter.detach()
        torch.testing.assert_close(change, values[name] * factor * 1e6, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("precision", [BF16, FP16], ids=["bf16", "fp16"])
def test_16bit_weights_are_rounded_masters_that_follow_fp32(precision):
    """The masters match fp32 training from the same start, so small steps add up."""
    half, full = _parameters(_dtype(precision)), _parameters()
    for name, parameter in full.items():
        parameter.data.copy_(half[name])
    ours, reference = _optimizer(half, precision=precision), _optimizer(full)
    for k in range(5):
        values = {name: v.to(_dtype(precision)).float() for name, v in _draw(k).items()}
        _set_gradients(ours, half, values)
        _set_gradients(reference, full, values)
        results = [step(o, 1e-5, 0.1) for o in (ours, reference)]
        assert results[0].grad_norm == pytest.approx(results[1].grad_norm, rel=1e-5)
    for name, (master, parameter) in ours.named_tensors().items():
        if name.endswith(".master"):
            assert master.dtype == torch.float32
            assert torch.equal(parameter, master.to(parameter.dtype))
            expected = full[name.removesuffix(".master")]
            torch.testing.assert_close(master, expected, rtol=1e-6, atol=1e-8)


@OPTIMIZERS
@PRECISIONS
def test_a_resumed_optimizer_continues_bit_for_bit(precision, rule):
    config = OptimizerConfig(optimizer=rule)

    def steps(optimizer, named, seeds):
        for seed in seeds:
            _set_gradients(optimizer, named, _draw(seed))
            assert step(optimizer, 1e-2, 0.1).applied

    named = _parameters(_dtype(precision))
    whole = _optimizer(named, config, precision)
    steps(whole, named, range(3))
    saved, scalars = _snapshot(whole, named), json.dumps(whole.scalars())
    steps(whole, named, range(3, 6))

    fresh = {name: nn.Parameter(torch.zeros_like(p)) for name, p in named.items()}
    resumed = _optimizer(fresh, config, precision)
    targets = {name: tensor for name, (tensor, _) in resumed.named_tensors().items()}
    with torch.no_grad():
        for name, tensor in (fresh | targets).items():
            tensor.copy_(saved[name])
    resumed.load_scalars(json.loads(scalars))
    steps(resumed, fresh, range(3, 6))
    _assert_bits_equal(_snapshot(resumed, fresh), _snapshot(whole, named))
    assert resumed.scalars() == whole.scalars()
    assert resumed.steps == 6


def test_names_of_the_state():
    kinds = {
        name.removeprefix("a.bias.")
        for name in _optimizer(_parameters(torch.bfloat16), precision=BF16).named_tensors()
        if name.startswith("a.bias.")
    }
    assert kinds == {"exp_avg", "exp_avg_sq", "master"}
    named = _parameters()
    sgd = _optimizer(named, OptimizerConfig(optimizer="sgd")).named_tensors()
    assert sgd.keys() == {f"{name}.momentum" for name in named}
    assert all(parameter is named[name[:-9]] for name, (_, parameter) in sgd.items())


@OPTIMIZERS
@PRECISIONS
@pytest.mark.parametrize("bad", [inf, -inf, nan])
def test_nonfinite_gradients_change_not_one_bit(precision, rule, bad):
    named = _parameters(_dtype(precision))
    optimizer = _optimizer(named, OptimizerConfig(optimizer=rule), precision)
    _set_gradients(optimizer, named, _draw(1))
    assert step(optimizer, 1e-2, 0.1).applied
    before = _snapshot(optimizer, named)
    values = _draw(2)
    values["norm.weight"][3] = bad
    _set_gradients(optimizer, named, values)
    result = step(optimizer, 1e-2, 0.1)
    assert (result.applied, result.found_nonfinite) == (False, True)
    assert result.overflow is precision.fp16
    assert optimizer.steps == 1
    _assert_bits_equal(_snapshot(optimizer, named), before)


def test_fp16_overflow_lowers_the_scale_until_it_cannot():
    named = _parameters(torch.float16)
    precision = PrecisionConfig(
        fp16=True, initial_loss_scale=4.0, min_loss_scale=2.0, hysteresis=1, loss_scale_window=2
    )
    optimizer = _optimizer(named, precision=precision)
    seen = []
    for good in (False, False, True, True, False):
        values = _draw(0) if good else {name: v * inf for name, v in _draw(0).items()}
        _set_gradients(optimizer, named, values)
        result = step(optimizer, 0.0, 0.0)
        seen.append((result.applied, result.overflow, optimizer.loss_scale))
    assert seen == [
        (False, True, 2.0),
        (False, False, 2.0),  # the scale cannot shrink further: the caller must decide
        (True, False, 2.0),
        (True, False, 4.0),
        (False, True, 2.0),
    ]


def test_the_loss_is_scaled_and_the_norm_is_not():
    parameter = nn.Parameter(torch.full((2, 8), 0.5, dtype=torch.float16))
    optimizer = _optimizer({"w.weight": parameter}, precision=FP16)
    loss = parameter.float().square().sum()
    assert optimizer.scale_loss(loss).item() == 1024 * loss.item()
    optimizer.scale_loss(loss).backward()
    assert step(optimizer, 1e-3, 0.0).grad_norm == pytest.approx(4.0)
    plain = _optimizer(_parameters())
    assert plain.scale_loss(loss) is loss


def test_reload_masters_takes_over_loaded_weights():
    named = _parameters(torch.bfloat16)
    optimizer = _optimizer(named, precision=BF16)
    with torch.no_grad():
        named["a.weight"].fill_(0.5)
    optimizer.reload_masters()
    _set_gradients(optimizer, named, _draw(1, 0.0))
    step(optimizer, 1e-2, 0.0)
    assert torch.equal(named["a.weight"], torch.full((5, 7), 0.5, dtype=torch.bfloat16))


def test_zeros_are_counted_without_the_padding():
    named = _parameters()
    optimizer = _optimizer(named, count_zeros=True)
    values = _draw(1)
    values["a.weight"][:, :2] = 0.0
    values["norm.weight"][0] = 0.0
    _set_gradients(optimizer, named, values)
    assert step(optimizer, 1e-2, 0.1).zeros == 11
    _set_gradients(optimizer, named, _draw(1))
    assert step(optimizer, 1e-2, 0.1).zeros == 0
    assert step(_optimizer(_parameters()), 1e-2, 0.1).zeros is None


def _one_bad_rank(layout):
    named = _parameters()
    optimizer = _optimizer(named, layout=layout)
    values = _draw(1)
    if layout.world.rank == 2:
        values["a.weight"][0, 0] = nan
    _set_gradients(optimizer, named, values)
    result = step(optimizer, 1e-2, 0.1)
    return result.applied, result.found_nonfinite


def test_all_ranks_agree_not_to_step():
    assert run_distributed(4, _one_bad_rank) == [(False, True)] * 4
    assert run_distributed(4, _one_bad_rank, tensor=2) == [(False, True)] * 4


def _data_parallel_run(layout, steps):
    """Train on four samples a step, shared by the ranks; return the norms and final weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 1))
    named = list(model.named_parameters())
    gradients = new_buffer(named, layout, accumulate_in_fp32=False)
    optimizer = new_optimizer(named, gradients, OptimizerConfig(), FP32, layout)
    mine = range(layout.data.rank, 4, layout.data.size)
    norms = []
    for number in range(steps):
        optimizer.gradients.zero()
        for sample in mine:
            x = torch.randn(3, 6, generator=torch.Generator().manual_seed(number * 4 + sample))
            loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
            (optimizer.scale_loss(loss) / len(mine)).backward()
        gradients.reduce()
        norms.append(step(optimizer, 1e-2, 0.1).grad_norm)
    return norms, [p.tolist() for p in model.parameters()]


def test_training_is_the_same_for_every_data_parallel_size():
    norms, weights = _data_parallel_run(Layout.single(), 10)
    for size in (2, 4):
        ranks = run_distributed(size, _data_parallel_run, 10)
        assert all(rank == ranks[0] for rank in ranks)
        assert ranks[0][0] == pytest.approx(norms, rel=1e-5)
        for ours, theirs in zip(ranks[0][1], weights, strict=True):
            torch.testing.assert_close(
                torch.tensor(ours), torch.tensor(theirs), rtol=1e-4, atol=1e-6
            )


class _Recorder:
    """An object whose methods only record their names."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        return lambda: self.calls.append(name)

    def taken(self):
        """Return the calls since the last time."""
        calls, self.calls = self.calls, []
        return calls


def test_shared_weights_are_gathered_after_changes_and_awaited_before_others_read_them():
    named = _parameters()
    optimizer = _optimizer(named, OptimizerConfig(ema_decay=0.5))
    optimizer._shared_weights = shared = _Recorder()
    for seed in range(3):
        _set_gradients(optimizer, named, _draw(seed))
        assert step(optimizer, 1e-2, 0.1).applied
        assert shared.taken() == ["settle", "gather"]
    optimizer.wait_for_weights()
    assert shared.taken() == ["wait"]
    weights = {name: p.detach().clone() for name, p in named.items()}
    with optimizer.averaged_weights():
        assert shared.taken() == ["wait", "gather", "wait"]
        for index, (name, _) in enumerate(optimizer.name_averages({"": weights.values()}).items()):
            assert torch.equal(named[name], optimizer.average.values(index))
            assert not torch.equal(named[name], weights[name])
    assert shared.taken() == ["wait", "gather", "wait"]
    _assert_bits_equal({name: p.detach() for name, p in named.items()}, weights)
    optimizer.reload_masters()
    assert shared.taken() == ["forget"]


@pytest.mark.parametrize("offload", [False, True])
def test_the_next_change_waits_for_a_copy_that_reads_the_states(offload):
    """A host that updates the states waits itself; otherwise it does not stop for the copy."""
    named = _parameters()
    optimizer = _optimizer(named, OptimizerConfig(optimizer_cpu_offload=offload, ema_decay=0.5))
    expected = ["delay_device", "wait"] if offload else ["delay_device"]
    reader = _Recorder()

    def update():
        _set_gradients(optimizer, named, _draw(1))
        step(optimizer, 1e-2, 0.1)

    def average():
        with optimizer.averaged_weights():
            pass

    for change in (update, optimizer.reload_masters, average):
        optimizer.delay_changes(reader)
        assert reader.taken() == []
        change()
        assert reader.taken() == expected
        change()
        assert reader.taken() == []  # once


def test_the_norm_of_gradients_that_are_too_large_by_several_factors():
    named = _parameters()
    optimizer, values = _optimizer(named), _draw(1)
    _set_gradients(optimizer, named, values)
    for divisor, factor in ((None, 4.0), (torch.tensor(3.0, dtype=torch.float64), 12.0)):
        expected = pytest.approx(_norm(values) / factor, rel=1e-6)
        assert optimizer.gradient_norm(4.0, divisor) == expected


def test_masters_that_have_been_loaded_too_are_kept():
    named = _parameters(torch.bfloat16)
    optimizer = _optimizer(named, precision=BF16)
    masters = {name: t for name, (t, _) in optimizer.named_tensors().items() if "master" in name}
    assert masters.keys() == {f"{name}.master" for name in named}
    for tensor in masters.values():
        tensor.fill_(0.25)
    optimizer.reload_masters(include_16_bit=False)
    assert all((tensor == 0.25).all() for tensor in masters.values())
    assert all((p != 0.25).any() for p in named.values())
    optimizer.reload_masters()
    for name, p in named.items():
        assert torch.equal(masters[f"{name}.master"], p.float())


@pytest.mark.parametrize(
    ("nonfinite", "spike", "applied"),
    [(0.0, 0.0, True), (1.0, 0.0, False), (0.0, 1.0, False), (1.0, 1.0, False)],
)
def test_an_outcome_that_is_not_finite_is_not_a_spike(nonfinite, spike, applied):
    optimizer = _optimizer(_parameters(), OptimizerConfig(ema_decay=0.5), count_zeros=True)
    result = optimizer.end_step([2.0, 3.0, nonfinite, spike])
    assert (result.applied, result.found_nonfinite) == (applied, nonfinite > 0)
    assert result.found_spike == (spike > 0 and not nonfinite)
    assert (result.grad_norm, result.zeros, result.overflow) == (2.0, 3, False)
    assert (optimizer.steps, optimizer.average.count) == (applied, applied)


@pytest.mark.parametrize(("limit", "is_applied"), [(5.0, True), (4.999, False)])
def test_the_largest_norm_with_which_an_update_is_applied(limit, is_applied):
    named = _parameters()
    optimizer = _optimizer(named)
    values = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    values["norm.weight"][:2] = torch.tensor([3.0, 4.0])
    _set_gradients(optimizer, named, values)
    result = step(optimizer, 0.1, 0.0, norm_limit=limit)
    assert (result.grad_norm, result.applied) == (5.0, is_applied)
    assert result.found_spike is not is_applied


@OPTIMIZERS
@pytest.mark.parametrize("precision", [FP32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("overlaps", [False, True])
def test_updates_on_the_host_are_those_on_the_device(overlaps, precision, rule, monkeypatch):
    defaults = rules.OverlappedUpdate.__init__.__kwdefaults__
    monkeypatch.setitem(defaults, "piece_bytes", 32)  # so that there are several pieces
    flags = {"optimizer_cpu_offload": True, "overlap_cpu_optimizer_d2h_h2d": overlaps}
    found = []
    for more in ({}, flags):
        named = _parameters(_dtype(precision))
        optimizer = _optimizer(named, OptimizerConfig(optimizer=rule, **more), precision)
        for seed in range(3):
            _set_gradients(optimizer, named, _draw(seed))
            assert step(optimizer, 1e-2, 0.1).applied
        found.append({name: p.detach().clone() for name, p in named.items()})
    for name, p in found[0].items():
        assert not torch.equal(p, _parameters(_dtype(precision))[name])
        torch.testing.assert_close(found[1][name], p)


def test_a_rate_of_a_parameter_scales_adams_learning_rate_and_epsilon():
    config = OptimizerConfig(adam_beta1=0.8, adam_beta2=0.9, adam_eps=1e-4)
    weight = nn.Parameter(torch.ones(2, 2))
    choose = rules.rules_of(config)
    assert choose("weight", weight) == rules.AdamW(0.8, 0.9, 1e-4)
    weight.spec = SimpleNamespace(init=SimpleNamespace(rate=0.25))
    rule = choose("weight", weight)
    assert (rule.rate, rule.eps) == (0.25, 0.25e-4)
    numbers = []
    rule._update(numbers.append, Step(2.0, *torch.ones(3)), weight_decay=0.1)
    assert (numbers[0].lr, numbers[0].eps, numbers[0].weight_decay) == (0.5, 0.25e-4, 0.1)
    assert rules.AdamW(0.8, 0.9, 1e-4).rate == 1.0
    for each in (rules.AdamW, rules.SGD):
        assert (each.needs_whole, each.joins_rows) == (False, False)


@pytest.mark.parametrize(
    ("sizes", "pieces"),
    [
        ([], []),
        ([3], [1]),
        ([8, 8], [1, 1]),  # a tensor that just fills a piece ends it
        ([7, 1, 4, 3, 2, 1], [2, 3, 1]),  # the last piece may be small
        ([1, 20, 1], [2, 1]),
    ],
)
def test_offloaded_updates_have_pieces_of_a_minimum_size(sizes, pieces):
    ends = list(itertools.accumulate(pieces, initial=0))
    assert rules._pieces(sizes, 8) == [slice(*pair) for pair in itertools.pairwise(ends)]
