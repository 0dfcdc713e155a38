"""Largest magnitudes that kernels find while they write, and their way to the casts."""

import math
from functools import partial

import pytest
import torch

from megatron.kernels import norm
from megatron.kernels.activation import fused_activation, gelu, swiglu
from megatron.kernels.amax import POOL, VECTORS, Amaxes
from megatron.kernels.fp8 import AMAX, Fp8Casts
from megatron.kernels.library import KernelLibrary, LibraryChoice
from megatron.kernels.norm import fused_add_norm
from megatron.kernels.rope import fused_split_rotate, rotation_table
from tests.kernels.compare import BF16, FP16, FP32, fresh
from tests.models.small import LLAMA, gpt, loss_and_gradients

REFERENCE = Fp8Casts()
pytestmark = pytest.mark.usefixtures("poisoned")


def draw(*size, dtype=BF16, device="cpu"):
    return torch.randn(*size, generator=fresh()).to(device, dtype).requires_grad_()


def check(amaxes, x):
    """x is the last tensor measured, and rightly so."""
    expected = REFERENCE.amax(x.detach())
    found = amaxes.take(x)
    assert found is not None
    assert found.equal(expected), (found, expected)


@pytest.mark.parametrize("bias", [True, False], ids=["layer", "rms"])
@pytest.mark.parametrize("x_dtype", [FP32, BF16])
@pytest.mark.parametrize("shape", [(5, 64), (7, 1032), (9, 2120)])
def test_norm(kernels, bias, x_dtype, shape, monkeypatch):
    library, device = kernels
    monkeypatch.setattr(norm.Device, "multiprocessors", property(lambda _: 2))
    amaxes = Amaxes()
    residual, delta = draw(*shape, dtype=x_dtype, device=device), draw(*shape, device=device)
    weight = draw(shape[1], device=device)
    shift = draw(shape[1], device=device) if bias else None
    total, normal = fused_add_norm(library, residual, delta, weight, shift, 1e-5, amaxes=amaxes)
    check(amaxes, normal)
    torch.autograd.backward([total, normal], [torch.randn_like(total), torch.randn_like(normal)])
    check(amaxes, delta.grad)


@pytest.mark.parametrize("plain", [swiglu, gelu])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(5, 3, 48), (9, 2096)])
def test_activation(kernels, plain, bias, shape):
    library, device = kernels
    amaxes = Amaxes()
    x = draw(*shape, dtype=FP16, device=device)
    shift = draw(shape[-1], dtype=FP16, device=device) if bias else None
    out = fused_activation(library, plain, x, shift, amaxes=amaxes)
    check(amaxes, out)
    out.backward(torch.randn_like(out))
    check(amaxes, x.grad)


@pytest.mark.parametrize("head_size", [16, 80])  # the second fills no whole number of warps
def test_split_rotate(kernels, head_size):
    library, device = kernels
    amaxes = Amaxes()
    qkv = draw(3, 2, 2 * 5 * head_size, device=device)
    rotation = rotation_table(3, 16, device=device)[:, :, None, None].unbind()
    heads = fused_split_rotate(library, qkv, 2, head_size, rotation, amaxes=amaxes)
    assert amaxes.take(qkv) is None
    torch.autograd.backward(heads, [torch.randn_like(x) for x in heads])
    check(amaxes, qkv.grad)


def test_nan_survives(kernels):
    library, device = kernels
    amaxes = Amaxes()
    x = draw(4, 2096, device=device).detach()
    x[2, 70] = math.nan
    out = fused_activation(library, gelu, x, amaxes=amaxes)
    assert amaxes.take(out).isnan()


def test_only_the_very_tensor_is_known(kernels):
    library, device = kernels
    amaxes, x = Amaxes(), draw(4, 16, device=device).detach()
    measured = partial(fused_activation, library, gelu, x, amaxes=amaxes)
    assert amaxes.take(x) is None
    out = measured()
    assert amaxes.take(out.clone()) is None
    assert amaxes.take(out[:2]) is None
    assert amaxes.take(out.view(torch.int16)) is None
    assert amaxes.take(out.view(64)) is not None
    assert amaxes.take(out) is None  # once
    out = measured()
    out.mul_(2)
    assert amaxes.take(out) is None  # changed since
    older = measured()
    measured()
    assert amaxes.take(older) is None


def test_nothing_goes_past_the_start_or_the_end_of_a_recording():
    amaxes, x = Amaxes(), torch.ones(4, 16)
    before = amaxes.new(x.device)
    amaxes.measure(x)
    amaxes.forget()
    assert amaxes.take(x) is None
    after = amaxes.new(x.device)
    assert after.untyped_storage().data_ptr() != before.untyped_storage().data_ptr()
    assert after == 0
    vector = amaxes.new_vector(16, x.device)
    amaxes.forget()
    after = amaxes.new_vector(16, x.device)
    assert after.untyped_storage().data_ptr() != vector.untyped_storage().data_ptr()


def test_its_memory_is_not_another_tensors():
    amaxes = Amaxes()
    places = set()
    for _ in range(20):
        x = torch.ones(64, 64)
        assert amaxes.take(x) is None
        amaxes.measure(x)
        places.add(x.data_ptr())
    assert len(places) > 1  # memory that was free was used again


def test_results_are_zero_and_never_handed_out_twice():
    amaxes = Amaxes()
    results = [amaxes.new(torch.device("cpu")) for _ in range(POOL + 3)]
    for i, result in enumerate(results):
        assert result == 0
        result.add_(i)
    assert [int(x) for x in results] == list(range(POOL + 3))
    other = amaxes.new(torch.device("meta"))
    assert other.device.type == "meta"


def test_vectors_are_zero_and_never_handed_out_twice():
    amaxes, sizes = Amaxes(), [VECTORS // 2, VECTORS // 2 - 16, 32, VECTORS + 16, 16]
    vectors = [amaxes.new_vector(size, torch.device("cpu")) for size in sizes]
    for i, vector in enumerate(vectors):
        assert not vector.any()
        vector.add_(i + 1)
    assert [x.numel() for x in vectors] == sizes
    assert all((x == i + 1).all() for i, x in enumerate(vectors))
    assert amaxes.new_vector(16, torch.device("meta")).device.type == "meta"


class Counting(KernelLibrary):
    """Counts the passes that only measure."""

    def __init__(self, path):
        super().__init__(path)
        self.measured = 0

    def launch(self, kernel, *arguments):
        self.measured += kernel is AMAX
        super().launch(kernel, *arguments)


WIDE = {**LLAMA, "hidden_size": 64, "kv_channels": 16, "ffn_hidden_size": 64, "num_layers": 2}
OLD = {**WIDE, "swiglu": False, "normalization": "LayerNorm", "add_bias_linear": True}


@pytest.mark.parametrize("flags", [WIDE, OLD], ids=["llama", "gpt"])
@pytest.mark.parametrize("wgrad", [True, False])
def test_a_model_gives_the_same_bits(emulated, flags, wgrad, monkeypatch):
    """Handed over or measured again; only weights and attention's output are measured apart."""
    monkeypatch.setattr("tests.models.small.SEQUENCE", 16)
    library = Counting(emulated.path)
    fused = LibraryChoice(library, "emulated")
    monkeypatch.setattr("megatron.parallel.build.find_library", lambda _: fused)
    numbers = {"bf16": True, "fp8_format": "hybrid", "fp8_wgrad": wgrad}

    def run():
        library.measured = 0
        model = gpt(flags, numbers, dtype=BF16)
        return loss_and_gradients(model), library.measured

    result, passes = run()
    assert passes == 2 * (4 + 1)  # layers: four weights, one activation
    monkeypatch.setattr(Amaxes, "take", lambda *_: None)
    again, passes = run()
    assert passes == 2 * 4 * 3
    torch.testing.assert_close(again, result, rtol=0, atol=0)
