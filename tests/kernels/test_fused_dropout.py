"""bias + dropout + add: the mask word by word, and the formula with that mask in float64."""

from functools import partial

import pytest
import torch

from megatron.device import Device
from megatron.kernels.dropout import (
    bias_dropout_add,
    choose_bias_dropout_add,
    fused_bias_dropout_add,
)
from megatron.kernels.library import LibraryChoice
from megatron.models.recompute import RecomputePlan
from megatron.parallel.parameter import philox
from tests.kernels.compare import BF16, FP16, FP32, TOLERANCE, check, fresh
from tests.models.small import batch, gpt, loss_and_gradients
from tests.models.small import config as model_config

pytestmark = pytest.mark.usefixtures("poisoned")
TYPES = [(FP32, FP32), (BF16, BF16), (FP16, FP16), (FP32, BF16)]


def seeded(library, device, probability):
    """Return the kernel, always starting from the same seed."""

    def call(x, bias, residual):
        Device(device).seed(7)
        return fused_bias_dropout_add(library, x, bias, residual, probability)

    return call


def mask_of(shape, device, probability):
    """Return which elements are kept, by the reference generator."""
    Device(device).seed(7)
    key = torch.randint(2**62, (1,), dtype=torch.int64, device=device).item()
    count = torch.Size(shape).numel()
    groups, zero = torch.arange(count // 8), torch.zeros(count // 8, dtype=torch.int64)
    words = philox((groups, zero, zero, zero), (key & 0xFFFFFFFF, key >> 32))
    halves = torch.stack([half for word in words for half in (word & 0xFFFF, word >> 16)], dim=-1)
    return (halves >= round(probability * 65536)).view(shape)


def inputs_of(shape, x_dtype, w_dtype, device, *, bias):
    generator = fresh()

    def draw(*size, dtype):
        return torch.randn(*size, generator=generator).to(device, dtype)

    x, b = draw(*shape, dtype=w_dtype), draw(shape[-1], dtype=w_dtype) if bias else None
    return [x, b, draw(*shape, dtype=x_dtype)], [draw(*shape, dtype=x_dtype)]


@pytest.mark.parametrize(("x_dtype", "w_dtype"), TYPES)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(3, 2, 8), (5, 2, 264), (101, 72)])
def test_equals_float64_with_its_mask(kernels, x_dtype, w_dtype, bias, shape):
    library, device = kernels
    inputs, grads = inputs_of(shape, x_dtype, w_dtype, device, bias=bias)
    stays = mask_of(shape, device, 0.3) * (65536 / (65536 - round(0.3 * 65536)))

    def plain(x, b, residual):
        return residual + stays * (x if b is None else x + b)

    check(seeded(library, device, 0.3), plain, inputs, grads, TOLERANCE[w_dtype])


def test_drops_as_often_as_asked_and_anew_each_time(kernels):
    library, device = kernels
    x = torch.ones(200, 512, device=device)
    first, second = (
        fused_bias_dropout_add(library, x, None, torch.zeros_like(x), 0.1) for _ in range(2)
    )
    assert (first == 0).float().mean().item() == pytest.approx(0.1, abs=0.005)
    assert first.mean().item() == pytest.approx(1, abs=0.005)
    both = ((first == 0) & (second == 0)).float().mean().item()
    assert both == pytest.approx(0.01, abs=0.002)


def test_nothing_is_dropped_with_probability_zero(kernels):
    library, device = kernels
    (x, bias, residual), _ = inputs_of((4, 64), FP32, FP32, device, bias=True)
    out = fused_bias_dropout_add(library, x, bias, residual, 0.0)
    assert torch.equal(out, bias_dropout_add(x, bias, residual, 0.0))


def test_everything_is_dropped_with_probability_one(kernels):
    library, device = kernels
    (x, bias, residual), _ = inputs_of((4, 64), FP32, FP32, device, bias=True)
    assert torch.equal(fused_bias_dropout_add(library, x, bias, residual, 1.0), residual)


def test_a_model_recomputes_the_same(emulated, monkeypatch):
    """A block draws through the kernel, and draws the same in a recomputation."""
    fused = LibraryChoice(emulated, "emulated")
    monkeypatch.setattr("megatron.parallel.build.find_library", lambda _: fused)
    flags = {"hidden_dropout": 0.3, "attention_dropout": 0.0}
    expected = loss_and_gradients(gpt(flags))
    again = loss_and_gradients(gpt(flags, recompute=RecomputePlan("full")))
    torch.testing.assert_close(again, expected, rtol=0, atol=0)
    other, _ = loss_and_gradients(gpt({**flags, "bias_dropout_fusion": False}))
    assert not torch.equal(other, expected[0])
    whole = gpt(flags).eval()(batch()[0])
    plain = gpt({**flags, "hidden_dropout": 0.0}).eval()(batch()[0])
    torch.testing.assert_close(whole, plain)


def test_choice(kernels):
    off = model_config(bias_dropout_fusion=False)
    assert choose_bias_dropout_add(model_config(), None) is bias_dropout_add
    assert choose_bias_dropout_add(off, kernels[0]) is bias_dropout_add
    assert isinstance(choose_bias_dropout_add(model_config(), kernels[0]), partial)
