"""Products of a few rows: the kernel against PyTorch in float64."""

import pytest
import torch
import torch.nn.functional as F

from megatron.kernels.few_rows import MOST_ROWS, few_rows_linear
from tests.kernels.compare import BF16, FP16, FP32, fresh

TOLERANCE = {FP32: 1e-5, FP16: 5e-3, BF16: 5e-2}


def case(device, dtype, rows, outputs, size, *, bias=True):
    generator = fresh()
    x = torch.randn(rows, 1, size, generator=generator)
    weight = torch.randn(outputs, size, generator=generator) / size**0.5
    shift = torch.randn(outputs, generator=generator)
    tensors = [x.to(device, dtype), weight.to(device, dtype), shift.to(device, dtype)]
    return tensors if bias else [*tensors[:2], None]


@pytest.mark.parametrize("dtype", [FP32, FP16, BF16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("outputs", "size"), [(16, 256), (33, 8), (1, 1288), (50, 2096)])
@pytest.mark.parametrize("rows", [1, 2, 3, 4])
def test_equals_float64(kernels, dtype, bias, outputs, size, rows):
    library, device = kernels
    inputs = case(device, dtype, rows, outputs, size, bias=bias)
    found = few_rows_linear(library, *inputs)
    assert found.shape == (rows, 1, outputs)
    expected = F.linear(*(None if x is None else x.double() for x in inputs))
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=TOLERANCE[dtype])


def test_bits_do_not_depend_on_the_other_rows(kernels):
    library, device = kernels
    x, weight, bias = case(device, BF16, MOST_ROWS, 20, 520)
    together = few_rows_linear(library, x, weight, bias)
    for row in range(MOST_ROWS):
        alone = few_rows_linear(library, x[row : row + 1], weight, bias)
        assert torch.equal(alone[0], together[row])


@pytest.mark.parametrize(("rows", "size"), [(0, 64), (MOST_ROWS + 1, 64), (1, 12)])
def test_other_sizes_take_the_plain_form(kernels, rows, size):
    library, device = kernels
    inputs = case(device, BF16, rows, 9, size)
    assert torch.equal(few_rows_linear(library, *inputs), F.linear(*inputs))
