"""Matrix products whose rows do not depend on how many there are."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.nn.functional as F

from megatron.device import Device
from megatron.kernels.row_product import RowProduct, choose_row_product
from tests.kernels.compare import BF16, FP16, fresh

DEVICE = Device.pick()
needs_gpu = pytest.mark.skipif(not DEVICE.is_gpu, reason="needs a GPU")
# [out, in]: some with a split k and some without, from a whole Llama 3 8B and from parts of smaller
# models.
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


class _Library:
    """A stand-in for cuBLASLt with kernels (kind, cut).

    Kind 7 adds the parts of k in order, and kind 9 in an order that depends on the number of rows.
    For many rows it lists others first, and has none that splits k.
    """

    def __init__(self, kind=7, cut=4):
        self.asked, self._kind, self._cut, self.calls = [], kind, cut, []

    def problem(self, left, right, out, *, bias):
        assert out.shape == (len(left), len(right))
        return (len(left), bias)

    def algorithms(self, problem, gpu, count, *, workspace, whole=False):
        rows, _ = problem
        if count == 1:
            return [(self._kind, self._cut)]
        others = [(3, 1), (self._kind, 1)]
        return others if whole or rows > 100 else [(3, 2), (self._kind, 4), *others]

    def kind(self, algorithm):
        return algorithm[0]

    def split_k(self, algorithm):
        return algorithm[1]

    def with_split_k(self, problem, gpu, algorithm, cut, *, workspace):
        return (algorithm[0], cut)

    def multiply(self, problem, algorithm, left, right, out, *, bias=None):
        assert problem == (len(left), bias is not None)
        self.calls.append((len(left), algorithm))
        kind, cut = algorithm
        parts = [a @ b.t() for a, b in zip(left.chunk(cut, 1), right.chunk(cut, 1), strict=True)]
        total = sum(parts) * (1 + (len(left) % 2) * 2**-4 * (kind == 9))
        out.copy_(total if bias is None else total + bias)


def random(rows, columns, dtype=BF16):
    return torch.randn(rows, columns, generator=fresh()).to(dtype)


@pytest.mark.parametrize("cut", [1, 4])
def test_a_weight_keeps_one_family_and_one_cut(cut) -> None:
    """If k is cut, it is cut in two, and many rows are split, because the parts take memory."""
    library = _Library(cut=cut)
    multiply = RowProduct(library)
    weight, bias = random(16, 64), random(16, 1).flatten()
    for rows in (1, 3, 600):
        x = random(rows, 64)
        library.calls.clear()
        expected = x.double() @ weight.double().t() + bias.double()
        # Each part, their sum, and the sum with the bias are rounded to 8 digits.
        bound = 2**-6 * (x.double().abs() @ weight.double().abs().t() + bias.double().abs())
        assert ((multiply(x, weight, bias).double() - expected).abs() < bound).all()
        pieces = [rows] if cut == 1 or rows <= 512 else [512, rows - 512]
        assert library.calls[-len(pieces) :] == [(n, (7, min(cut, 2))) for n in pieces]


def test_what_does_not_add_up_in_one_order_is_left_to_pytorch_and_reported(caplog) -> None:
    library = _Library(kind=9)
    multiply = RowProduct(library)
    x, weight, other = random(3, 64), random(16, 64), random(15, 64)
    with caplog.at_level(logging.WARNING):
        assert torch.equal(multiply(x, weight, None), F.linear(x, weight))
        assert torch.equal(multiply(x, other, None), F.linear(x, other))
        multiply(x, weight, None)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2, "once for each shape"
    assert "[16, 64]" in said[0]
    assert "[15, 64]" in said[1]


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("weight_shape", WEIGHTS)
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_row_has_the_same_bits_among_any_others(dtype, weight_shape, with_bias, caplog) -> None:
    multiply = choose_row_product(DEVICE.torch_device)
    assert isinstance(multiply, RowProduct)
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


def test_a_weight_that_the_library_does_not_take_is_reported_once(caplog) -> None:
    multiply = RowProduct(None)  # type: ignore[arg-type]  # the library is not asked
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
