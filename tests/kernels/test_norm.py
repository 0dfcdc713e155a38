"""Norms: both forms against float64, in every combination of types."""

import pytest
import torch

from megatron.kernels.norm import normalize, normalize_reference

EPSILON = 1e-3  # large enough that leaving it out is visible


def tensors(x_dtype, weight_dtype):
    generator = torch.Generator().manual_seed(1)
    x = 0.1 * torch.randn(3, 2, 16, generator=generator) + 0.3
    weight = 1 + 0.2 * torch.randn(16, generator=generator)
    bias = torch.randn(16, generator=generator)
    tensors = x.to(x_dtype), weight.to(weight_dtype), bias.to(weight_dtype)
    return [t.requires_grad_() for t in tensors]


def _without_bias(function):
    return lambda x, weight, epsilon: function(x, weight, None, epsilon)


def layer_norm_exact(x, weight, bias, epsilon):
    mean, var = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, unbiased=False)
    return (x - mean) / (var + epsilon).sqrt() * weight + bias


def rms_norm_exact(x, weight, epsilon):
    return x / ((x * x).mean(-1, keepdim=True) + epsilon).sqrt() * weight


CASES = {
    "layer": (normalize, layer_norm_exact, 3),
    "layer reference": (normalize_reference, layer_norm_exact, 3),
    "rms": (_without_bias(normalize), rms_norm_exact, 2),
    "rms reference": (_without_bias(normalize_reference), rms_norm_exact, 2),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("x_dtype", "weight_dtype"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16),
        (torch.float32, torch.bfloat16),
    ],
)
def test_norm_equals_float64(case, x_dtype, weight_dtype):
    function, exact, count = CASES[case]
    inputs = tensors(x_dtype, weight_dtype)[:count]
    doubles = [t.detach().double().requires_grad_() for t in inputs]
    out, expected = function(*inputs, EPSILON), exact(*doubles, EPSILON)
    assert out.dtype == weight_dtype
    tolerance = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}[weight_dtype]
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)
    torch.manual_seed(1)
    grad = torch.randn_like(expected).to(out.dtype)
    out.backward(grad)
    expected.backward(grad.double())
    for ours, theirs in zip(inputs, doubles, strict=True):
        scale = theirs.grad.abs().max().item()
        torch.testing.assert_close(
            ours.grad.double() / scale, theirs.grad / scale, rtol=0, atol=3 * tolerance
        )


def test_bf16_statistics_are_fp32():
    """bf16 sums would lose the mean and its small deviations; only the result may be rounded."""
    x = torch.linspace(100, 101, 4096).bfloat16()
    weight, bias = torch.ones(4096).bfloat16(), torch.zeros(4096).bfloat16()
    expected = layer_norm_exact(x.double(), weight.double(), bias.double(), 1e-5).bfloat16()
    for function in (normalize, normalize_reference):
        torch.testing.assert_close(function(x, weight, bias, 1e-5), expected, rtol=1e-2, atol=1e-2)
