"""Products of a fixed number of rows: the bits of a row do not depend on the others."""

import pytest
import torch

from megatron.parallel.products import FixedRows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_whatever_comes_with_it(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(96, 200, generator=generator).to(dtype)
    bias = torch.randn(96, generator=generator).to(dtype)
    x = torch.randn(13, 1, 200, generator=generator).to(dtype)
    products = FixedRows(4)
    whole, _ = products.forward(x, weight, bias)
    assert whole.shape == (13, 1, 96)
    torch.testing.assert_close(whole, torch.nn.functional.linear(x, weight, bias))
    for first in range(13):
        for last in range(first + 1, 14):
            part, _ = products.forward(x[first:last], weight, bias)
            assert torch.equal(part, whole[first:last])
    nothing, _ = products.forward(x[:0], weight, bias)
    assert nothing.shape == (0, 1, 96)
