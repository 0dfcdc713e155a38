"""Optimizer states in fewer bits: what is stored, and Adam with them."""

import pytest
import torch
from torch import nn

from megatron.config.optimizer import STATE_BYTES, OptimizerConfig
from megatron.config.precision import PrecisionConfig
from megatron.optimizer import optimizer as optimizers
from megatron.optimizer import packed
from megatron.optimizer.packed import BLOCK, FORMATS, PackedTensor
from megatron.parallel.layout import Layout
from tests.optimizer.stepping import step
from tests.parallel.buffers import new_buffer, new_optimizer

FORMS = pytest.mark.parametrize("form", FORMATS)
ROOTS = pytest.mark.parametrize("roots", [False, True])
# The largest relative distance from a value, or from its root, to a code.
STEP = {"bf16": 2.0**-7, "fp16": 2.0**-10, "fp8": 2.0**-3}


def _drawn(*, roots, spread=2.0):
    """Return values of many magnitudes with scattered zeros, a zero block and a partial one."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(5 * BLOCK + 37, generator=generator)
    values *= 10 ** (spread * torch.randn(values.shape, generator=generator) - 4)
    values[BLOCK : 2 * BLOCK] = 0.0
    values[::17] = 0.0
    return values.abs() if roots else values


def _packed(values, form, *, roots, count=None):
    tensor = PackedTensor(values, FORMATS[form], roots=roots, salt=3)
    tensor.store(values, 0, count)
    return tensor


@FORMS
@ROOTS
def test_encoding_what_was_decoded_changes_nothing(form, roots):
    """This includes values in the checkpoint's type. With other blocks, small values may change."""
    for spread in (0.1, 2.0, 6.0):
        for count in map(torch.tensor, (1.0, 2.0)):
            first = _packed(_drawn(roots=roots, spread=spread), form, roots=roots, count=count)
            saved = first.saved()
            assert saved.dtype == FORMATS[form].saved
            assert torch.equal(saved.float(), first.values())
            again = PackedTensor(saved, FORMATS[form], roots=roots)
            again.store(saved, 0, count + 1)
            assert torch.equal(again.values(), first.values())
            cut = _packed(saved[100:], form, roots=roots).values()
            distance = (cut - saved[100:].float()).abs()
            assert (distance <= 1e-4 * saved.float().abs().max()).all()


@FORMS
@ROOTS
def test_rounding_is_close_and_exact_on_average(form, roots):
    values = _drawn(roots=roots, spread=0.3)
    found = torch.stack(
        [_packed(values, form, roots=roots, count=torch.tensor(i)).values() for i in range(400)]
    )
    step = STEP[form] * (2 + STEP[form] if roots else 1)
    blocks = nn.functional.pad(values, (0, -len(values) % BLOCK)).view(-1, BLOCK).abs()
    floor = (blocks.amax(1, keepdim=True) * 1e-4).expand_as(blocks).flatten()[: len(values)]
    assert ((found - values).abs() <= step * torch.maximum(values.abs(), floor)).all()
    error = (found.mean(0) - values).abs()
    assert (error <= 5 * step * torch.maximum(values.abs(), floor) / 400**0.5).all()
    assert torch.equal(found[0] == 0, values == 0) or not roots


def test_no_variance_becomes_zero():
    values = torch.tensor([1.0, 1e-20, 1e-12, 0.0])
    found = _packed(values, "fp8", roots=True).values()
    assert found[0] == 1
    assert 0 < found[1] == found[2] < 1e-8
    assert found[3] == 0


@FORMS
def test_an_average_follows_its_values(form):
    """With rounding to nearest, the average would keep its first value in every format."""
    tensor = PackedTensor(torch.zeros(4096), FORMATS[form], roots=True)
    tensor.store(torch.full((4096,), 4.0))
    beta = 0.95 if form == "fp8" else 0.999
    for count in range(1, int(3 / (1 - beta))):
        tensor.store(beta * tensor.values() + (1 - beta) * 1.0, 0, torch.tensor(float(count)))
    assert tensor.values().mean().item() == pytest.approx(1 + 3 * 0.05, rel=0.05)


def _config(first, second="fp32", masters="fp32", **others):
    return OptimizerConfig(
        use_precision_aware_optimizer=True,
        exp_avg_dtype=first,
        exp_avg_sq_dtype=second,
        main_params_dtype=masters,
        adam_beta2=0.95,
        clip_grad=0.0,
        **others,
    )


SHAPES = {"a.weight": (30, 41), "a.bias": (41,), "b.weight": (7, 3, 50)}


def _optimizer(config, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(0)
    named = {
        name: nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
        for name, shape in SHAPES.items()
    }
    gradients = new_buffer(named.items(), Layout.single(), accumulate_in_fp32=True)
    numbers = PrecisionConfig(bf16=dtype == torch.bfloat16)
    optimizer = new_optimizer(named.items(), gradients, config, numbers, Layout.single())
    return named, optimizer


def _step(named, optimizer, seed, factor=1.0):
    generator = torch.Generator().manual_seed(seed)
    optimizer.gradients.zero()
    for p in named.values():
        drawn = torch.randn(p.shape, generator=generator)
        optimizer.gradients.gradient(p).copy_(drawn * factor)
    return step(optimizer, 1e-2, 0.1)


ALL = [
    ("bf16", "bf16", "fp32"),
    ("fp16", "fp16", "fp16"),
    ("fp8", "fp8", "fp16"),
    ("fp32", "bf16", "fp32"),
    ("fp8", "fp32", "fp32"),
]


@pytest.mark.parametrize("forms", ALL, ids="-".join)
def test_updates_are_close_to_those_in_fp32(forms):
    named, plain = _optimizer(OptimizerConfig(adam_beta2=0.95, clip_grad=0.0))
    ours, optimizer = _optimizer(_config(*forms))
    for seed in range(5):
        _step(named, plain, seed)
        _step(ours, optimizer, seed)
    worst = max(STEP.get(form, 0.0) for form in forms)
    for name, (theirs, _) in plain.named_tensors().items():
        held, _ = optimizer.named_tensors()[name]
        assert held.shape == theirs.shape
        if name.endswith("master"):
            moved = (held - theirs).square().mean().sqrt().item()
            rounding = 1e-3 if forms[2] == "fp16" else 1e-4
            assert moved < 5e-2 * worst + rounding  # five updates of 1e-2
        else:
            rms = theirs.square().mean().sqrt()
            assert ((held.float() - theirs).square().mean().sqrt() / rms).item() < 2 * worst + 1e-6


@pytest.mark.parametrize("forms", ALL, ids="-".join)
def test_an_update_that_is_left_out_changes_nothing(forms):
    named, optimizer = _optimizer(_config(*forms))
    for seed in range(3):
        assert _step(named, optimizer, seed).applied
    before = {name: t.clone() for name, (t, _) in optimizer.named_tensors().items()}
    weights = {name: p.detach().clone() for name, p in named.items()}
    assert not _step(named, optimizer, 4, factor=float("inf")).applied
    assert all(torch.equal(t, before[n]) for n, (t, _) in optimizer.named_tensors().items())
    assert all(torch.equal(p, weights[name]) for name, p in named.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pieces_change_nothing(monkeypatch, dtype):
    whole, optimizer = _optimizer(_config("fp8", "fp8"), dtype)
    monkeypatch.setattr(packed, "_PIECE", 2 * BLOCK)
    cut, in_pieces = _optimizer(_config("fp8", "fp8"), dtype)
    for seed in range(3):
        _step(whole, optimizer, seed)
        _step(cut, in_pieces, seed)
    assert all(torch.equal(p, cut[name]) for name, p in whole.items())


def test_the_formats_are_those_of_their_codes():
    """A change of a scale's limits would also change what saved values decode to."""
    for form in FORMATS.values():
        found = torch.finfo(form.dtype)
        assert 2.0**-form.bits == found.eps
        assert form.normal == (0.0 if form.dtype == torch.bfloat16 else found.smallest_normal)
    tops = {name: (form.top, form.min_exponents) for name, form in FORMATS.items()}
    assert tops == {"bf16": (None, (0, 0)), "fp16": (15, (-120, -50)), "fp8": (8, (-117, -57))}
    saved = {name: form.saved for name, form in FORMATS.items()}
    assert saved == {"bf16": torch.bfloat16, "fp16": torch.float32, "fp8": torch.bfloat16}


def test_a_resumed_run_draws_the_same_numbers_for_each_state():
    assert optimizers._SALTS == {"master": 1, "exp_avg": 2, "exp_avg_sq": 3}
    drawn = {
        (0, 0, None): [0, 7164471, 11285709, 2316542],
        (2, 0, None): [11285709, 2316542, 4461495, 6084583],  # of the elements from 2 on
        (0, 1, None): [5829961, 1793473, 4978938, 6857787],
        (0, 1, 2.0): [15180137, 12960968, 4392140, 1001905],
    }
    for (first, salt, update), expected in drawn.items():
        count = None if update is None else torch.tensor(update)
        found = packed._uniform(torch.empty(2, 2), first, salt, count)
        assert (found * 2**24).flatten().tolist() == expected


@FORMS
def test_bytes(form):
    tensor = PackedTensor(torch.empty(64 * BLOCK), FORMATS[form])
    assert tensor.nbytes == 64 * BLOCK * STATE_BYTES[form]


def test_loaded_values_are_taken_over():
    named, optimizer = _optimizer(_config("fp8", "fp16", "fp16"))
    _step(named, optimizer, 0)
    saved = {name: t.clone() for name, (t, _) in optimizer.named_tensors().items()}
    fresh, other = _optimizer(_config("fp8", "fp16", "fp16"))
    loaded = other.named_tensors()
    for name, (tensor, _) in loaded.items():
        tensor.copy_(saved[name])
    other.encode_loaded(loaded)
    with torch.no_grad():
        for name, p in fresh.items():
            p.copy_(named[name])
    other.steps = 1
    for seed in (1, 2):
        _step(named, optimizer, seed)
        _step(fresh, other, seed)
    assert all(torch.equal(p, named[name]) for name, p in fresh.items())
