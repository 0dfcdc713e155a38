"""The activation kernels against the formulas in float64."""

from functools import partial

import pytest
import torch

from megatron.device import Device
from megatron.kernels import activation
from megatron.kernels.activation import KINDS, choose_activation, fused_activation
from tests.kernels.compare import BF16, FP16, FP32, TOLERANCE, check, fresh, run
from tests.models.small import config as model_config

pytestmark = pytest.mark.usefixtures("poisoned")


def inputs_of(name, rows, columns, dtype, device, *, bias):
    generator = fresh()
    width = 2 * columns if name == "swiglu" else columns

    def draw(*size):
        return (2 * torch.randn(*size, generator=generator)).to(device, dtype)

    return [draw(rows, 2, width), draw(width) if bias else None], [draw(rows, 2, columns)]


def both(library, name):
    plain = getattr(activation, name)
    return partial(fused_activation, library, plain), plain


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("dtype", [FP32, FP16, BF16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("rows", "columns"), [(7, 8), (1, 2056)])
def test_equals_float64(kernels, name, dtype, bias, rows, columns):
    library, device = kernels
    inputs, grads = inputs_of(name, rows, columns, dtype, device, bias=bias)
    check(*both(library, name), inputs, grads, TOLERANCE[dtype])


@pytest.mark.parametrize("name", KINDS)
def test_many_rows_and_blocks(kernels, name, monkeypatch):
    library, device = kernels
    if device.type == "cpu":
        monkeypatch.setattr(Device, "multiprocessors", property(lambda _: 2))
    rows, columns = (151, 72) if device.type == "cpu" else (4999, 5632)
    inputs, grads = inputs_of(name, rows, columns, BF16, device, bias=True)
    check(*both(library, name), inputs, grads, TOLERANCE[BF16])


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_far_values_stay_finite(kernels, name, dtype):
    library, device = kernels
    x = torch.tensor([-1e4, -90.0, -20.0, -6.0, 6.0, 20.0, 90.0, 1e4]).repeat(2)
    x = torch.cat((x[:8], torch.ones(8))) if name == "swiglu" else x
    fused, plain = both(library, name)
    inputs = [x.to(device, dtype)[None], None]
    grads = [torch.ones(1, 8 if name == "swiglu" else 16, dtype=dtype, device=device)]
    check(fused, plain, inputs, grads, TOLERANCE[dtype])


@pytest.mark.parametrize("name", KINDS)
def test_odd_sizes_take_the_plain_form(kernels, name):
    library, device = kernels
    inputs, grads = inputs_of(name, 3, 6, FP32, device, bias=True)
    fused, plain = both(library, name)
    for ours, expected in zip(run(fused, inputs, grads), run(plain, inputs, grads), strict=True):
        assert torch.equal(ours, expected)


@pytest.mark.parametrize(
    ("flags", "fused"),
    [
        ({}, True),
        ({"swiglu": True}, True),
        ({"swiglu": True, "bias_gelu_fusion": False}, True),
        ({"openai_gelu": True}, True),
        ({"bias_gelu_fusion": False}, False),
        ({"openai_gelu": True, "bias_gelu_fusion": False}, False),
    ],
)
def test_choice(kernels, flags, fused):
    model = model_config(**flags)
    plain = choose_activation(model.activation)
    chosen = choose_activation(model.activation, kernels[0], fuses_gelu=model.bias_gelu_fusion)
    assert (chosen.args[1] if fused else chosen) is plain
