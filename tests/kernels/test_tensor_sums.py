"""Sums over many tensors against float64: plain form and kernel."""

import math

import pytest
import torch

from megatron.kernels.tensor_sums import CHUNK, choose_tensor_sums
from tests.kernels.compare import seed_afresh

CPU = torch.device("cpu")


def tensors(device):
    """Return tensors of sizes near a block's, with starts unaligned to 16 bytes, in two formats."""
    seed_afresh()
    storage = torch.randn(CHUNK * 2 + 100)
    storage[::7] = 0
    views = [storage[1 : CHUNK + 8], storage[CHUNK + 8 :], storage[4:5], storage[:0]]
    half = torch.randn(3000).half()
    return [x.to(device) if device != CPU else x for x in (*views, half)]


def check(values, sums):
    squares = sum(x.double().square().sum().item() for x in values)
    nonzero = sum(x.count_nonzero().item() for x in values)
    found = sums()
    assert found.dtype == torch.float64
    assert found[0].item() == pytest.approx(squares, rel=1e-6)
    assert found[1].item() == nonzero
    assert torch.equal(found, sums())


def test_plain_equals_float64():
    values = tensors(CPU)
    check(values, choose_tensor_sums(values, CPU, None))


def test_kernel_equals_float64(kernels):
    library, device = kernels
    values = tensors(device)
    sums = choose_tensor_sums(values, device, library)
    check(values, sums)
    values[1][17] = math.inf  # the table sees the tensors' current values
    assert sums()[0].isinf()
    values[1][17] = math.nan
    assert sums()[0].isnan()


def test_nothing_to_add_up(kernels):
    library, device = kernels
    assert choose_tensor_sums([], device, library)().tolist() == [0, 0]
    assert choose_tensor_sums([], device, None)().tolist() == [0, 0]
