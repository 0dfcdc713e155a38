"""Products whose rows do not depend on their number."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.nn.functional as F

from megatron.device import Device
from megatron.kernels.row_product import LibraryRowProduct, choose_row_product
from tests.kernels.compare import BF16, FP16, fresh

DEVICE = Device.pick()
needs_gpu = pytest.mark.skipif(not DEVICE.is_gpu, reason="needs a GPU")
# [out, in]: where k is cut and where it is not, of a whole Llama 3 8B and of parts of smaller ones.
WEIGHTS = [
    (4096, 4096),
    (4096, 14336),
    (6144, 4096),
    (1024, 4096),
    (768, 3072),
    (512, 256),
    (8, 64),
]


def test_a_cpu_has_none() -> None:
    assert choose_row_product(torch.device("cpu")) is None


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("weight_shape", WEIGHTS)
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_row_has_the_same_bits_among_any_others(dtype, weight_shape, with_bias, caplog) -> None:
    multiply = choose_row_product(DEVICE.torch_device)
    assert isinstance(multiply, LibraryRowProduct)
    generator = fresh()
    outputs, inputs = weight_shape
    x, weight = (
        torch.randn(rows, inputs, generator=generator).to(DEVICE.torch_device, dtype)
        for rows in (1300, outputs)
    )
    bias = None
    if with_bias:
        bias = torch.randn(outputs, generator=generator).to(DEVICE.torch_device, dtype)
    with caplog.at_level(logging.WARNING):
        whole = multiply(x, weight, bias)
    assert not caplog.records
    wide = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    error = (whole.double() - wide).abs().max() / wide.abs().max()
    assert error < {BF16: 4e-3, FP16: 5e-4}[dtype]
    for count in (1, 2, 5, 7, 13, 16, 31, 64, 100, 128, 129, 255, 256, 300, 511, 512, 513, 1024):
        for first in (0, 1300 - count):
            part = multiply(x[first : first + count], weight, bias)
            assert torch.equal(part, whole[first : first + count]), (count, first)


def test_a_weight_that_the_library_does_not_take_is_said_once(caplog) -> None:
    multiply = LibraryRowProduct(None)  # type: ignore[arg-type]  # which is not asked
    x, weight = (torch.randn(rows, 8, generator=fresh()).to(BF16) for rows in (3, 5))
    with caplog.at_level(logging.WARNING):
        for count in (3, 2):
            assert torch.equal(multiply(x[:count], weight, None), F.linear(x[:count], weight))
    assert [record.getMessage().split(" may ")[0] for record in caplog.records] == [
        "text generation: products with weights [5, 8]"
    ]


@pytest.mark.gpu
@needs_gpu
def test_what_it_does_not_take_pytorch_multiplies() -> None:
    multiply = choose_row_product(DEVICE.torch_device)
    assert multiply is not None
    for rows, outputs, inputs, dtype in (
        (3, 5, 8, BF16),
        (3, 8, 9, BF16),
        (3, 8, 8, torch.float32),
    ):
        x = torch.randn(rows, inputs, generator=fresh()).to(DEVICE.torch_device, dtype)
        weight = torch.randn(outputs, inputs, generator=fresh()).to(DEVICE.torch_device, dtype)
        assert torch.equal(multiply(x, weight, None), F.linear(x, weight))
    assert multiply(x[:0], weight, None).shape == (0, 8)
