"""A weight's gradient, overwritten or accumulated, against float64."""

import math

import pytest
import torch

from megatron.device import Device
from megatron.kernels.weight_gradient import weight_gradient
from tests.kernels.compare import seed_afresh

GPU = pytest.param("gpu", marks=pytest.mark.gpu)


@pytest.mark.parametrize("where", ["cpu", GPU])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("into_dtype", [torch.float32, None])
def test_equals_float64(where, dtype, into_dtype):
    device = Device.pick() if where == "gpu" else Device.cpu()
    if where == "gpu" and not device.is_gpu:
        pytest.skip("needs a GPU")
    seed_afresh()
    grad = torch.randn(40, 3, 24, device=device.torch_device).to(dtype)
    x = torch.randn(40, 3, 16, device=device.torch_device).to(dtype)
    product = grad.flatten(0, 1).double().t() @ x.flatten(0, 1).double()
    storage = torch.full((2, 24, 16), math.nan, device=device.torch_device)
    into = storage.to(into_dtype or dtype)[1]
    weight_gradient(grad, x, into, accumulate=False)  # previous values are gone
    tolerance = 3e-6 if into.dtype == torch.float32 else 2e-2
    if where == "gpu" and dtype == torch.float32:
        tolerance = 1e-3  # tf32 if it is allowed
    scale = product.abs().max().item()
    torch.testing.assert_close(into.double(), product, rtol=0, atol=tolerance * scale)
    before, again = into.double(), into.clone()
    weight_gradient(grad, x, into, accumulate=True)
    weight_gradient(grad, x, again, accumulate=True)
    assert torch.equal(into, again)
    torch.testing.assert_close(into.double(), before + product, rtol=0, atol=2 * tolerance * scale)


def test_16_bit_inputs_are_summed_in_fp32():
    """A thousand small terms are added to a large one: 16-bit sums lose them."""
    grad, x = torch.ones(1025, 1).bfloat16(), torch.ones(1025, 1).bfloat16()
    x[0] = 1024
    into = torch.full((1, 1), 0.25)
    weight_gradient(grad, x, into, accumulate=True)
    assert into.item() == 2048.25
