"""Activations against their definitions in float64, and the choice between implementations."""

import math

import pytest
import torch

from megatron.kernels import activation
from megatron.kernels.activation import choose_activation
from tests.models.small import config as model_config


def tanh_form(x):
    return x / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))


def gated(x):
    gate, up = x[..., :4], x[..., 4:]
    return gate / (1 + torch.exp(-gate)) * up


DEFINITIONS = {
    "gelu": lambda x: x * torch.special.ndtr(x),
    "gelu_tanh": tanh_form,
    "squared_relu": lambda x: torch.where(x > 0, x * x, 0),
    "relu": lambda x: torch.where(x > 0, x, 0),
    "geglu": lambda x: tanh_form(x[..., :4]) * x[..., 4:],
    "swiglu": gated,
    "quick_geglu": lambda x: x[..., :4] / (1 + torch.exp(-1.702 * x[..., :4])) * x[..., 4:],
}


@pytest.mark.parametrize("name", DEFINITIONS)
def test_equals_the_definition(name):
    generator = torch.Generator().manual_seed(1)
    x = (3 * torch.randn(5, 2, 8, generator=generator)).requires_grad_()
    double = x.detach().double().requires_grad_()
    out, expected = getattr(activation, name)(x), DEFINITIONS[name](double)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-6)
    out.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(x.grad.double(), double.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["swiglu", "geglu", "quick_geglu"])
@pytest.mark.parametrize(("clamp", "offset"), [(1.5, 1.0), (1.5, 0.0), (None, 1.0)])
def test_a_gate_may_be_cut_off_and_its_counterpart_moved(name, clamp, offset):
    generator = torch.Generator().manual_seed(1)
    x, bias = 3 * torch.randn(5, 2, 8, generator=generator), torch.arange(8.0) / 4
    found = choose_activation(name, clamp=clamp, offset=offset)(x, bias)
    gate, up = (x + bias).double().chunk(2, dim=-1)
    if clamp is not None:
        gate, up = gate.clamp(max=clamp), up.clamp(-clamp, clamp)
    # With an up projection of 1, the result is the definition applied to the gate.
    alone = DEFINITIONS[name](torch.cat((gate, torch.ones_like(gate)), dim=-1))
    torch.testing.assert_close(found.double(), alone * (up + offset), rtol=1e-5, atol=1e-6)


def test_the_two_gelus_differ():
    x = torch.tensor(2.0)
    assert abs(activation.gelu(x) - activation.gelu_tanh(x)) > 5e-5


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        ({}, "gelu_tanh"),
        ({"bias_gelu_fusion": False}, "gelu"),
        ({"add_bias_linear": False}, "gelu"),
        ({"openai_gelu": True, "bias_gelu_fusion": False}, "gelu_tanh"),
        ({"onnx_safe": True}, "gelu"),
        ({"squared_relu": True}, "squared_relu"),
        ({"swiglu": True}, "swiglu"),
        ({"geglu": True}, "geglu"),
        ({"quick_geglu": True}, "quick_geglu"),
        ({"relu": True}, "relu"),
    ],
)
def test_choice(flags, name):
    assert choose_activation(model_config(**flags).activation) is getattr(activation, name)
