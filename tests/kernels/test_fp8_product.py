"""Products of 8-bit matrices on a GPU against the reference."""

import pytest
import torch

from megatron.device import Device
from megatron.kernels.fp8 import E4M3, E5M2, Fp8, Fp8Casts
from megatron.kernels.fp8_product import LibraryProduct, choose_fp8_product, reference_product
from tests.kernels.compare import fresh


def _cast(rows: int, columns: int, fp8: torch.dtype, by_row: bool) -> Fp8:
    x = torch.randn(rows, columns, generator=fresh())
    casts = Fp8Casts()
    return casts.cast_rows(x, fp8) if by_row else casts.cast(x, casts.amax(x), fp8)


def _on(device: torch.device, matrix: Fp8) -> Fp8:
    return Fp8(matrix.values.to(device), matrix.inverse.to(device))


def test_a_cpu_multiplies_by_the_reference():
    assert choose_fp8_product(torch.device("cpu")) is reference_product


@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("accumulate", [False, True])
def test_the_reference_is_the_product_of_what_the_casts_hold(by_row, accumulate):
    left, right = _cast(32, 48, E5M2, by_row), _cast(16, 48, E4M3, by_row)
    into = torch.full((32, 16), 2.0)
    reference_product(left, right, torch.float32, into=into, accumulate=accumulate)
    expected = left.dequantized().double() @ right.dequantized().double().t()
    torch.testing.assert_close(
        into.double(), expected + (2 if accumulate else 0), rtol=1e-5, atol=1e-4
    )


@pytest.mark.gpu
@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize(("m", "n", "k"), [(64, 32, 128), (2048, 512, 4096)])
def test_a_gpu_adds_to_fp32_sums(m, n, k, by_row):
    device = Device.pick()
    if not device.is_gpu:
        pytest.skip("needs a GPU")
    left, right = _cast(m, k, E5M2, by_row), _cast(n, k, E4M3, by_row)
    product = choose_fp8_product(device.torch_device)
    assert isinstance(product, LibraryProduct)
    there = [_on(device.torch_device, matrix) for matrix in (left, right)]
    into = torch.full((m, n), 2.0, device=device.torch_device)
    for _ in range(3):
        product(*there, torch.float32, into=into, accumulate=True)
    expected = 2 + 3 * (left.dequantized().double() @ right.dequantized().double().t())
    error = (into.cpu().double() - expected).norm() / expected.norm()
    assert error < 1e-3
    again = torch.full((m, n), 2.0, device=device.torch_device)
    for _ in range(3):
        product(*there, torch.float32, into=again, accumulate=True)
    assert torch.equal(into, again)
